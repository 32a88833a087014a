"""How cosched's own predictor is fitted: first a coarse model, then every level and corner.

The coarse model has a handful of costs, so that a few dozen batches pin it down. The fine one has
one per level and corner; those that too few batches speak of stay near what the coarse model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cosched.latency.features import TotalsTable
from cosched.latency.graphs import GraphSizes
from cosched.latency.interp import FloatArray
from cosched.latency.nnls import SOLVE_WORK, nnls_normal_steps
from cosched.latency.predictor_base import check_points
from cosched.latency.predictor_cosched import (
    CONTEXTS,
    DECODES,
    CoschedPredictor,
    PrefillCosts,
    TokenCurve,
    surface_corners,
)
from cosched.latency.steps import Steps, finish

__all__ = ["fit_cosched", "fit_phases"]

RAMPS = (32, 64, 128, 256, 512, 1024)
"""Where the cost of one more token may rise in the coarse model [tokens]."""

PRIOR_WEIGHT = 0.3
"""How many measured batches the coarse model counts for at each level and corner."""

COARSE_POINTS = 4096
"""Batches that the coarse model is fitted to, taken at random if there are more."""

LEAST_SHARE = 0.5
"""Guesses that count for one measured batch in the coarse model: the smallest iteration takes this
share of the shortest one measured, and a decode's attention as much in a mixed batch as alone (in a
batch where it takes this share). Of batches that are all alike, any cost might be the one that
counts."""

LEAST_LEVEL = 1e-3
"""Least level of any size, as a share of the shortest time measured."""

OUTLIER_DEVIATIONS = 6.0
OUTLIER_LEAST = 0.25
"""A batch is left out of the fine fit when the coarse model misses it by more than so many
deviations of all its errors, and by more than this share of its prediction: what a coarse model
gets wrong is no outlier."""

UNKNOWN_CONTEXT_S = 1e-6
"""Attention of a decode for each token of its context, as long as no batch tells [s]: ten times
what an A100 takes for an 8B model."""

LEAST_POINTS = 16

ROW_WORK = 20
"""Entries of arrays touched for each batch where its part of several columns is worked out."""

_Indices = npt.NDArray[np.int64]


def fit_cosched(
    table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None = None
) -> CoschedPredictor:
    """ConfigError when there are too few batches with a prefill or too few without.

    graphs  sizes with CUDA graphs; None: there are none
    """
    num_prefills = int(np.count_nonzero(table.num_new))
    for kind, num in (("decode-only", len(table) - num_prefills), ("prefill", num_prefills)):
        check_points(kind, num, least=LEAST_POINTS, predictor="cosched")
    return finish(fit_phases(table, seconds, graphs))


def fit_phases(
    table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None
) -> Steps[CoschedPredictor]:
    """`fit_cosched` from however few batches. A phase without any is taken from the other: the
    levels are those of as many tokens there, and decodes read their contexts at one rate."""
    with_prefill = table.num_new > 0
    decode = prefill = None
    surface = np.tile(UNKNOWN_CONTEXT_S * np.array(CONTEXTS, dtype=np.float64), (len(DECODES), 1))
    imbalance = 0.0
    costs = PrefillCosts(
        request=0.0,
        double_pair=0.0,
        double_tail_pair=0.0,
        key=0.0,
        longest_key=0.0,
        decode_attention=1.0,
    )
    if not with_prefill.all():
        yield ROW_WORK * len(table)
        decode, surface, imbalance = yield from _fit_decode(
            table.rows(~with_prefill), seconds[~with_prefill], graphs
        )
    if with_prefill.any():
        yield ROW_WORK * len(table)
        part = table.rows(with_prefill)
        attention = _decode_attention(part, surface, imbalance)
        yield ROW_WORK * len(part)
        prefill, costs = yield from _fit_prefill(part, attention, seconds[with_prefill], graphs)
    if decode is None:
        surface = surface * costs.decode_attention
        costs = replace(costs, decode_attention=1.0)
    levels = prefill or decode
    assert levels is not None, f"{len(table)=}"
    yield 16 * (levels.sizes[-1] + (decode or levels).sizes[-1])
    return CoschedPredictor(
        prefill=levels,
        decode=decode or levels,
        costs=costs,
        surface=surface.tolist(),
        imbalance=imbalance,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a matrix of which few columns are not zero: entry (i, indices[k][i]) is
    values[k][i]."""

    indices: Sequence[_Indices]
    values: Sequence[FloatArray]
    num_columns: int

    def some(self, which: _Indices) -> _Rows:
        return _Rows(
            [index[which] for index in self.indices],
            [value[which] for value in self.values],
            self.num_columns,
        )

    def times(self, x: FloatArray) -> FloatArray:
        total = np.zeros(len(self.values[0]))
        for index, value in zip(self.indices, self.values, strict=True):
            total += value * x[index]
        return total

    def normal(
        self, weights: FloatArray, target: FloatArray
    ) -> Steps[tuple[FloatArray, FloatArray]]:
        """(X' W X, X' W target), W the squares of `weights`."""
        n = self.num_columns
        squares = weights * weights
        equal, ordered = np.zeros(n * n), np.zeros(n * n)
        moments = np.zeros(n)
        for k, (index, value) in enumerate(zip(self.indices, self.values, strict=True)):
            yield 8 * len(value) + 2 * n * n
            weighted = value * squares
            moments += np.bincount(index, weighted * target, minlength=n)
            row = index * n
            equal += np.bincount(row + index, weighted * value, minlength=n * n)
            for other in range(k):
                yield 4 * len(value) + n * n
                products = weighted * self.values[other]
                ordered += np.bincount(row + self.indices[other], products, minlength=n * n)
        half = ordered.reshape(n, n)
        return half + half.T + equal.reshape(n, n), moments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How the columns of the fine model hang together.

    coarse      (columns, coarse costs): what each column is in the coarse model
    cumulative  (columns, increments): columns as sums of increments that cannot be negative
    typical     (batches, columns): a batch for each column that few measured ones may speak of
    guesses     (batches, columns): batches guessed to take `LEAST_SHARE` of the shortest one
    """

    coarse: FloatArray
    cumulative: FloatArray
    typical: FloatArray
    guesses: FloatArray


def _fit(rows: _Rows, seconds: FloatArray, layout: _Layout) -> Steps[FloatArray]:
    """Fine columns: least squares of relative errors, near the coarse model where data are rare."""
    yield ROW_WORK * len(seconds)
    some = np.random.default_rng(0).permutation(len(seconds))[:COARSE_POINTS]
    gram, moments = yield from rows.some(some).normal(1 / seconds[some], seconds[some])
    least = seconds.min()
    guesses = layout.guesses / least
    gram += guesses.T @ guesses
    moments += LEAST_SHARE * guesses.sum(axis=0)
    coarse = layout.coarse
    costs = yield from nnls_normal_steps(coarse.T @ gram @ coarse, coarse.T @ moments)
    prior = coarse @ costs
    # Errors relative to a prediction rather than to the measured time: dividing by a noisy time
    # would weigh times that came out short more, and predict too little.
    predicted = np.maximum(rows.times(prior), LEAST_SHARE * least)
    errors = np.abs(seconds / predicted - 1)
    spread = 1.4826 * float(np.median(errors))
    kept = errors <= max(OUTLIER_LEAST, OUTLIER_DEVIATIONS * spread)
    gram, moments = yield from rows.normal(kept / predicted, seconds)
    # One batch for each level and corner, whose time is what the coarse model says.
    times = np.maximum(layout.typical @ prior, LEAST_SHARE * least)
    batches = layout.typical / times[:, None]
    yield SOLVE_WORK * gram.size
    gram += PRIOR_WEIGHT * batches.T @ batches
    moments += PRIOR_WEIGHT * batches.T @ (batches @ prior)
    up = layout.cumulative
    increments = yield from nnls_normal_steps(up.T @ gram @ up, up.T @ moments)
    fine: FloatArray = up @ increments
    return fine


def _level_rows(tokens: FloatArray, curve: TokenCurve) -> tuple[list[_Indices], list[FloatArray]]:
    """Entries of the columns of the levels."""
    low, high, share = curve.locate(tokens)
    beyond = np.maximum(tokens / curve.sizes[-1], 1.0)
    return [low, high], [(1 - share) * beyond, share * beyond]


def _level_layout(sizes: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    """(coarse, cumulative) of the levels: a constant, a cost per token and where it rises."""
    at = np.array(sizes, dtype=np.float64)
    ramps = [np.maximum(at - knot, 0.0) for knot in RAMPS if knot < at[-1]]
    return np.array([np.ones(len(at)), at, *ramps]).T, np.tri(len(at))


def _with_levels(curve: TokenCurve, levels: FloatArray, seconds: FloatArray) -> TokenCurve:
    # However the costs of alike batches were told apart: no iteration takes no time.
    least = LEAST_LEVEL * float(seconds.min())
    return replace(curve, seconds=tuple(np.maximum(levels, least).tolist()))


def _fit_decode(
    table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None
) -> Steps[tuple[TokenCurve, FloatArray, float]]:
    """(levels, surface, imbalance) from decode-only batches. Columns: levels, surface row by row,
    imbalance."""
    curve = TokenCurve.empty(graphs.decode if graphs else ())
    sizes = curve.sizes
    num, mean = table.num_decodes, table.decode_context / table.num_decodes
    indices, values = _level_rows(num, curve)
    first, last = len(sizes), len(sizes) + len(DECODES) * len(CONTEXTS)
    corner_indices, corner_values = _corner_rows(num, mean)
    rows = _Rows(
        [*indices, *(first + index for index in corner_indices), np.full(len(num), last)],
        [*values, *corner_values, num * table.max_decode_context],
        last + 1,
    )
    columns = yield from _fit(rows, seconds, _decode_layout(curve))
    surface = columns[first:last].reshape(len(DECODES), len(CONTEXTS))
    return _with_levels(curve, columns[:first], seconds), surface, float(columns[last])


def _corner_rows(num: FloatArray, mean: FloatArray) -> tuple[list[_Indices], list[FloatArray]]:
    """Entries of the columns of the surface: its four corners around each batch."""
    contexts = np.array(CONTEXTS, dtype=np.float64)
    column = np.clip(np.searchsorted(contexts, mean, side="right") - 1, 0, len(contexts) - 2)
    across = (mean - contexts[column]) / (contexts[column + 1] - contexts[column])
    indices, values = [], []
    low, high, share = surface_corners(num)
    for row, down in ((low, 1 - share), (high, share)):
        for step, along in ((0, 1 - across), (1, across)):
            indices.append(row * len(contexts) + column + step)
            values.append(num * down * along)
    return indices, values


@lru_cache(maxsize=2)
def _decode_layout(curve: TokenCurve) -> _Layout:
    """Coarse: levels, a cost per decode, per token of context, and the imbalance."""
    num_levels, num_corners = len(curve.sizes), len(DECODES) * len(CONTEXTS)
    levels, level_sums = _level_layout(curve.sizes)
    num_coarse = levels.shape[1]
    coarse = np.zeros((num_levels + num_corners + 1, num_coarse + 2))
    coarse[:num_levels, :num_coarse] = levels
    coarse[num_levels:-1, num_coarse] = np.tile(CONTEXTS, len(DECODES))
    coarse[-1, num_coarse + 1] = 1.0
    cumulative = np.eye(num_levels + num_corners + 1)
    cumulative[:num_levels, :num_levels] = level_sums
    for row in range(len(DECODES)):
        start = num_levels + row * len(CONTEXTS)
        cumulative[start : start + len(CONTEXTS), start : start + len(CONTEXTS)] = np.tri(
            len(CONTEXTS)
        )
    # A batch of each size without context, and one at each corner.
    typical = np.zeros((num_levels + num_corners, num_levels + num_corners + 1))
    typical[:num_levels, :num_levels] = np.eye(num_levels)
    for row, num in enumerate(DECODES):
        low, high, share = curve.locate(np.array([float(num)]))
        for column in range(len(CONTEXTS)):
            corner = num_levels + row * len(CONTEXTS) + column
            typical[corner, low[0]] += 1 - share[0]
            typical[corner, high[0]] += share[0]
            typical[corner, corner] = num
    return _Layout(
        coarse=coarse,
        cumulative=cumulative,
        typical=typical,
        guesses=typical[:1],
    )


def _decode_attention(table: TotalsTable, surface: FloatArray, imbalance: float) -> FloatArray:
    """The decodes' attention in each batch [s]; 0 where there are none."""
    num = np.maximum(table.num_decodes, 1.0)
    indices, values = _corner_rows(num, table.decode_context / num)
    total = num * imbalance * table.max_decode_context
    for index, value in zip(indices, values, strict=True):
        total += value * surface.ravel()[index]
    return np.where(table.num_decodes > 0, total, 0.0)


def _fit_prefill(
    table: TotalsTable, attention: FloatArray, seconds: FloatArray, graphs: GraphSizes | None
) -> Steps[tuple[TokenCurve, PrefillCosts]]:
    """Levels and costs from batches with a prefill. Columns: levels, then `PrefillCosts`."""
    curve = TokenCurve.empty(graphs.prefill if graphs else ())
    sizes = curve.sizes
    indices, values = _level_rows(table.num_new + table.num_decodes, curve)
    costs = (
        table.num_prefills + table.num_decodes,
        table.double_pairs,
        table.double_tail_pairs,
        table.num_new + table.num_cached,
        table.max_prefill_context,
        attention,
    )
    num_levels, num_columns = len(sizes), len(sizes) + len(costs)
    rows = _Rows(
        [*indices, *(np.full(len(table), num_levels + i) for i in range(len(costs)))],
        [*values, *costs],
        num_columns,
    )
    levels, level_sums = _level_layout(sizes)
    coarse = np.zeros((num_columns, levels.shape[1] + len(costs)))
    coarse[:num_levels, : levels.shape[1]] = levels
    coarse[num_levels:, levels.shape[1] :] = np.eye(len(costs))
    cumulative = np.eye(num_columns)
    cumulative[:num_levels, :num_levels] = level_sums
    # A batch of each size, and one whose decodes' attention takes a share of the shortest time.
    share_s = LEAST_SHARE * float(seconds.min())
    with_decodes = np.zeros(num_columns)
    with_decodes[0], with_decodes[-1] = 1.0, share_s
    typical = np.vstack([np.eye(num_columns)[:num_levels], with_decodes])
    guesses = np.vstack([typical[0], with_decodes - typical[0]])
    layout = _Layout(
        coarse=coarse,
        cumulative=cumulative,
        typical=typical,
        guesses=guesses,
    )
    columns = yield from _fit(rows, seconds, layout)
    found = dict(zip(PrefillCosts.names(), columns[num_levels:].tolist(), strict=True))
    return _with_levels(curve, columns[:num_levels], seconds), PrefillCosts(**found)
