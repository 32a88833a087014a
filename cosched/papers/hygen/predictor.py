"""HyGen's predictor of iteration times (docs/architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
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
    A chunk over a cached prefix costs what one over none does, and a mixed batch the sum of its
    parts. Deviations: S_d counts the tokens that decodes attend to (with one new token per decode
    the paper's "decode tokens" would be N_d once more); coefficients are not negative and minimise
    relative errors, so that `max_prefill` has an answer.

    coefficients  seconds of an iteration, then per unit of each of `FEATURES`
    """

    coefficients: tuple[float, ...]

    FEATURES = ("iteration", "S_p", "S_d", "S_p^2", "S_d^2", "N_p", "N_d")

    @property
    def name(self) -> str:
        return "hygen"

    @classmethod
    def fit(
        cls, table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None
    ) -> HygenPredictor:
        check_points("measured", len(table), least=2 * len(cls.FEATURES), predictor="hygen")
        features = np.array([np.ones(len(table)), *_features(table)])
        return cls(coefficients=relative_fit(features, seconds))

    def predict_s(self, totals: BatchTotals) -> float:
        if not totals.num_new and not totals.num_decodes:
            return 0.0
        fixed, *costs = self.coefficients
        return sum(map(mul, costs, _features(totals)), start=fixed)

    @classmethod
    def from_dict(cls, data: Any) -> HygenPredictor:
        return cls(coefficients=numbers(data, "coefficients", len(cls.FEATURES)))


def _features(totals: Any) -> tuple[Any, ...]:
    """Of `BatchTotals`, or of a table of them."""
    new, context = totals.num_new, totals.decode_context
    return (
        new,
        context,
        new * new,
        context * context,
        totals.num_prefills,
        totals.num_decodes,
    )
