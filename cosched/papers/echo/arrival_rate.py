"""Echo's estimate of the arrival rate of online requests, and what it keeps by it (§7.4, Fig. 11).

"The estimator records request arrivals within a fixed time window (e.g. 15 minutes) and predicts
the arrival rate of online requests at the current time using the standard deviation and mean of the
online traces within that window", to reserve "a certain amount of buffer space". How the space
follows from the rate is not said. Here it is Little's law: online requests hold the mean of what
they held in the window, times the predicted over the mean rate. A rate is that of a bin of
`BIN_S`; the number of deviations is that of §5.3.
"""

from __future__ import annotations

import math
from collections import deque

from cosched.papers.echo.kv_order import EchoReservation

WINDOW_S = 900.0
BIN_S = 10.0


class ArrivalRate:
    """Arrivals in the bins of a sliding window. O(1) amortized for each arrival."""

    def __init__(self, *, window_s: float = WINDOW_S, deviations: float = 2.0) -> None:
        self._num_bins = max(round(window_s / BIN_S), 1)
        self._deviations = deviations
        self._counts: deque[int] = deque(maxlen=self._num_bins)
        """Of bins that are over."""
        self._bin: int | None = None
        self._num_now = 0

    def arrived(self, now_s: float) -> None:
        self.advance(now_s)
        self._num_now += 1

    def advance(self, now_s: float) -> None:
        """It is `now_s`."""
        current = math.floor(now_s / BIN_S)
        if self._bin is None:
            self._bin = current
        for _ in range(min(current - self._bin, self._num_bins + 1)):
            self._counts.append(self._num_now)
            self._num_now = 0
        self._bin = max(current, self._bin)

    @property
    def mean(self) -> float:
        """Of the window [1/s]; 0 before a bin is over."""
        return sum(self._counts) / len(self._counts) / BIN_S if self._counts else 0.0

    @property
    def predicted(self) -> float:
        """Mean and deviations of the window [1/s]."""
        mean = self.mean * BIN_S
        squares = sum((count - mean) ** 2 for count in self._counts)
        spread = math.sqrt(squares / len(self._counts)) if self._counts else 0.0
        return (mean + self._deviations * spread) / BIN_S


class ArrivalReservation(EchoReservation):
    """What online requests would hold at the predicted rate, and at least what they hold."""

    def __init__(self, *, window_s: float | None = None, deviations: float = 2.0) -> None:
        """window_s: over which what they hold is measured [s]"""
        super().__init__(window_s=window_s, deviations=deviations)
        self._rate = ArrivalRate(deviations=deviations)
        self._growth = 1.0
        """Predicted over mean rate."""

    def arrived(self, now_s: float) -> None:
        self._rate.arrived(now_s)

    def sample(self, num_tokens: int, now_s: float) -> None:
        super().sample(num_tokens, now_s)
        self._rate.advance(now_s)
        mean = self._rate.mean
        self._growth = self._rate.predicted / mean if mean else 1.0

    def tokens(self, total: int) -> int:
        return min(max(self._demand.now, round(self._growth * self._demand.mean)), total)
