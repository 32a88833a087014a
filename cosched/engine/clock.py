"""Time, injected. Every other module asks a clock."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "WallClock"]


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since an arbitrary fixed point; never goes back."""
        ...


class WallClock:
    def now_s(self) -> float:
        return time.perf_counter()
