"""No request waits for a compiler without a GPU.

SGLang marks some operations of the sampler (repetition penalties) with ``torch.compile``.
The first request that asks for one stops the scheduler for as long as Inductor and the C++ compiler
take on a CPU: several seconds with a filled cache, half a minute without. Run as they are written,
these operations take well under a millisecond.
"""

from __future__ import annotations

from typing import Any

import torch

from cosched.bootstrap import has_cuda

__all__ = ["run_uncompiled"]


def run_uncompiled(server_args: Any) -> None:
    """Ignore ``torch.compile`` in this process from now on, unless there is a GPU or the operator
    asks for compilation (``--enable-torch-compile``)."""
    if not has_cuda() and not server_args.enable_torch_compile:
        torch.compiler.set_stance("force_eager")
