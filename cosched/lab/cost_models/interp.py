"""Curves through measured points: smoothed where they must not fall, fast where they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cosched.predict.fitted import FloatArray

_SPIKE = 1.5


def isotonic(values: Iterable[float]) -> FloatArray:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent
    violators)."""
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        mean, count = float(value), 1
        while means and means[-1] > mean:
            mean = (means[-1] * counts[-1] + mean * count) / (counts[-1] + count)
            count += counts[-1]
            means.pop()
            counts.pop()
        means.append(mean)
        counts.append(count)
    return np.repeat(np.asarray(means, dtype=np.float64), counts)


def non_decreasing(seconds: FloatArray) -> FloatArray:
    """Measured times of growing work, freed of noise: more work never takes less time.

    A reading far above a later one of more work is a disturbance (interference only adds time) and
    is cut first; what is left is averaged in the logarithm, since the noise is relative.
    """
    least_later = np.minimum.accumulate(seconds[::-1])[::-1]
    return np.exp(isotonic(np.log(np.minimum(seconds, _SPIKE * least_later))))


def neighbours(grid: Sequence[int], value: int) -> list[tuple[int, float]]:
    """(grid point, weight) pairs that interpolate linearly at `value`.

    One pair on the grid, two between grid points. Above the grid the last point in proportion,
    below it the first as it is: small work takes a constant time.
    """
    if value in grid:
        return [(value, 1.0)]
    below = [point for point in grid if point < value]
    above = [point for point in grid if point > value]
    if not below:
        return [(min(above), 1.0)]
    if not above:
        return [(max(below), value / max(below))]
    low, high = max(below), min(above)
    weight = (value - low) / (high - low)
    return [(low, 1 - weight), (high, weight)]


def blend(curves: Iterable[tuple[FloatArray, float]]) -> FloatArray:
    """Weighted sum of curves of equal length."""
    total: FloatArray | None = None
    for curve, weight in curves:
        total = curve * weight if total is None else total + curve * weight
    assert total is not None
    return total
