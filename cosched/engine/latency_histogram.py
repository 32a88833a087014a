"""Latencies are counted in buckets whose bounds are a ratio apart: a p99 of the sum of several."""

from __future__ import annotations

import math
from collections import Counter

_RATIO = 1.03
"""Of the bounds of a bucket: a p99 is right within 1.5 %."""
Histogram = Counter[int]
"""Bucket -> number of times in it."""


def bucket_of(seconds: float) -> int:
    """In which times of about this length are counted together."""
    return math.floor(math.log(max(seconds, 1e-6), _RATIO))


def p99_s(histogram: Histogram) -> float | None:
    """At most one in a hundred took longer; None: there was none."""
    may_be_above = histogram.total() // 100
    for bucket in sorted(histogram, reverse=True):
        may_be_above -= histogram[bucket]
        if may_be_above < 0:
            return float(_RATIO ** (bucket + 0.5))
    return None
