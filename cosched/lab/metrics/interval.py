"""How sure a mean over a few runs is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantile 0.975 of Student's t with 1, 2, ... degrees of freedom."""

MOST_VALUES = len(_T_975) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """half_width: of the 95 % interval about the mean; None: one value says nothing of it."""

    mean: float
    half_width: float | None


def interval_of(values: Sequence[float | None]) -> Interval | None:
    """Student's t interval of independent runs; None where one of them has no value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    if len(known) == 1:
        return Interval(mean=known[0], half_width=None)
    t = _T_975[len(known) - 2]
    half_width = t * statistics.stdev(known) / math.sqrt(len(known))
    return Interval(mean=statistics.fmean(known), half_width=half_width)
