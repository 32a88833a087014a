"""What the engine and the attention backend ``cosched_shared_prefix`` share.

The backend and its kernels (`cosched.engine.port.shared_prefix`) are imported when it is built, so
that other backends pay nothing for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)

NAME = "cosched_shared_prefix"


@dataclass(slots=True, eq=False)
class Launch:
    """One run of a batch."""

    batch: Any


_launched: Launch | None = None
_newest: weakref.ref[Any] | None = None
_is_assumed = False


@contextlib.contextmanager
def launching(batch: Any) -> Iterator[None]:
    """While the engine runs this batch, attention backends may read its requests."""
    global _launched
    before, _launched = _launched, Launch(batch)
    try:
        yield
    finally:
        _launched = before


def launched() -> Launch | None:
    """The present run."""
    return _launched


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


def note_newest(shared: Any) -> None:
    """The `SharedPrefixes` of the model runner that is being built."""
    global _newest
    _newest = weakref.ref(shared)


def reads_once() -> bool:
    """Whether attention in this process reads a shared prefix once for all its requests."""
    return _is_assumed or (_newest is not None and _newest() is not None)


@contextlib.contextmanager
def assuming_one_reading(is_assumed: bool) -> Iterator[None]:
    """While a scheduler with modelled attention is built: `reads_once` is True, or as it is."""
    global _is_assumed
    before, _is_assumed = _is_assumed, is_assumed
    try:
        yield
    finally:
        _is_assumed = before


def graph_variants() -> Any:
    """SGLang's `AttentionGraphVariants` for the model runner that is being built; None: it has
    another backend."""
    return None if _newest is None else _newest()
