"""Times of kernels between the measured points of their tables: matrix products, all-reduces and
attention."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log

import numpy as np

from cosched.core.batch import Prefill
from cosched.errors import ConfigError, choices
from cosched.lab.cost_models.tables import Row
from cosched.predict.fitted import FloatArray

_SPIKE = 1.5

SKEW = 0.03
"""How far uneven contexts move a decode's time from that of even ones of the same sum towards that
of all as long as the longest. The share of LLMServingSim's `skew` tables, pure decodes (RTX 4090
and RTX PRO 6000, vLLM): the mean alone is 3 to 5 % low there, with it the bias is below 2 %."""

_Points = tuple[FloatArray, FloatArray]
Cells = Mapping[tuple[int, int], float]
"""(batch size, length) -> time of one layer [s]."""


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
    """Measured times of growing work without noise: more work never takes less time.

    A time far above a later one of more work is a disturbance (interference only adds time) and is
    cut first. The rest is averaged in the logarithm, because the noise is relative.
    """
    least_later = np.minimum.accumulate(seconds[::-1])[::-1]
    return np.exp(isotonic(np.log(np.minimum(seconds, _SPIKE * least_later))))


def neighbours(grid: Sequence[int], value: int) -> list[tuple[int, float]]:
    """(grid point, weight) pairs that interpolate linearly at `value`.

    One pair on the grid, two between grid points. Above the grid the last point is scaled in
    proportion, below it the first is taken: small work takes a constant time.
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


def _curve(points: Iterable[tuple[int, float]]) -> _Points:
    """(sizes, seconds), sizes ascending, with the least of repeated measurements."""
    least: dict[int, float] = {}
    for size, seconds in points:
        least[size] = min(seconds, least.get(size, seconds))
    sizes = np.array(sorted(least), dtype=np.float64)
    return sizes, non_decreasing(np.array([least[int(size)] for size in sizes]))


def _at(points: _Points, sizes: FloatArray) -> FloatArray:
    """Linear between the points; above the last one in proportion to the size."""
    xs, ys = points
    inside = np.interp(sizes, xs, ys)
    return np.where(sizes > xs[-1], ys[-1] * sizes / xs[-1], inside)


class GemmTable:
    """Time of C[m, n] = A[m, k] B[k, n].

    Along m: the measured curve without noise (`non_decreasing`), linear between its points; the
    table has the steps at multiples of the kernel's tile. Across (n, k): linear in n and in k, as
    FLOPs (2mnk) and bytes (mn + nk + mk) are. Interpolating the efficiency is not better
    (docs/results/cost_models.md).
    """

    def __init__(self, rows: Iterable[Row]) -> None:
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

    def __init__(self, rows: Iterable[Row]) -> None:
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


def attention_cells(rows: Iterable[Row], num_heads: int, num_kv_heads: int, head_dim: int) -> Cells:
    """Times for one number of heads. Numbers that were not measured are interpolated linearly
    between measured numbers of query heads, with the same KV heads (or, without grouping, with as
    many KV heads as query heads)."""
    shapes: defaultdict[tuple[int, int, int], dict[tuple[int, int], float]] = defaultdict(dict)
    for heads, kv_heads, dim, batch, length, seconds in rows:
        shape = shapes[heads, kv_heads, dim]
        shape[batch, length] = min(seconds, shape.get((batch, length), seconds))
    if (num_heads, num_kv_heads, head_dim) in shapes:
        return shapes[num_heads, num_kv_heads, head_dim]
    grouped = num_heads != num_kv_heads
    like = {
        heads: (heads, kv_heads, dim)
        for heads, kv_heads, dim in shapes
        if dim == head_dim and (kv_heads == num_kv_heads if grouped else kv_heads == heads)
    }
    if not like or not min(like) <= num_heads <= max(like):
        measured = sorted({f"{h}/{kv}" for h, kv, dim in shapes if dim == head_dim})
        raise ConfigError(
            f"no attention with {num_heads} query and {num_kv_heads} KV heads of {head_dim} in "
            f"the table, and none around it; measured: {choices(measured) or 'none'}"
        )
    parts = [(shapes[like[heads]], w) for heads, w in neighbours(sorted(like), num_heads)]
    shared = set.intersection(*(set(part) for part, _ in parts))
    return {cell: sum(part[cell] * w for part, w in parts) for cell in shared}


def _axes(cells: Cells) -> tuple[list[int], list[int]]:
    return sorted({batch for batch, _ in cells}), sorted({length for _, length in cells})


class ContextAttention:
    """Attention of the prefill part of an iteration.

    A(b, x), the measured time of b prompts of x tokens, is written

        A(b, x) = f + b * x**2 / 2 * r(b, x)

    f: time of the smallest call; r: seconds per (query, key) pair, which falls with x as the GPU
    fills. A chunk of n tokens over c cached ones has n * (c + n / 2) pairs and costs
    f + pairs * r(b, n + c). r is made non-increasing in x, so that the chunks of a prompt never
    cost less than the prompt.

    Several prompts in one batch fill the GPU together: prompt i is read at b = N / x_i, where N is
    the number of new tokens of all, which is exact for equal prompts and for a single one.
    """

    def __init__(self, cells: Cells) -> None:
        batches, lengths = _axes(cells)
        self.floor_s = min(cells.values())
        self._log_batches = [log(batch) for batch in batches]
        self._log_lengths = [log(length) for length in lengths]
        self._log_rates: list[list[float]] = []
        for batch in batches:
            self._log_rates.append(self._rates(batch, lengths, cells))

    def _rates(self, batch: int, lengths: Sequence[int], cells: Cells) -> list[float]:
        measured = [length for length in lengths if (batch, length) in cells]
        # 1 % of the floor stands for work too small to be measured.
        works = [
            max(cells[batch, length] - self.floor_s, 0.01 * self.floor_s) for length in measured
        ]
        rates = np.interp(
            np.log(lengths),
            np.log(measured),
            [log(w / (batch * x * x / 2)) for w, x in zip(works, measured, strict=True)],
        )
        if self._log_rates:
            # Too many tokens to have been measured: the GPU is full, the rate stays.
            full = np.array(lengths) > measured[-1]
            rates[full] = np.array(self._log_rates[-1])[full]
        return [-rate for rate in isotonic(-rates).tolist()]

    def rate(self, batch: float, length: float) -> float:
        """Seconds for one (query, key) pair."""
        row, row_weight = _locate(self._log_batches, log(batch))
        column, weight = _locate(self._log_lengths, log(length))
        low = self._log_rates[row]
        rate = low[column] + weight * (low[column + 1] - low[column])
        if row_weight:
            high = self._log_rates[row + 1]
            other = high[column] + weight * (high[column + 1] - high[column])
            rate += row_weight * (other - rate)
        return exp(rate)

    def equal_s(self, batch: int, length: int) -> float:
        """Time of `batch` whole prompts of `length` tokens [s]."""
        return self.floor_s + batch * length * length / 2 * self.rate(batch, length)

    def seconds(self, prefills: Sequence[Prefill], num_new: int) -> float:
        """Time of one layer's attention over all prefills [s]; num_new: their new tokens."""
        total = self.floor_s
        for new, cached in prefills:
            length = new + cached
            batch = num_new / length
            total += new * (cached + new / 2) * self.rate(batch if batch > 1 else 1.0, length)
        return total


def _locate(points: Sequence[float], value: float) -> tuple[int, float]:
    """(i, w): value lies at share w between points i and i + 1; clamped to the ends."""
    if value <= points[0]:
        return 0, 0.0
    if value >= points[-1]:
        return len(points) - 2, 1.0
    i = bisect_right(points, value) - 1
    return i, (value - points[i]) / (points[i + 1] - points[i])


class GenerationAttention:
    """Attention of the decodes of an iteration.

    The table holds equal contexts; uneven ones are read at their mean, moved by `SKEW` towards
    their maximum. Straight between grid points in batch size and context, as bytes read are.
    """

    def __init__(self, cells: Cells) -> None:
        batches, contexts = _axes(cells)
        self._batches = batches
        self._contexts = [float(context) for context in contexts]
        grid = _filled(cells, batches, contexts)
        self._grid: list[list[float]] = grid.tolist()
        self._rows: dict[int, list[float]] = {}
        self.floor_s = self._grid[0][0]

    def equal_s(self, batch: int, context: float) -> float:
        """Time of `batch` decodes that each attend to `context` tokens [s]."""
        row = self._rows.get(batch)
        if row is None:
            row = self._rows[batch] = self._row(batch)
        contexts = self._contexts
        if context <= contexts[0]:
            return row[0]
        i = bisect_right(contexts, context) - 1
        if i >= len(contexts) - 1:
            i = len(contexts) - 2
        share = (context - contexts[i]) / (contexts[i + 1] - contexts[i])
        return row[i] + share * (row[i + 1] - row[i])

    def seconds(self, contexts: Sequence[int]) -> float:
        """Time of one layer's attention over the decodes [s]; `contexts` is not empty."""
        batch = len(contexts)
        mean = sum(contexts) / batch
        even = self.equal_s(batch, mean)
        return even + SKEW * (self.equal_s(batch, max(contexts)) - even)

    def _row(self, batch: int) -> list[float]:
        parts = [
            (self._grid[self._batches.index(other)], weight)
            for other, weight in neighbours(self._batches, batch)
        ]
        return [sum(row[i] * w for row, w in parts) for i in range(len(self._contexts))]


def _filled(cells: Cells, batches: Sequence[int], contexts: Sequence[int]) -> FloatArray:
    """The whole grid [s], non-decreasing along both axes.

    A cell with more KV than was measured adds, to the cell before it in its row, what the step
    between these two contexts costs per decode in the row above.
    """
    rows: list[FloatArray] = []
    for batch in batches:
        measured = [context for context in contexts if (batch, context) in cells]
        row = np.interp(contexts, measured, [cells[batch, context] for context in measured])
        last = contexts.index(measured[-1])
        if rows:
            steps = np.diff(rows[-1][last:]) * batch / batches[len(rows) - 1]
        else:
            before = max(last - 1, 0)
            slope = (row[last] - row[before]) / max(contexts[last] - contexts[before], 1)
            steps = np.diff(np.array(contexts[last:], dtype=np.float64)) * slope
        row[last + 1 :] = row[last] + np.cumsum(np.maximum(steps, 0.0))
        rows.append(row)
    grid = np.array(rows)
    for _ in range(4):
        grid = np.apply_along_axis(non_decreasing, 1, grid)
        grid = np.apply_along_axis(non_decreasing, 0, grid)
    # The two smoothings pull at each other; this settles the rest, well under 1 %.
    return np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)
