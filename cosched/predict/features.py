"""What a predictor is fitted to: `BatchTotals` of many measured iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cosched.core.batch import BatchTotals

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Sizes with a CUDA graph, ascending: a batch is padded to the next one.

    prefill  tokens of iterations with a prefill
    decode   requests of decode-only iterations
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsTable:
    """`BatchTotals` of many batches, one array per field. The names are those of `BatchTotals`, so
    a formula over these names serves one batch and a table of them. `num_loaded` is missing:
    iterations that load KV are not learned from."""

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
    def of(cls, totals: Sequence[BatchTotals]) -> TotalsTable:
        columns = {f.name: [getattr(t, f.name) for t in totals] for f in fields(cls)}
        return cls(**{name: np.array(column, dtype=float) for name, column in columns.items()})

    def __len__(self) -> int:
        return len(self.num_new)

    def rows(self, which: npt.NDArray[np.bool_]) -> TotalsTable:
        return TotalsTable(**{f.name: getattr(self, f.name)[which] for f in fields(self)})
