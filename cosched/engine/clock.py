"""Time, injected. Every other module asks a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "EngineClock"]


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since an arbitrary fixed point; never goes back."""
        ...


class EngineClock:
    """The one clock of a scheduler, which all that is attached to it holds: wall time, until it
    follows another."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = time.perf_counter

    def follow(self, clock: Clock) -> None:
        """Take time from another clock; before the first request comes."""
        self.now_s = clock.now_s
