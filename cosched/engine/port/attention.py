"""Registers the attention backend ``cosched_shared_prefix`` with SGLang.

The backend and its kernels (`cosched.engine.port.shared_prefix`) are imported when it is built, so
that other backends pay nothing for it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)

from cosched.engine.port.read_once import NAME


def prefills_wait(scheduler: Any) -> bool:
    """Whether the launch of a batch with prefills waits until the device is idle. FlashInfer plans
    it from what it copies from the device; FlashAttention-3 and Triton do not."""
    prefill, _ = attention_backends_of(resolving_view(scheduler.server_args))
    return bool(prefill == "flashinfer")


def register() -> None:
    """Add the backend to ``--attention-backend``. Idempotent."""
    if NAME not in ATTENTION_BACKENDS:
        choices.add_attention_backend_choices([NAME])
        register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    from cosched.engine.port.shared_prefix import create

    return create(runner)
