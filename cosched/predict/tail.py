"""The tail of a stream of values, with bounded memory."""

from __future__ import annotations

import math
from collections import Counter

_STEP = math.log1p(0.0025)
"""Values are told apart to a quarter of a percent."""

_LEAST, _MOST = 1e-6, 1e6


class Tail:
    """A quantile of the last values: of `num` to twice as many, so that old ones are forgotten.

    Counts in steps of 0.25 %, at most 11,064 of them; the answer is at most that far off.
    """

    def __init__(self, quantile: float, *, num: int) -> None:
        """quantile: between 0 and 1."""
        self._above = 1 - quantile
        self._num = num
        self._counts: Counter[int] = Counter()
        self._older: Counter[int] = Counter()
        self._num_here = 0
        self._num_older = 0

    def __len__(self) -> int:
        return self._num_here + self._num_older

    def add(self, value: float) -> None:
        """value: what is outside 1e-6 to 1e6 counts as these."""
        self._counts[round(math.log(min(max(value, _LEAST), _MOST)) / _STEP)] += 1
        self._num_here += 1
        if self._num_here >= self._num:
            self._older, self._num_older = self._counts, self._num_here
            self._counts, self._num_here = Counter(), 0

    def value(self) -> float | None:
        """None: there is none yet. O(distinct values)."""
        left = self._above * len(self)
        for step in sorted(self._counts.keys() | self._older.keys(), reverse=True):
            left -= self._counts[step] + self._older[step]
            if left < 0:
                return math.exp(step * _STEP)
        return None
