"""cosched's own predictor: linear in what drives the time of an iteration.

GEMMs depend on the number of tokens, padded to the next CUDA graph; up to some hundred tokens they
read the weights whatever they compute. Prefill attention grows with (query, key) pairs once a chunk
fills a tile of queries, and with keys below that. Decode attention reads its KV, at a lower rate
where few decodes share the GPU or contexts are short. With separate costs for iterations with and
without a prefill:

    T = level(S_p + N_d) + a N_d + b S_d + c S_d min(1, 16 / N_d) + d min(S_d, 1024 N_d)
      + e N_d max(l)
      [ + r N_p + p pairs + q tail pairs + m keys + n longest + i S_i ]  with a prefill

S_p, N_p: new prompt tokens, prefills. N_d, l, S_d: decodes, their contexts, the sum of these.
pairs: (query, key) pairs; tail pairs: of queries beyond the first 64 of a prefill. keys,
longest: tokens of the prefills' contexts, and of the longest one. S_i: tokens of images, video and
sound that the encoder computes. Before any were seen they are taken to need no time: an image is
computed as a whole, so that one which seems too long would never be tried.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from cosched.core.batch import BatchTotals
from cosched.errors import ConfigError
from cosched.predict.fitted import (
    FittedPredictor,
    FloatArray,
    GraphSizes,
    TotalsTable,
    check_points,
    nnls,
    numbers,
)

KNOTS = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""Where the cost of one more token may change when there are no CUDA graphs; beyond the last, time
grows in proportion."""

_FULL_DECODES, _FULL_CONTEXT = 16, 1024
"""With fewer decodes, or shorter contexts, decode attention does not fill the GPU (A100)."""
_RIDGE = 0.01
"""Weight of equal shares of the time against the data, in batches: costs that no batch separates
are taken to be alike."""
_OUTLIER_DEVIATIONS, _OUTLIER_LEAST = 6.0, 0.25
"""A batch is left out when a first fit misses it by more than this number of deviations of all
errors and more than this share of its prediction."""
_LEAST_LEVEL = 1e-3
"""Least time of an iteration, as a share of the shortest ones measured."""
_LEAST_POINTS = 16
_LEAST_SHARE = 0.1
_FEW = 20
"""One batch in so many may have been measured much too short."""


def _amounts(totals: TotalsTable, *, has_prefills: bool) -> tuple[FloatArray, ...]:
    """What an iteration takes time for beyond the level of its tokens."""
    num, context = totals.num_decodes, totals.decode_context
    decodes = (
        num,
        context,
        context * np.minimum(_FULL_DECODES / np.maximum(num, 1), 1.0),
        np.minimum(context, num * _FULL_CONTEXT),
        num * totals.max_decode_context,
    )
    if not has_prefills:
        return decodes
    return (
        *decodes,
        totals.num_prefills,
        totals.double_pairs,
        totals.double_tail_pairs,
        totals.num_new + totals.num_cached,
        totals.max_prefill_context,
        totals.num_encoded,
        totals.num_encodings,
    )


_NUM_AMOUNTS = {False: 5, True: 12}
_NUM_OF_MEDIA = 2
"""The last of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """Seconds of iterations with a prefill, or of those without.

    graphs  sizes with a CUDA graph, ascending [tokens]
    level   of an iteration, then of each token between two sizes of `_knots` [s]
    costs   of each of `_amounts` [s]
    """

    graphs: tuple[int, ...]
    level: tuple[float, ...]
    costs: tuple[float, ...]
    _levels: list[float] = field(init=False, repr=False, compare=False)
    """By number of tokens, up to the last of `_knots`."""

    def __post_init__(self) -> None:
        knots = _knots(self.graphs)
        tokens = _padded(np.arange(knots[-1] + 1.0), self.graphs)
        at_knots = self.level[0] + np.cumsum([0.0, *np.diff(knots) * self.level[1:]])
        levels = np.maximum.accumulate(np.interp(tokens, knots, at_knots))
        object.__setattr__(self, "_levels", levels.tolist())

    @classmethod
    def fit(
        cls, table: TotalsTable, seconds: FloatArray, graphs: Sequence[int], *, has_prefills: bool
    ) -> PhaseCosts:
        """From batches of this phase, one at least."""
        steps = cls.fitting(table, seconds, graphs, has_prefills=has_prefills)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: PhaseCosts = end.value
                return found

    @classmethod
    def fitting(
        cls, table: TotalsTable, seconds: FloatArray, graphs: Sequence[int], *, has_prefills: bool
    ) -> Generator[None, None, PhaseCosts]:
        """`fit` in steps, none of which takes long."""
        tokens = _padded(table.num_new + table.num_decodes, graphs)
        segments = _segments(tokens, _knots(graphs))
        features = np.array([*segments, *_amounts(table, has_prefills=has_prefills)])
        # Where a result is seen late, the next iteration is measured as next to nothing: such times
        # would weigh more than all others together.
        least = float(np.sort(seconds)[len(seconds) // _FEW]) / 2
        yield
        found = yield from _ridge_fit(features, seconds, (seconds >= least) / seconds)
        yield
        # Relative to a prediction and not to the measured time: dividing by a noisy time would
        # weigh times that came out short more, and predict too little.
        predicted = np.maximum(found @ features, _LEAST_SHARE * least)
        errors = np.abs(seconds / predicted - 1)
        spread = 1.4826 * _median(errors)
        kept = errors <= max(_OUTLIER_LEAST, _OUTLIER_DEVIATIONS * spread)
        found = yield from _ridge_fit(features, seconds, kept / predicted)
        yield
        found[0] = max(found[0], _LEAST_LEVEL * least)
        level, costs = found[: len(segments)], found[len(segments) :]
        return cls(graphs=tuple(graphs), level=tuple(level.tolist()), costs=tuple(costs.tolist()))

    def predict_s(self, totals: BatchTotals) -> float:
        """`_amounts` times `costs`, written out: a plan asks a hundred times."""
        num, num_new, levels = totals.num_decodes, totals.num_new, self._levels
        tokens, last = num_new + num, len(levels) - 1
        seconds = levels[tokens] if tokens <= last else levels[last] * tokens / last
        costs = self.costs
        if num:
            context, full = totals.decode_context, num * _FULL_CONTEXT
            each, read, few, short, longest = costs[:5]
            seconds += (
                each * num
                + read * context
                + few * (context if num <= _FULL_DECODES else context * _FULL_DECODES / num)
                + short * (context if context < full else full)
                + longest * (num * totals.max_decode_context)
            )
        if not num_new:
            return seconds
        return (
            seconds
            + costs[5] * totals.num_prefills
            + costs[6] * totals.double_pairs
            + costs[7] * totals.double_tail_pairs
            + costs[8] * (num_new + totals.num_cached)
            + costs[9] * totals.max_prefill_context
            + costs[10] * totals.num_encoded
            + costs[11] * totals.num_encodings
        )

    def describe(self) -> dict[str, object]:
        return {"graphs": [*self.graphs], "level": [*self.level], "costs": [*self.costs]}

    @classmethod
    def from_dict(cls, data: Any, key: str, *, has_prefills: bool) -> PhaseCosts:
        entry = data.get(key)
        if not isinstance(entry, dict) or not isinstance(entry.get("graphs"), list):
            raise ConfigError(f"{key} is {entry!r}; it must have graphs, level and costs")
        graphs = tuple(map(int, numbers(entry, "graphs", len(entry["graphs"]))))
        costs = entry.get("costs")
        if has_prefills and isinstance(costs, list):
            num_missing = _NUM_AMOUNTS[True] - len(costs)
            if 0 < num_missing <= _NUM_OF_MEDIA:  # of a file from before they were known
                entry = entry | {"costs": [*costs, *[0.0] * num_missing]}
        return cls(
            graphs=graphs,
            level=numbers(entry, "level", len(_knots(graphs))),
            costs=numbers(entry, "costs", _NUM_AMOUNTS[has_prefills]),
        )


class CoschedPredictor(FittedPredictor):
    """Linear in `_amounts`, with a level by number of tokens, for decode-only iterations and for
    those with a prefill. All costs are non-negative, so more prompt tokens are never predicted to
    be cheaper."""

    def __init__(self, *, decode: PhaseCosts, prefill: PhaseCosts) -> None:
        self.decode = decode
        self.prefill = prefill

    @property
    def name(self) -> str:
        return "cosched"

    @classmethod
    def fit(
        cls, table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None
    ) -> CoschedPredictor:
        with_prefill = table.num_new > 0
        num_prefills = int(np.count_nonzero(with_prefill))
        for kind, num in (("decode-only", len(table) - num_prefills), ("prefill", num_prefills)):
            check_points(kind, num, least=_LEAST_POINTS, predictor="cosched")
        decode, prefill = (
            PhaseCosts.fit(table.rows(which), seconds[which], sizes, has_prefills=has_prefills)
            for which, sizes, has_prefills in (
                (~with_prefill, graphs.decode if graphs else (), False),
                (with_prefill, graphs.prefill if graphs else (), True),
            )
        )
        return cls(decode=decode, prefill=prefill)

    def predict_s(self, totals: BatchTotals) -> float:
        if totals.num_new:
            return self.prefill.predict_s(totals)
        return self.decode.predict_s(totals) if totals.num_decodes else 0.0

    def to_dict(self) -> dict[str, object]:
        decode, prefill = self.decode.describe(), self.prefill.describe()
        return {"predictor": self.name, "decode": decode, "prefill": prefill}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CoschedPredictor:
        return cls(
            decode=PhaseCosts.from_dict(data, "decode", has_prefills=False),
            prefill=PhaseCosts.from_dict(data, "prefill", has_prefills=True),
        )


def _median(values: FloatArray) -> float:
    """`np.median` loads `numpy.ma` first, which takes several milliseconds."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] + ordered[-half - 1]) / 2


def _padded(tokens: FloatArray, graphs: Sequence[int]) -> FloatArray:
    """Tokens of the graph that the batch runs in; what exceeds the largest runs in none."""
    if not graphs:
        return tokens
    sizes = np.array(graphs, dtype=float)
    place = np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)
    padded: FloatArray = np.maximum(tokens, sizes[place])
    return padded


def _knots(graphs: Sequence[int]) -> tuple[int, ...]:
    """Sizes between which the cost of one more token is the same."""
    largest = graphs[-1] if graphs else 0
    return (0, *graphs, *(size for size in KNOTS if size > largest))


def _segments(tokens: FloatArray, knots: Sequence[int]) -> FloatArray:
    """A constant, and the tokens between two knots; rows."""
    parts = [np.clip(tokens - low, 0, high - low) for low, high in pairwise(knots)]
    return np.array([np.ones(len(tokens)), *parts])


_STEP = 1024
"""Batches of one step of a fit."""


def _ridge_fit(
    features: FloatArray, seconds: FloatArray, weights: FloatArray
) -> Generator[None, None, FloatArray]:
    """In steps. `features` are rows."""
    shares = features * weights
    # Batches that are left out may be the only ones with an amount.
    used = shares.any(axis=1)
    shares = shares[used]
    size = shares.mean(axis=1)
    shares /= size[:, None]
    gram = _RIDGE * np.eye(len(size))
    for first in range(0, shares.shape[1], _STEP):
        yield
        part = shares[:, first : first + _STEP]
        # Not by BLAS, whose threads wait for each other for a tenth of a second on busy cores.
        gram += np.einsum("ik,jk->ij", part, part)
    yield
    found = np.zeros(len(features))
    found[used] = nnls(gram, np.einsum("ik,k->i", shares, seconds * weights)) / size
    return found
