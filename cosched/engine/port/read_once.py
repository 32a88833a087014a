"""What the engine and the attention backend ``cosched_shared_prefix``, which reads a shared prefix
once for all its requests, know of each other. Imports nothing of SGLang.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
