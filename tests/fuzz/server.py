"""`cosched.launch_server` where LoRA works without a GPU too.

SGLang pins host memory for adapters whatever the device is; a CPU build of torch cannot. Processes
that a server starts import its main module, so that this reaches all of them.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # first

import sys
from collections.abc import Callable
from typing import Any

import torch


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return call


if not cosched.bootstrap.has_cuda():
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self

if __name__ == "__main__":
    from cosched.launch_server import main

    main(sys.argv[1:])
