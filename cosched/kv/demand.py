"""KV kept for online requests: mean and deviations of their demand in a sliding window (Echo §5.3).

Echo bounds what offline requests may hold by what online ones held in the last hour: mean plus two
deviations. Here the demand also counts contexts that are about to return, whether or not they are
still cached, and never less than the demand of now is kept: a burst is answered at once, and the
window only decides how long it is remembered.

Nor is more kept than the demand of now can become while an offline request is under way: it ends
soon, or is stopped, and gives its memory back. So the rises of the demand over `reaction_s` are
looked at in the same way, and after a burst the memory is not kept for another one on top of it.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["OnlineDemand"]


class OnlineDemand:
    """Samples of a number of tokens, taken at even times."""

    def __init__(
        self, *, window_s: float = 300.0, deviations: float = 2.0, reaction_s: float = 10.0
    ) -> None:
        self._reaction_s = reaction_s
        self._levels = _Window(window_s, deviations)
        self._rises = _Window(window_s, deviations)
        self._latest: deque[tuple[float, int]] = deque()
        self.now = 0
        """The newest sample [tokens]."""

    def sample(self, num_tokens: int, now_s: float) -> None:
        """The demand is so many tokens now. O(1) amortized."""
        self.now = num_tokens
        self._levels.add(num_tokens, now_s)
        latest = self._latest
        latest.append((now_s, num_tokens))
        while len(latest) > 1 and latest[1][0] <= now_s - self._reaction_s:
            latest.popleft()
        before_s, before = latest[0]
        if before_s <= now_s - self._reaction_s:
            self._rises.add(num_tokens - before, now_s)

    @property
    def reserve(self) -> int:
        """Tokens to keep; 0 before the first sample."""
        kept = self._levels.bound
        if len(self._rises):
            kept = min(kept, self.now + self._rises.bound)
        return max(self.now, round(kept))


class _Window:
    """Mean and deviation of the numbers of the last `length_s`."""

    def __init__(self, length_s: float, deviations: float) -> None:
        self._length_s = length_s
        self._deviations = deviations
        self._samples: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._squares = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, number: int, now_s: float) -> None:
        self._samples.append((now_s, number))
        self._sum += number
        self._squares += number * number
        while self._samples[0][0] <= now_s - self._length_s:
            _, gone = self._samples.popleft()
            self._sum -= gone
            self._squares -= gone * gone

    @property
    def bound(self) -> float:
        """Mean and so many deviations; 0 of none."""
        count = len(self._samples)
        if not count:
            return 0.0
        mean = self._sum / count
        variance = max(self._squares / count - mean * mean, 0.0)
        return mean + self._deviations * math.sqrt(variance)
