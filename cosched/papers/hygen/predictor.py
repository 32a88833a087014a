"""HyGen's predictor of iteration times (docs/predict.md)."""

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
    check_points,
    numbers,
    relative_fit,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HygenPredictor(FittedPredictor):
    """T = f(S_p, S_d, S_p^2, S_d^2, N_p, N_d), linear (HyGen §4.2, Eq. 1).

    S_p: new prompt tokens of the batch; S_d: context tokens of its decodes; N_p, N_d: requests.
    Deviations: S_d counts the tokens that decodes attend to (with one new token per decode the
    paper's "decode tokens" would be N_d once more); S_p * S_c is added, S_c the cached tokens of
    the prefills, for chunks over a cached prefix. A mixed batch needs nothing of its own.

    coefficients  seconds per unit of each of `FEATURES`
    """

    coefficients: tuple[float, ...]

    FEATURES = ("iteration", "S_p", "S_d", "S_p^2", "S_d^2", "N_p", "N_d", "S_p*S_c")

    @property
    def name(self) -> str:
        return "hygen"

    @classmethod
    def fit(
        cls, table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None
    ) -> HygenPredictor:
        check_points("measured", len(table), least=2 * len(cls.FEATURES), predictor="hygen")
        new, context = table.num_new, table.decode_context
        features = (
            np.ones(len(table)),
            new,
            context,
            new * new,
            context * context,
            table.num_prefills,
            table.num_decodes,
            new * table.num_cached,
        )
        return cls(coefficients=relative_fit(np.array(features), seconds))

    def predict_s(self, totals: BatchTotals) -> float:
        new, context = totals.num_new, totals.decode_context
        if not new and not totals.num_decodes:
            return 0.0
        fixed, s_p, s_d, s_p2, s_d2, n_p, n_d, cached = self.coefficients
        return (
            fixed
            + s_p * new
            + s_d * context
            + s_p2 * (new * new)
            + s_d2 * (context * context)
            + n_p * totals.num_prefills
            + n_d * totals.num_decodes
            + cached * (new * totals.num_cached)
        )

    @classmethod
    def from_dict(cls, data: Any) -> HygenPredictor:
        return cls(coefficients=numbers(data, "coefficients", len(cls.FEATURES)))
