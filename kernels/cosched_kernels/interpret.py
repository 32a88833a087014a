"""Triton kernels without a GPU: run by Triton's interpreter, for correctness and not for speed.

A kernel is kept as the plain Python function, and compiled or interpreted by where its tensors are.
So one process can do both, and needs no environment variable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def launch(
    kernel: Callable[..., None], grid: tuple[int, ...], /, *args: Any, **kwargs: Any
) -> None:
    """Run a kernel function on the device of its first argument, a tensor; on a CPU in Triton's
    interpreter, which knows float32 and float16 but gets bfloat16 wrong."""
    if isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu":
        repair_interpreter()
        for option in ("num_warps", "num_stages"):
            kwargs.pop(option, None)
        _interpreted(kernel)[grid](*args, **kwargs)
    else:
        compiled(kernel)[grid](*args, **kwargs)


def is_interpreting() -> bool:
    """Whether this process interprets kernels (``TRITON_INTERPRET=1``)."""
    return bool(knobs.runtime.interpret)


@cache
def compiled(kernel: Callable[..., None]) -> JITFunction[Any]:
    """The kernel for a GPU. Compiles at its first launch."""
    return JITFunction(kernel)


@cache
def _interpreted(kernel: Callable[..., None]) -> InterpretedFunction[Any]:
    return InterpretedFunction(kernel)


@cache
def repair_interpreter() -> None:
    """Let ``range`` in an interpreted kernel take a loaded number.

    The interpreter holds a scalar as an array of one element; before Triton 3.7.1 it makes an index
    of it by ``int``, which NumPy refuses from version 2.4 on.
    """
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    interpreter._patch_lang_tensor = patch
