"""KV kept for online requests: mean and deviation of their demand in a sliding window (Echo §5.3).

Echo bounds what offline requests may hold by what online ones held in the last hour: mean plus two
deviations. Here the demand also counts contexts that are about to return, whether or not they are
still cached, and never less than the demand of now is kept: a burst is answered at once, and the
window only decides how long it is remembered.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

_MAX_RESERVED = 0.75
"""Of the memory beyond the present demand, most that is kept for its growth."""


class OnlineDemand:
    """Samples of a number of tokens, taken at even times."""

    def __init__(self, *, window_s: float, deviations: float) -> None:
        self._window_s = window_s
        self.deviations = deviations
        self._samples: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._squares = 0
        self.now = 0
        """The newest sample [tokens]."""

    def sample(self, num_tokens: int, now_s: float) -> None:
        """The demand is `num_tokens` now. O(1) amortized."""
        self.now = num_tokens
        self._samples.append((now_s, num_tokens))
        self._sum += num_tokens
        self._squares += num_tokens * num_tokens
        while self._samples[0][0] <= now_s - self._window_s:
            _, gone = self._samples.popleft()
            self._sum -= gone
            self._squares -= gone * gone

    @property
    def threshold(self) -> int:
        """Mean plus deviations of the window, as published (Echo §5.3) [tokens]; 0 before the first
        sample."""
        if not self._samples:
            return 0
        mean = self.mean
        variance = max(self._squares / len(self._samples) - mean * mean, 0.0)
        return round(mean + self.deviations * math.sqrt(variance))

    @property
    def mean(self) -> float:
        """Of the window [tokens]; 0 before the first sample."""
        return self._sum / len(self._samples) if self._samples else 0.0


class Reservation(Protocol):
    """How much of the memory is kept.

    counts_returning  the demand has contexts that are expected back
    """

    counts_returning: bool

    def arrived(self, now_s: float) -> None:
        """An online request has arrived."""
        ...

    def sample(self, num_tokens: int, now_s: float) -> None:
        """The demand is `num_tokens` now."""
        ...

    def tokens(self, total: int) -> int:
        """Of `total` ones."""
        ...


class NoReservation:
    """Nothing is kept."""

    counts_returning = False

    def __init__(self, *, window_s: float | None = None, deviations: float = 2.0) -> None:
        pass

    def arrived(self, now_s: float) -> None:
        pass

    def sample(self, num_tokens: int, now_s: float) -> None:
        pass

    def tokens(self, total: int) -> int:
        return 0


class DemandReservation:
    """The threshold, and at least the demand of now. The order of eviction protects contexts that
    are expected back from what waits, and not from offline requests that run."""

    counts_returning = True
    default_window_s = 300.0

    def __init__(self, *, window_s: float | None = None, deviations: float = 2.0) -> None:
        window_s = self.default_window_s if window_s is None else window_s
        self._demand = OnlineDemand(window_s=window_s, deviations=deviations)

    def arrived(self, now_s: float) -> None:
        """It is seen in the demand."""

    def sample(self, num_tokens: int, now_s: float) -> None:
        self._demand.sample(num_tokens, now_s)

    def tokens(self, total: int) -> int:
        demand = self._demand
        now = min(demand.now, total)  # it counts contexts that may come back: more than fits
        most = now + int(_MAX_RESERVED * (total - now))
        return min(max(demand.now, demand.threshold), most)
