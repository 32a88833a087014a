"""Searches for the boundary between good and bad values, in few runs.

A range is a list of values whose neighbours differ by the tolerance (`values_between`), so that
different searches over one range try the same values and share kept results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

V = TypeVar("V")

Probe = Callable[[Sequence[V]], Sequence[bool]]
"""Tries values side by side; True for each good one."""

NUM_SCANNED = 8


def values_between(
    low: float,
    high: float,
    *,
    tolerance: float,
    is_integer: bool = False,
    digits: int | None = None,
) -> list[float]:
    """Ascending values from `low` to `high`, each at most `tolerance` (relative) above the one
    before, integers at least one. digits: significant digits they are rounded to."""
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
    """The last good value of a list that begins with good values and ends with bad ones; None if
    the first is bad. `num_at_once` are tried side by side."""
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
    """The largest good one of ascending values, of which small ones may be bad, too: some values
    are tried from the largest down to the first good one, then those up to the bad one above it are
    searched. None if none of those tried is good. Each is tried once."""
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
