"""What a predictor is fitted to: `BatchTotals` of many measured iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from cosched.core.batch import QUERY_TILE, BatchShape, BatchTotals
from cosched.latency.interp import FloatArray
from cosched.latency.steps import Steps

__all__ = ["TotalsTable", "totals_table"]

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
