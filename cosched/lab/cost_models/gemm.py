"""Time of matrix products and all-reduces, from their tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from cosched.errors import ConfigError, choices
from cosched.lab.cost_models.interp import blend, neighbours, non_decreasing
from cosched.lab.cost_models.tables import AllReduceRow, GemmRow
from cosched.predict.fitted import FloatArray

_Points = tuple[FloatArray, FloatArray]


def _curve(points: Iterable[tuple[int, float]]) -> _Points:
    """(sizes, seconds), sizes ascending, the least time where one was measured twice."""
    least: dict[int, float] = {}
    for size, seconds in points:
        least[size] = min(seconds, least.get(size, seconds))
    sizes = np.array(sorted(least), dtype=np.float64)
    return sizes, non_decreasing(np.array([least[int(size)] for size in sizes]))


def _at(points: _Points, sizes: FloatArray) -> FloatArray:
    """Linear between the points; above the last in proportion to the size."""
    xs, ys = points
    inside = np.interp(sizes, xs, ys)
    return np.where(sizes > xs[-1], ys[-1] * sizes / xs[-1], inside)


class GemmTable:
    """Time of C[m, n] = A[m, k] B[k, n].

    Along m: the measured curve, freed of noise (`non_decreasing`), straight between its points; the
    steps at multiples of the kernel's tile are in the table. Across (n, k): straight in n and in k.
    FLOPs (2mnk) and bytes (mn + nk + mk) are both straight in n and in k, so a shape between two
    of equal efficiency gets that efficiency. Interpolating the efficiency itself is no better
    (docs/cost_models.md).
    """

    def __init__(self, rows: Sequence[GemmRow]) -> None:
        points: defaultdict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        for m, n, k, seconds in rows:
            points[n, k].append((m, seconds))
        self._points = points
        self._curves: dict[tuple[int, int], _Points] = {}
        self._ns = sorted({n for n, _ in points})
        self._ks = sorted({k for _, k in points})

    def seconds(self, n: int, k: int, ms: FloatArray) -> FloatArray:
        """Time for each m of `ms` [s]."""
        if (n, k) in self._points:
            return _at(self._measured(n, k), ms)
        along = []
        for axis in (self._along_n(n, k), self._along_k(n, k)):
            if axis:
                along.append(blend((self.seconds(*shape, ms), weight) for shape, weight in axis))
        if along:
            return blend((curve, 1 / len(along)) for curve in along)
        # Neither n nor k is on the grid: first in k, on the two neighbouring n.
        return blend(
            (self.seconds(other, k, ms), weight) for other, weight in neighbours(self._ns, n)
        )

    def _measured(self, n: int, k: int) -> _Points:
        curve = self._curves.get((n, k))
        if curve is None:
            curve = self._curves[n, k] = _curve(self._points[n, k])
        return curve

    def _along_n(self, n: int, k: int) -> list[tuple[tuple[int, int], float]]:
        ns = [other for other in self._ns if (other, k) in self._points]
        return [((other, k), weight) for other, weight in neighbours(ns, n)] if ns else []

    def _along_k(self, n: int, k: int) -> list[tuple[tuple[int, int], float]]:
        ks = [other for other in self._ks if (n, other) in self._points]
        return [((n, other), weight) for other, weight in neighbours(ks, k)] if ks else []


class AllReduceTable:
    """Time of one all-reduce over the GPUs of a tensor-parallel group."""

    def __init__(self, rows: Sequence[AllReduceRow]) -> None:
        points: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for gpus, size, seconds in rows:
            points[gpus].append((size, seconds))
        self._curves = {gpus: _curve(curve) for gpus, curve in points.items()}

    def seconds(self, num_gpus: int, num_elements: FloatArray) -> FloatArray:
        """ConfigError when the table has no group of that size."""
        if num_gpus not in self._curves:
            raise ConfigError(
                f"no all-reduce over {num_gpus} GPUs in the table; "
                f"choose tp from {choices(map(str, [1, *self._curves]))}"
            )
        return _at(self._curves[num_gpus], num_elements)
