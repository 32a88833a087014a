"""Time, injected. Every other module asks a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since an arbitrary fixed point; never goes back."""
        ...

    def wait_until(self, time_s: float, is_over: Callable[[], bool]) -> bool:
        """Return at that time [s], or as soon as `is_over` says so. Whether it does."""
        ...


_POLL_S = 0.0005
"""Between two looks whether what was waited for has come."""


class EngineClock:
    """The one clock of a scheduler, which all that is attached to it holds: wall time, until it
    follows another."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = time.perf_counter
        self.wait_until: Callable[[float, Callable[[], bool]], bool] = self._sleep_until
        """As of `Clock`."""

    def follow(self, clock: Clock) -> None:
        """Take time from another clock; before the first request comes."""
        self.now_s = clock.now_s
        self.wait_until = clock.wait_until

    def _sleep_until(self, time_s: float, is_over: Callable[[], bool]) -> bool:
        while (left_s := time_s - self.now_s()) > 0:
            if is_over():
                return True
            time.sleep(min(left_s, _POLL_S))
        return False
