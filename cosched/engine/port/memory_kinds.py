"""Reads each kind of memory that an engine has beside the KV of full attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from cosched.core.caps import EngineCaps
from cosched.core.memories import Memory
from cosched.core.request import Request
from cosched.core.view import View
from cosched.engine.port.memory import (
    Tokens,
    host_free,
    host_total,
    num_own_in_window,
    reserve_ratio,
    window_pool,
    window_slack,
    window_tokens,
)
from cosched.engine.port.states import (
    checkpoint_tokens,
    num_kept,
    slots_held,
    slots_left,
    slots_per_request,
)
from cosched.memory.host_memory import HostMemory
from cosched.memory.state_memory import StateMemory
from cosched.memory.window_memory import WindowMemory


class EngineView(View, Protocol):
    """The view for which it is read: `cosched.engine.view_of.SchedulerView`. Its requests have the
    engine's as `req`."""

    def output_left(self) -> tuple[Any, Any]:
        """Of running requests, in their order: output that is still to come, and whether the engine
        keeps all of it free. Arrays."""
        ...

    def gain_of(self, request: Request) -> Tokens:
        """What preempting it would make free or evictable. Cached."""
        ...


def memories_of(scheduler: Any, view: EngineView) -> Sequence[Memory]:
    """Those that it has, as they are now."""
    found = [read(scheduler, view) for read in _READERS]
    return [memory for memory in found if memory is not None]


def _states(scheduler: Any, view: EngineView) -> StateMemory | None:
    per_request = slots_per_request(scheduler)
    if not per_request:
        return None
    return StateMemory(
        slots_left(scheduler),
        per_request=per_request,
        held=slots_held(scheduler),
        num_kept=lambda request: num_kept(request.req),  # type: ignore[attr-defined]
        least_chunk=checkpoint_tokens(scheduler),
    )


class _WindowReads:
    """Implements `cosched.memory.window_memory.WindowReads`."""

    def __init__(self, scheduler: Any, view: EngineView) -> None:
        self._view = view
        self._caps: EngineCaps = view.caps
        self._most = (window_tokens(scheduler) or 0) + window_slack(scheduler)
        self._ratio = reserve_ratio(scheduler)

    @cached_property
    def reserves(self) -> Any:
        """Of each running request: its `output`, until it returns as much as it takes."""
        num_left, is_certain = self._view.output_left()
        num_left = np.clip(num_left, 0, self._caps.max_reserved_tokens)
        output = np.where(is_certain, num_left, np.ceil(num_left * self._ratio))
        running: Any = self._view.running
        held = [num_own_in_window(request.req) for request in running]
        return np.minimum(output, np.maximum(self._most - np.array(held, int), 0))

    def output(self, request: Any) -> int:
        num_left: int = max(request.max_new_tokens - request.num_output_tokens, 0)
        num_left = min(num_left, self._caps.max_reserved_tokens)
        return num_left if request.reserves_all else math.ceil(num_left * self._ratio)

    def reserve_of(self, request: Request) -> int:
        place = next(n for n, running in enumerate(self._view.running) if running is request)
        return int(self.reserves[place])

    def gain(self, request: Request) -> int:
        return self._view.gain_of(request).in_window


def _windows(scheduler: Any, view: EngineView) -> WindowMemory | None:
    if window_tokens(scheduler) is None:
        return None
    reads = _WindowReads(scheduler, view)
    pool = window_pool(scheduler, reserved=int(np.add.reduce(reads.reserves)))
    return WindowMemory(view, pool, reads)


def _host(scheduler: Any, view: EngineView) -> HostMemory | None:
    return HostMemory(host_free(scheduler)) if host_total(scheduler) else None


_READERS: Sequence[Callable[[Any, EngineView], Memory | None]] = (_states, _windows, _host)
