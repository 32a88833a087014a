"""Searching the boundary between values that are good and values that are not, in few runs.

Values are a list: a range becomes one whose neighbours differ by the tolerance (`values_between`).
So searches over one range try the same values, whatever they look for, and share kept results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

V = TypeVar("V")

Probe = Callable[[Sequence[V]], Sequence[bool]]
"""Tries values, side by side, and says of each whether it is good."""

NUM_SCANNED = 8


def values_between(
    low: float,
    high: float,
    *,
    tolerance: float,
    is_integer: bool = False,
    digits: int | None = None,
) -> list[float]:
    """From `low` to `high`, ascending, each at most a share of `tolerance` above the one before, or
    by one where they count something. digits: significant ones they are rounded to."""
    assert 0 < low <= high and tolerance > 0, f"{low=} {high=} {tolerance=}"
    values = [low]
    while values[-1] < high:
        value = values[-1] * (1 + tolerance)
        if is_integer:
            value = max(values[-1] + 1, math.floor(value))
        values.append(min(value, high))
    if digits is not None:
        values = sorted({float(f"{value:.{digits}g}") for value in values})
    return values


def last_good(
    values: Sequence[V],
    probe: Probe[V],
    *,
    num_at_once: int = 1,
    on_round: Callable[[], None] = lambda: None,
) -> V | None:
    """The last good one of values that are good up to somewhere and then not; None when the first
    is not good. `num_at_once` are tried side by side."""
    is_good, *rest = probe([values[0], values[-1]][: len(values)])
    on_round()
    if not is_good:
        return None
    if all(rest):
        return values[-1]
    good, bad = 0, len(values) - 1
    while bad - good > 1:
        count = min(num_at_once, bad - good - 1)
        points = [good + (bad - good) * (i + 1) // (count + 1) for i in range(count)]
        for point, is_good in zip(points, probe([values[p] for p in points]), strict=True):
            if not is_good:
                bad = point
                break
            good = point
        on_round()
    return values[good]


def largest_good(values: Sequence[V], probe: Probe[V], *, num_at_once: int = 1) -> V | None:
    """The largest good one of ascending values, of which small ones may be as bad as large ones:
    one in some is tried from the largest on, down to the first good one, and then those up to the
    bad one above it are searched. None when none of those tried is good. Each is tried once."""
    known: dict[V, bool] = {}

    def once(wanted: Sequence[V]) -> list[bool]:
        new = [value for value in wanted if value not in known]
        if new:
            known.update(zip(new, probe(new), strict=True))
        return [known[value] for value in wanted]

    stride = max(math.ceil((len(values) - 1) / NUM_SCANNED), 1)
    indices = [*range(len(values) - 1, 0, -stride), 0]
    for start in range(0, len(indices), num_at_once):
        tried = indices[start : start + num_at_once]
        for index, is_good in zip(tried, once([values[i] for i in tried]), strict=True):
            if is_good:
                above = min(index + stride, len(values) - 1)
                return last_good(values[index : above + 1], once, num_at_once=num_at_once)
    return None
