"""What the engine and attention that reads a shared prefix once for all its requests know of each
other. Imports nothing of SGLang.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Launch:
    """One run of a batch."""

    batch: Any


@dataclass(slots=True, kw_only=True)
class SharedRuns:
    """What ran with shared prefixes since the start.

    beside          the attention backend of all else
    num_iterations  iterations
    num_decodes     decodes in them
    latest          the last one
    """

    beside: str
    num_iterations: int = 0
    num_decodes: int = 0
    latest: Launch | None = None

    def count(self, launch: Launch, *, num_decodes: int) -> None:
        """The layers of this run share. May be said twice of one."""
        if launch is not self.latest:
            self.latest = launch
            self.num_iterations += 1
            self.num_decodes += num_decodes


_launched: Launch | None = None
_newest: weakref.ref[Any] | None = None
_why_not: str | None = None
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
    global _newest, _why_not
    _newest, _why_not = weakref.ref(shared), None


def note_none(why: str | None = None) -> None:
    """The model runner that is being built has none. why: what its model or KV memory lacks."""
    global _newest, _why_not
    _newest, _why_not = None, why


def why_none() -> str | None:
    """What the newest model runner lacks for it."""
    return _why_not


def shared_runs() -> SharedRuns | None:
    """Of this process; None: its attention shares nothing."""
    shared = None if _newest is None else _newest()
    runs: SharedRuns | None = None if shared is None else shared.runs
    return runs


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
