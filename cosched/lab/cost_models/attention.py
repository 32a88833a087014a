"""Time of one layer's attention, from the tables."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log

import numpy as np

from cosched.core.batch import Prefill
from cosched.errors import ConfigError, choices
from cosched.lab.cost_models.interp import isotonic, neighbours, non_decreasing
from cosched.lab.cost_models.tables import AttentionRow
from cosched.predict.fitted import FloatArray

SKEW = 0.03
"""How far uneven contexts move a decode's time from that of even ones of the same sum towards that
of all as long as the longest. The share of LLMServingSim's `skew` tables, pure decodes (RTX 4090
and RTX PRO 6000, vLLM): the mean alone is 3 to 5 % low there, with it the bias is below 2 %."""

_Cell = tuple[int, int]
_Cells = Mapping[_Cell, float]


class _Table:
    """Rows of one kind for all numbers of heads."""

    def __init__(self, rows: Sequence[AttentionRow]) -> None:
        cells: defaultdict[tuple[int, int, int], dict[_Cell, float]] = defaultdict(dict)
        for heads, kv_heads, dim, batch, length, seconds in rows:
            shape = cells[heads, kv_heads, dim]
            shape[batch, length] = min(seconds, shape.get((batch, length), seconds))
        self._cells = cells

    def cells(self, num_heads: int, num_kv_heads: int, head_dim: int) -> _Cells:
        """Time by (batch size, length) for one number of heads [s].

        Where it was not measured: straight between the next numbers of query heads that were, with
        the same KV heads (or, without grouping, with as many KV heads as query heads).
        """
        if (num_heads, num_kv_heads, head_dim) in self._cells:
            return self._cells[num_heads, num_kv_heads, head_dim]
        grouped = num_heads != num_kv_heads
        like = {
            heads: (heads, kv_heads, dim)
            for heads, kv_heads, dim in self._cells
            if dim == head_dim and (kv_heads == num_kv_heads if grouped else kv_heads == heads)
        }
        if not like or not min(like) <= num_heads <= max(like):
            measured = sorted({f"{h}/{kv}" for h, kv, dim in self._cells if dim == head_dim})
            raise ConfigError(
                f"no attention with {num_heads} query and {num_kv_heads} KV heads of {head_dim} in "
                f"the table, and none around it; measured: {choices(measured) or 'none'}"
            )
        parts = [(self._cells[like[heads]], w) for heads, w in neighbours(sorted(like), num_heads)]
        shared = set.intersection(*(set(part) for part, _ in parts))
        return {cell: sum(part[cell] * w for part, w in parts) for cell in shared}


def _axes(cells: _Cells) -> tuple[list[int], list[int]]:
    return sorted({batch for batch, _ in cells}), sorted({length for _, length in cells})


class ContextAttention:
    """Attention of the prefill part of an iteration.

    A(b, x), the measured time of b prompts of x tokens, is written

        A(b, x) = f + b * x**2 / 2 * r(b, x)

    f: the time of the smallest call; r: seconds for one (query, key) pair, which falls with x as
    the GPU fills. A chunk of n tokens over c cached ones has n * (c + n / 2) pairs and costs
    f + pairs * r(b, n + c): the pairs of a long prompt cost the same whether or not they come in
    chunks, as all its queries but the first tiles see long rows anyway. r is made non-increasing
    in x, so the chunks of a prompt never cost less than the prompt.

    Several prompts in one batch fill the GPU together: prompt i is read at b = N / x_i, where N is
    the number of new tokens of all, which is exact for equal prompts and for a single one.

    floor_s(x), by the caller, is the least time over x keys however few queries: reading them.
    """

    def __init__(self, cells: _Cells) -> None:
        batches, lengths = _axes(cells)
        self.floor_s = min(cells.values())
        self._log_batches = [log(batch) for batch in batches]
        self._log_lengths = [log(length) for length in lengths]
        self._log_rates: list[list[float]] = []
        for batch in batches:
            self._log_rates.append(self._rates(batch, lengths, cells))

    def _rates(self, batch: int, lengths: Sequence[int], cells: _Cells) -> list[float]:
        measured = [length for length in lengths if (batch, length) in cells]
        # 1 % of the floor stands for work too small to be told from it.
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

    def __init__(self, cells: _Cells) -> None:
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


def _filled(cells: _Cells, batches: Sequence[int], contexts: Sequence[int]) -> FloatArray:
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
    # The two smoothings pull at each other; this settles what is left, well under 1 %.
    return np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)


class ContextTable(_Table):
    """Context attention for all numbers of heads."""

    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> ContextAttention:
        return ContextAttention(self.cells(num_heads, num_kv_heads, head_dim))


class GenerationTable(_Table):
    """Generation attention for all numbers of heads."""

    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> GenerationAttention:
        return GenerationAttention(self.cells(num_heads, num_kv_heads, head_dim))
