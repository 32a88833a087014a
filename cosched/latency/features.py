"""What a predictor sees of an iteration: sums that grow request by request, in O(1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from cosched.core.batch import BatchShape
from cosched.latency.interp import FloatArray
from cosched.latency.steps import Steps

__all__ = ["QUERY_TILE", "BatchTotals", "TotalsTable", "totals_table"]

QUERY_TILE = 64
"""Queries that attention kernels work on at a time: a chunk with fewer takes about as long as one
with as many. Where a tile half filled ends and a full one begins, the cost of a chunk over a long
prefix turns from one per key into one per pair."""


class BatchTotals:
    """Sums over an iteration that a planner grows request by request. Every update is O(1).

    num_prefills         requests with prompt tokens in the iteration
    num_new              their prompt tokens computed now (HyGen's S_p)
    num_cached           tokens before those whose KV is there already
    double_pairs         twice the (query, key) pairs of prefill attention: sum of n * (2c + n) for
                         n new tokens over c cached; whole numbers, so no rounding
    double_tail_pairs    the same for the queries beyond the first `QUERY_TILE` of each prefill
    max_prefill_context  longest n + c [tokens]
    num_decodes          decoding requests, one token each
    decode_context       sum of the tokens they attend to, their new ones included
    max_decode_context   the largest of these [tokens]
    num_loaded           tokens whose KV comes back from host memory while the iteration runs
    """

    __slots__ = (
        "decode_context",
        "double_pairs",
        "double_tail_pairs",
        "max_decode_context",
        "max_prefill_context",
        "num_cached",
        "num_decodes",
        "num_loaded",
        "num_new",
        "num_prefills",
    )

    def __init__(self) -> None:
        self.num_prefills = 0
        self.num_new = 0
        self.num_cached = 0
        self.double_pairs = 0
        self.double_tail_pairs = 0
        self.max_prefill_context = 0
        self.num_decodes = 0
        self.decode_context = 0
        self.max_decode_context = 0
        self.num_loaded = 0

    @classmethod
    def of(cls, batch: BatchShape) -> BatchTotals:
        """The totals of a whole batch; O(requests)."""
        totals = cls()
        for num_new, num_cached in batch.prefills:
            totals.add_prefill(num_new, num_cached)
        totals.add_decodes(batch.decodes)
        return totals

    def add_prefill(self, num_new: int, num_cached: int) -> None:
        """A request with `num_new` (at least 1) prompt tokens over `num_cached` cached ones."""
        self.num_prefills += 1
        self.num_new += num_new
        self.num_cached += num_cached
        self.double_pairs += num_new * (2 * num_cached + num_new)
        tail = num_new - QUERY_TILE
        if tail > 0:
            self.double_tail_pairs += tail * (2 * (num_cached + QUERY_TILE) + tail)
        context = num_new + num_cached
        if context > self.max_prefill_context:
            self.max_prefill_context = context

    def add_decode(self, context: int) -> None:
        """A decode that attends to `context` tokens, its new one included."""
        self.num_decodes += 1
        self.decode_context += context
        if context > self.max_decode_context:
            self.max_decode_context = context

    def add_decodes(self, contexts: Sequence[int]) -> None:
        """Many decodes; O(len(contexts)), in C."""
        if contexts:
            self.num_decodes += len(contexts)
            self.decode_context += sum(contexts)
            self.max_decode_context = max(self.max_decode_context, max(contexts))

    def add_load(self, num_tokens: int) -> None:
        """A request whose `num_tokens` tokens of KV come back from host memory meanwhile."""
        self.num_loaded += num_tokens

    def copy(self) -> BatchTotals:
        other = BatchTotals.__new__(BatchTotals)
        other.num_prefills = self.num_prefills
        other.num_new = self.num_new
        other.num_cached = self.num_cached
        other.double_pairs = self.double_pairs
        other.double_tail_pairs = self.double_tail_pairs
        other.max_prefill_context = self.max_prefill_context
        other.num_decodes = self.num_decodes
        other.decode_context = self.decode_context
        other.max_decode_context = self.max_decode_context
        other.num_loaded = self.num_loaded
        return other

    def decodes_only(self) -> BatchTotals:
        """The totals of its decodes alone."""
        other = BatchTotals()
        other.num_decodes = self.num_decodes
        other.decode_context = self.decode_context
        other.max_decode_context = self.max_decode_context
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchTotals) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        known = ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"BatchTotals({known})"


_ROWS_PER_STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsTable:
    """`BatchTotals` of many batches, one array per field: what a fit reads. The names are those of
    `BatchTotals`, so a formula over these names serves one batch and a table of them. `num_loaded`
    is missing: a `BatchShape` does not tell it."""

    num_prefills: FloatArray
    num_new: FloatArray
    num_cached: FloatArray
    double_pairs: FloatArray
    double_tail_pairs: FloatArray
    max_prefill_context: FloatArray
    num_decodes: FloatArray
    decode_context: FloatArray
    max_decode_context: FloatArray

    @classmethod
    def of(cls, totals: Sequence[BatchTotals]) -> Steps[TotalsTable]:
        columns = {field.name: np.empty(len(totals)) for field in fields(cls)}
        for start in range(0, len(totals), _ROWS_PER_STEP):
            yield 64 * _ROWS_PER_STEP * len(columns)
            part = totals[start : start + _ROWS_PER_STEP]
            for name, column in columns.items():
                column[start : start + len(part)] = [getattr(t, name) for t in part]
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.num_new)

    def rows(self, which: FloatArray | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> TotalsTable:
        """The rows that a mask or a list of indices names."""
        return TotalsTable(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


def totals_table(batches: Sequence[BatchShape]) -> TotalsTable:
    """The table of many batches; one pass over their requests."""
    num_prefills = np.array([len(batch.prefills) for batch in batches], dtype=np.int64)
    num_decodes = np.array([len(batch.decodes) for batch in batches], dtype=np.int64)
    pairs = np.array(
        [pair for batch in batches for pair in batch.prefills], dtype=np.float64
    ).reshape(-1, 2)
    new, cached = pairs[:, 0], pairs[:, 1]
    contexts = np.fromiter(
        chain.from_iterable(batch.decodes for batch in batches), dtype=np.float64
    )
    tail = np.maximum(new - QUERY_TILE, 0.0)
    return TotalsTable(
        num_prefills=num_prefills.astype(np.float64),
        num_new=_sums(new, num_prefills),
        num_cached=_sums(cached, num_prefills),
        double_pairs=_sums(new * (2 * cached + new), num_prefills),
        double_tail_pairs=_sums(tail * (2 * (cached + QUERY_TILE) + tail), num_prefills),
        max_prefill_context=_maxima(new + cached, num_prefills),
        num_decodes=num_decodes.astype(np.float64),
        decode_context=_sums(contexts, num_decodes),
        max_decode_context=_maxima(contexts, num_decodes),
    )


def _sums(values: FloatArray, counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> FloatArray:
    """Sum of each run of `counts[i]` values."""
    return _reduced(np.add, values, counts)


def _maxima(values: FloatArray, counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> FloatArray:
    return _reduced(np.maximum, values, counts)


def _reduced(
    ufunc: np.ufunc, values: FloatArray, counts: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> FloatArray:
    """`ufunc` over each run of `counts[i]` values; 0 for empty runs."""
    result = np.zeros(len(counts))
    filled = counts > 0
    if filled.any():
        starts = np.cumsum(counts) - counts
        result[filled] = ufunc.reduceat(values, starts[filled])
    return result
