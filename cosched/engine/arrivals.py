"""When a request came that the scheduler saw between two iterations."""

from __future__ import annotations

import math

from cosched.engine.observe import IterationObserver

__all__ = ["Arrivals"]


class Arrivals:
    """The scheduler looks for requests between two iterations only: who waits for that has waited
    for half of one in the mean, and its client counts from when it came."""

    def __init__(self, observer: IterationObserver) -> None:
        self._observer = observer
        self._looked_s = math.inf

    def looked(self, now_s: float) -> None:
        """The scheduler has looked for requests, and plans or has nothing to do."""
        self._looked_s = now_s

    def came_s(self, seen_s: float) -> float:
        """When one came that is seen now: in the middle since the scheduler looked before, if an
        iteration has ended since."""
        was_busy = self._looked_s < self._observer.last_done_s
        return (self._looked_s + seen_s) / 2 if was_busy else seen_s
