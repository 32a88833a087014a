"""How a request is read when it arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cosched.core.tiers import Tier
from cosched.engine import port
from cosched.engine.observe import IterationObserver
from cosched.wire import Bounds

_MOST_ON_ITS_WAY_S = 10.0
"""Longest time between the HTTP server and the scheduler, tokenization included. A time further
back is that of another machine's clock."""


class Arrivals:
    """When requests arrived. The scheduler receives requests between two iterations only, and a
    client measures from when it sent its request. The server records that time. Where it does not
    (`LocalEngine`, other machines), a request that arrived during an iteration is taken to have
    arrived in its middle."""

    def __init__(self, observer: IterationObserver) -> None:
        self._observer = observer
        self._looked_s = math.inf

    def looked(self, now_s: float) -> None:
        """The scheduler has received requests, and plans or is idle."""
        self._looked_s = now_s

    def came_s(self, req: Any, seen_s: float) -> float:
        """When a request arrived that is received now: the server's time, or the middle of the time
        since requests were last received, if an iteration has ended since then."""
        created_s = port.created_s(req)
        if created_s and seen_s - _MOST_ON_ITS_WAY_S <= created_s <= seen_s:
            return created_s
        was_busy = self._looked_s < self._observer.last_done_s
        return (self._looked_s + seen_s) / 2 if was_busy else seen_s


class Intake(NamedTuple):
    """bounds    the operator's, for targets of requests
    tiers     of online requests
    arrivals  when requests arrived; None: now
    """

    bounds: Bounds = Bounds()
    tiers: Sequence[Tier] = ()
    arrivals: Arrivals | None = None
