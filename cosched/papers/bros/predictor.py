"""BROS's predictor of iteration times (docs/architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cosched.core.batch import BatchTotals
from cosched.predict.fitted import (
    FittedPredictor,
    FloatArray,
    GraphSizes,
    TotalsTable,
    number,
    numbers,
    phases,
    relative_fit,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrosPredictor(FittedPredictor):
    """alpha0 * L^n + alpha1 * L^n * L^a + beta for the prefills and for the decodes, summed; the
    iteration takes at least the loading of KV from host memory (BROS §4.1, cost model C).

    L^n: new tokens of the phase, L^a: tokens of context, both over all its requests. Deviation: L^a
    of prefills counts their cached tokens too (in the paper it "always equals L^n as no tokens are
    cached yet"). The loading (t_swap, linear in the checkpointed blocks) runs beside the execution:
    max(t_exec, t_swap); it is measured apart and given as `load_s_per_token`.

    prefill, decode   (alpha0, alpha1, beta)
    load_s_per_token  loading the KV of one token from host memory [s]
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    load_s_per_token: float = 0.0

    @property
    def name(self) -> str:
        return "bros"

    @classmethod
    def fit(
        cls, table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None
    ) -> BrosPredictor:
        """The phases from batches of one kind each, as in the paper; mixed ones are not used."""
        prefills, decodes, _ = phases(table, predictor="bros")
        context = table.num_new + table.num_cached
        return cls(
            prefill=_fit_product(table.num_new[prefills], context[prefills], seconds[prefills]),
            decode=_fit_product(
                table.num_decodes[decodes], table.decode_context[decodes], seconds[decodes]
            ),
        )

    def predict_s(self, totals: BatchTotals) -> float:
        seconds = 0.0
        new = totals.num_new
        if new:
            alpha0, alpha1, beta = self.prefill
            seconds = alpha0 * new + alpha1 * (new * (new + totals.num_cached)) + beta
        if totals.num_decodes:
            alpha0, alpha1, beta = self.decode
            decodes = totals.num_decodes
            seconds += alpha0 * decodes + alpha1 * (decodes * totals.decode_context) + beta
        loading = self.load_s_per_token * totals.num_loaded
        return seconds if seconds > loading else loading

    @classmethod
    def from_dict(cls, data: Any) -> BrosPredictor:
        return cls(
            prefill=numbers(data, "prefill", 3),
            decode=numbers(data, "decode", 3),
            load_s_per_token=number(data, "load_s_per_token"),
        )


def _fit_product(new: FloatArray, context: FloatArray, seconds: FloatArray) -> tuple[float, ...]:
    return relative_fit(np.array([new, new * context, np.ones(len(new))]), seconds)
