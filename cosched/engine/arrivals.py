"""When a request came that the scheduler sees between two iterations."""

from __future__ import annotations

import math
from typing import Any

from cosched.engine import port
from cosched.engine.observe import IterationObserver

__all__ = ["Arrivals"]

_MOST_ON_ITS_WAY_S = 10.0
"""From the server's door to the scheduler: prompts are made into tokens on the way. What is further
back is another machine's clock."""


class Arrivals:
    """The scheduler looks for requests between two iterations only, and a client counts from when
    it sent its own. The server says when that was; of whom it does not (`LocalEngine`, other
    machines), who came while an iteration ran has waited for half of it in the mean."""

    def __init__(self, observer: IterationObserver) -> None:
        self._observer = observer
        self._looked_s = math.inf

    def looked(self, now_s: float) -> None:
        """The scheduler has looked for requests, and plans or has nothing to do."""
        self._looked_s = now_s

    def came_s(self, req: Any, seen_s: float) -> float:
        """When one came that is seen now: as the server says, or in the middle since the scheduler
        looked before, if an iteration has ended since."""
        created_s = port.created_s(req)
        if created_s and seen_s - _MOST_ON_ITS_WAY_S <= created_s <= seen_s:
            return created_s
        was_busy = self._looked_s < self._observer.last_done_s
        return (self._looked_s + seen_s) / 2 if was_busy else seen_s
