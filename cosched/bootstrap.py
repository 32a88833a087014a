"""Prepare a process to run SGLang, also where there is no GPU.

Import this module before anything of ``sglang``::

    import cosched.bootstrap  # noqa: F401

With a CUDA GPU it changes nothing. Without one it

* switches SGLang to its CPU engine (``SGLANG_USE_CPU_ENGINE=1``);
* puts a stand-in for ``sgl_kernel`` on the import path when the real package is absent: SGLang
  imports its names on every platform, while the CPU path with the ``torch_native`` attention
  backend calls none of them. Calling one raises, naming the function. So do the operators that
  Qwen3.5 reads at import, without which no processor of Qwen's images could be imported;
* defines the two operator schemas (``torchvision::nms``, ``torchvision::qnms``) that torchvision
  declares fakes for, when its compiled operators do not fit the installed torch;
* leaves out the compiled operators of torchaudio, which may not fit either: SGLang reads sound with
  what is written in Python;
* drops SGLang's warnings about models and kernels that need a GPU (some 25 lines per process).

SGLang's child processes need it too, and import ``sglang`` before they load plugins. With ``cosched
serve`` they import `cosched.launch_server` first; for SGLang's own commands see
`cosched.cpu_install`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_STAND_IN = "sgl_kernel"
_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Of ``torch.ops.sgl_kernel``: those that SGLang reads when it imports a model on a CPU."""


def has_cuda() -> bool:
    """Whether torch sees a CUDA GPU in this process (``CUDA_VISIBLE_DEVICES`` honoured)."""
    import torch

    available: bool = torch.cuda.is_available()
    return available


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For the import of all of SGLang, of which a fifth would go into looking for garbage. After it
    garbage is looked for as before, also where an import fails."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _MissingKernel:
    """Takes the place of one name of ``sgl_kernel``; raises when it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        # Constants such as ``scalar_types.uint4b8`` are read at import time.
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__} needs the compiled sgl_kernel package (a GPU build of SGLang); "
            "this process runs cosched's CPU stand-in"
        )


class _StandInModule(ModuleType):
    """A module in which every public name exists and none can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _MissingKernel(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``sgl_kernel`` and every submodule of it."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _STAND_IN or fullname.startswith(_STAND_IN + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandInModule(spec.name)
        vars(module)["__version__"] = "0.0.0+cosched.stand.in"
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


def _install_kernel_stand_in() -> None:
    if importlib.util.find_spec(_STAND_IN) is None:
        import torch

        sys.meta_path.append(_StandInFinder())
        for name in _OPERATORS:
            setattr(torch.ops.sgl_kernel, name, _MissingKernel(f"torch.ops.{_STAND_IN}.{name}"))


def _define_torchvision_schemas() -> None:
    """Define ``torchvision::nms``/``qnms`` unless torchvision's own library can.

    A CUDA build of torchvision beside a CPU build of torch cannot load its compiled operators, and
    registering its fake kernels then fails for want of the schemas.
    """
    import torch

    if torch.version.cuda is not None or "torchvision" in sys.modules:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The library object must live as long as the process: its destructor undefines the schemas.
    globals()["_torchvision_library"] = library


def _leave_out_torchaudio_operators() -> None:
    """Let torchaudio do without its compiled operators, as it can where they are not built.

    A CUDA build of torchaudio beside a CPU build of torch cannot be imported otherwise.
    """
    import torch

    if torch.version.cuda is not None or "torchaudio" in sys.modules:
        return
    extension = ModuleType("torchaudio._extension")
    vars(extension).update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False,
        _IS_ALIGN_AVAILABLE=False,
        fail_if_no_align=lambda function: function,
    )
    sys.modules[extension.__name__] = extension


_NEEDS_GPU = (
    "Only CUDA, .* currently",
    "Triton is not supported on current platform, roll back to CPU",
)
"""Of SGLang's warnings at import, those that say only that there is no GPU."""

_IMPORTERS = ("sglang.srt.models.registry", "sglang.srt.managers.multimodal_processor")
"""Loggers of the modules that import every model and skip those that need GPU packages."""


def _is_no_skipped_import(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Ignore import error when loading sglang.")


def _silence_missing_gpu() -> None:
    for pattern in _NEEDS_GPU:
        warnings.filterwarnings("ignore", message=pattern, category=UserWarning)
    for name in _IMPORTERS:
        logging.getLogger(name).addFilter(_is_no_skipped_import)


def prepare() -> None:
    """Make ``import sglang`` work in this process. Idempotent."""
    if globals().get("_prepared"):
        return
    globals()["_prepared"] = True
    if has_cuda():
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _install_kernel_stand_in()
    _define_torchvision_schemas()
    _leave_out_torchaudio_operators()
    _silence_missing_gpu()


prepare()
