"""KV kept for online requests: mean and deviations of their demand in a sliding window (Echo §5.3).

Echo bounds what offline requests may hold by what online ones held in the last hour: mean plus two
deviations. It is Echo's alone: in a burst it costs a batch more than it wins for chat
(docs/results/mechanisms.md).
"""

from __future__ import annotations

import math
from collections import deque


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


class EchoReservation:
    """Mean plus deviations of what online requests hold."""

    counts_returning = False

    def __init__(self, *, window_s: float = 3600.0, deviations: float = 2.0) -> None:
        self._demand = OnlineDemand(window_s=window_s, deviations=deviations)

    def arrived(self, now_s: float) -> None:
        """It is seen in the demand."""

    def sample(self, num_tokens: int, now_s: float) -> None:
        self._demand.sample(num_tokens, now_s)

    def tokens(self, total: int) -> int:
        return min(self._demand.threshold, total)
