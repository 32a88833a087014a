"""cosched's own predictor: a level per CUDA graph size, attention by pairs, keys and contexts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from cosched.core.batch import BatchTotals
from cosched.errors import ConfigError
from cosched.latency.interp import FloatArray
from cosched.latency.predictor_base import FittedPredictor, number, numbers

__all__ = [
    "CONTEXTS",
    "DECODES",
    "SIZES",
    "CoschedPredictor",
    "PrefillCosts",
    "TokenCurve",
    "surface_corners",
]

SIZES = (
    1,
    8,
    16,
    32,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
)
"""Where the cost of the tokens of an iteration may bend when it runs in no CUDA graph [tokens]."""

DECODES = (1, 4, 8, 16, 32, 64, 256)
CONTEXTS = (0, 128, 512, 2048, 32768)
"""Corners of the surface of decode attention: number of decodes, mean context [tokens]. In between
it is straight (in the logarithm of the number), as the kernels split long contexts over a GPU that
few decodes cannot fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCurve:
    """Seconds by number of tokens, non-decreasing.

    sizes       ascending [tokens]
    seconds     at each size; beyond the last in proportion to the tokens
    num_graphs  of the sizes, the first so many have a CUDA graph: what lies below one of them costs
                what it does. Between the others the curve is straight.

    ConfigError when the sizes do not ascend.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    num_graphs: int

    def __post_init__(self) -> None:
        ascend = all(low < high for low, high in pairwise((0, *self.sizes)))
        if not self.sizes or not ascend or len(self.seconds) != len(self.sizes):
            raise ConfigError(
                f"the sizes of a curve are {list(self.sizes)}, with {len(self.seconds)} times; "
                "they must be above 0 and ascend, with one time each"
            )

    @classmethod
    def empty(cls, graphs: Sequence[int]) -> TokenCurve:
        """No seconds yet; `SIZES` go on where the graphs, if any, end."""
        largest = graphs[-1] if graphs else 0
        sizes = (*graphs, *(size for size in SIZES if size > largest))
        return cls(sizes=sizes, seconds=(0.0,) * len(sizes), num_graphs=len(graphs))

    def table(self) -> list[float]:
        """Seconds for 0, 1, ..., sizes[-1] tokens."""
        low, high, share = _every_size(self.sizes, self.num_graphs)
        levels = np.array(self.seconds)
        between = levels[low] + share * (levels[high] - levels[low])
        # Rounding may not make it fall.
        table: list[float] = np.maximum.accumulate(between).tolist()
        return table

    def locate(self, tokens: FloatArray) -> tuple[Any, Any, FloatArray]:
        """(i, j, w): a number of tokens costs level i moved by w (0-1) towards level j."""
        return _locate(self.sizes, self.num_graphs, tokens)


def _locate(
    sizes: tuple[int, ...], num_graphs: int, tokens: FloatArray
) -> tuple[Any, Any, FloatArray]:
    at = np.array(sizes, dtype=np.float64)
    high = np.minimum(np.searchsorted(at, tokens), len(at) - 1)
    low = np.where(high < num_graphs, high, np.maximum(high - 1, 0))
    width = np.maximum(at[high] - at[low], 1.0)
    return low, high, np.clip((tokens - at[low]) / width, 0.0, 1.0)


@lru_cache(maxsize=4)
def _every_size(sizes: tuple[int, ...], num_graphs: int) -> tuple[Any, Any, FloatArray]:
    """Where 0, 1, ..., sizes[-1] tokens lie: the same at every fit."""
    return _locate(sizes, num_graphs, np.arange(sizes[-1] + 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCosts:
    """What an iteration with a prefill takes beyond the level of its tokens.

    request           of each request [s]
    double_pair       half of one (query, key) pair of prefill attention [s]
    double_tail_pair  the same, for queries beyond the first `QUERY_TILE` of their chunk [s]
    key               of each token of the prefills' contexts: reading their keys [s]
    longest_key       of each token of the longest context: the prefill that ends last [s]
    decode_attention  attention of decodes here, as a multiple of what it is among decodes only
    """

    request: float
    double_pair: float
    double_tail_pair: float
    key: float
    longest_key: float
    decode_attention: float

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(cls.__dataclass_fields__)


class CoschedPredictor(FittedPredictor):
    """Seconds of an iteration:

        decode-only    D(N_d) + A
        with prefills  P(S_p + N_d) + k * A + r * (N_p + N_d) + p * pairs + q * tail pairs
                       + m * keys + l * longest

    P, D: a level for each CUDA graph size, or straight between `SIZES` where there are no graphs.
    A = N_d * g(N_d, mean context) + u * N_d * longest context: attention of the decodes, g a
    surface over `DECODES` and `CONTEXTS`. pairs, tail pairs, longest: of `BatchTotals`; keys: new
    and cached tokens of the prefills.

    All levels and costs are non-negative, levels do not fall with the tokens and g does not fall
    with the context, so more prompt tokens or longer contexts are never predicted to be cheaper.
    """

    __slots__ = (
        "_costs",
        "_decode_levels",
        "_prefill_levels",
        "_slopes",
        "_values",
        "costs",
        "decode",
        "imbalance",
        "prefill",
        "surface",
    )

    def __init__(
        self,
        *,
        prefill: TokenCurve,
        decode: TokenCurve,
        costs: PrefillCosts,
        surface: Sequence[Sequence[float]],
        imbalance: float,
    ) -> None:
        """surface: a row for each of `DECODES`, a value for each of `CONTEXTS` [s per decode];
        imbalance: u above [s]."""
        self.prefill = prefill
        self.decode = decode
        self.costs = costs
        self.surface = tuple(tuple(row) for row in surface)
        self.imbalance = imbalance
        self._prefill_levels = prefill.table()
        self._decode_levels = decode.table()
        # The surface for every number of decodes, so that a prediction interpolates once.
        low, high, share = surface_corners(np.arange(DECODES[-1] + 1.0))
        corners = np.array(self.surface)
        values = corners[low] * (1 - share)[:, None] + corners[high] * share[:, None]
        self._values: list[list[float]] = values.tolist()
        self._slopes: list[list[float]] = (np.diff(values, axis=1) / np.diff(CONTEXTS)).tolist()

    @property
    def name(self) -> str:
        return "cosched"

    def predict_s(self, totals: BatchTotals) -> float:
        num_decodes = totals.num_decodes
        attention = self._decode_attention(totals) if num_decodes else 0.0
        if not totals.num_new:
            if not num_decodes:
                return 0.0
            return _level(self._decode_levels, num_decodes) + attention
        costs = self.costs
        rest = costs.decode_attention * attention + costs.request * (
            totals.num_prefills + num_decodes
        )
        return (
            rest
            + _level(self._prefill_levels, totals.num_new + num_decodes)
            + costs.double_pair * totals.double_pairs
            + costs.double_tail_pair * totals.double_tail_pairs
            + costs.key * (totals.num_new + totals.num_cached)
            + costs.longest_key * totals.max_prefill_context
        )

    def _decode_attention(self, totals: BatchTotals) -> float:
        num = totals.num_decodes
        mean = totals.decode_context / num
        row = num if num <= DECODES[-1] else DECODES[-1]
        i = bisect_right(CONTEXTS, mean, 1, len(CONTEXTS) - 1) - 1
        per_decode = self._values[row][i] + self._slopes[row][i] * (mean - CONTEXTS[i])
        return num * (per_decode + self.imbalance * totals.max_decode_context)

    @classmethod
    def from_dict(cls, data: Any) -> CoschedPredictor:
        """ConfigError naming the entry that is missing or wrong."""
        rows = data.get("surface")
        if not isinstance(rows, list) or len(rows) != len(DECODES):
            raise ConfigError(f"surface is {rows!r}; it must be a list of {len(DECODES)} lists")
        costs = data.get("costs")
        if not isinstance(costs, dict):
            raise ConfigError(f"costs is {costs!r}; it must be an object")
        return cls(
            prefill=_curve(data, "prefill"),
            decode=_curve(data, "decode"),
            costs=PrefillCosts(**{name: number(costs, name) for name in PrefillCosts.names()}),
            surface=[
                numbers({f"surface[{i}]": row}, f"surface[{i}]", len(CONTEXTS))
                for i, row in enumerate(rows)
            ],
            imbalance=number(data, "imbalance"),
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "predictor": self.name,
            "prefill": _curve_dict(self.prefill),
            "decode": _curve_dict(self.decode),
            "costs": asdict(self.costs),
            "surface": [list(row) for row in self.surface],
            "imbalance": self.imbalance,
        }


def surface_corners(num: FloatArray) -> tuple[Any, Any, FloatArray]:
    """(i, j, w): a number of decodes lies at share w between rows i and j of the surface."""
    knots = np.log2(DECODES)
    at = np.log2(np.clip(num, DECODES[0], DECODES[-1]))
    low = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
    return low, low + 1, (at - knots[low]) / (knots[low + 1] - knots[low])


def _level(levels: list[float], tokens: int) -> float:
    last = len(levels) - 1
    return levels[tokens] if tokens <= last else levels[last] * tokens / last


def _curve_dict(curve: TokenCurve) -> dict[str, object]:
    return {
        "sizes": list(curve.sizes),
        "seconds": list(curve.seconds),
        "num_graphs": curve.num_graphs,
    }


def _curve(data: Any, key: str) -> TokenCurve:
    curve = data.get(key)
    if not isinstance(curve, dict) or not isinstance(curve.get("sizes"), list):
        raise ConfigError(f"{key} is {curve!r}; it must have sizes, seconds and num_graphs")
    sizes = curve["sizes"]
    return TokenCurve(
        sizes=tuple(int(size) for size in numbers(curve, "sizes", len(sizes))),
        seconds=numbers(curve, "seconds", len(sizes)),
        num_graphs=int(number(curve, "num_graphs")),
    )
