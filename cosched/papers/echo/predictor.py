"""Echo's predictor of iteration times (docs/architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cosched.core.batch import BatchTotals
from cosched.predict.fitted import (
    LEAST_POINTS,
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
class EchoPredictor(FittedPredictor):
    """Prefill max(alpha * n^2 + beta * n, c), decode gamma * max(l) + delta * mean(l), mixed
    lambda * max + (1 - lambda) * sum of the two (Echo §5.2, Eq. 6 to 8).

    n: length of the prompt; l: context lengths of the decodes. Deviations: n^2 is the sum of
    n * (2c + n) over all prefills, n new tokens over c cached, and n their sum, since SGLang
    prefills several prompts and chunks at once; decode has a constant, the reading of the weights,
    without which a short context would take no time (decodes of an A100: 70 % mean error). That
    decode time does not depend on the number of decodes is the paper's.

    prefill  (alpha, beta, c);  decode  (gamma, delta, constant);  overlap  lambda (0-1)
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    overlap: float

    @property
    def name(self) -> str:
        return "echo"

    @classmethod
    def fit(
        cls, table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None
    ) -> EchoPredictor:
        """The phases from batches of one kind each, then lambda from mixed ones (0.5 if none)."""
        prefills, decodes, mixed = phases(table, predictor="echo")
        first = cls(
            prefill=_fit_floored(table.rows(prefills), seconds[prefills]),
            decode=_fit_pooling(table.rows(decodes), seconds[decodes]),
            overlap=0.5,
        )
        if not mixed.any():
            return first
        parts = table.rows(mixed)
        prefill_s, decode_s = first._prefill_s(parts), first._decode_s(parts)
        # lambda * max + (1 - lambda) * sum = sum - lambda * min
        saved = np.minimum(prefill_s, decode_s) / seconds[mixed]
        excess = (prefill_s + decode_s) / seconds[mixed] - 1
        overlap = float(np.clip((saved @ excess) / (saved @ saved), 0.0, 1.0))
        return cls(prefill=first.prefill, decode=first.decode, overlap=overlap)

    def _prefill_s(self, totals: Any) -> Any:
        """Of `BatchTotals`, or of a table of them."""
        alpha, beta, floor = self.prefill
        return np.maximum(alpha * totals.double_pairs + beta * totals.num_new, floor)

    def _decode_s(self, totals: Any) -> Any:
        gamma, delta, constant = self.decode
        mean = totals.decode_context / totals.num_decodes
        return constant + gamma * totals.max_decode_context + delta * mean

    def predict_s(self, totals: BatchTotals) -> float:
        prefill_s = float(self._prefill_s(totals)) if totals.num_new else 0.0
        decode_s = float(self._decode_s(totals)) if totals.num_decodes else 0.0
        longer = max(prefill_s, decode_s)
        return self.overlap * longer + (1 - self.overlap) * (prefill_s + decode_s)

    @classmethod
    def from_dict(cls, data: Any) -> EchoPredictor:
        return cls(
            prefill=numbers(data, "prefill", 3),
            decode=numbers(data, "decode", 3),
            overlap=number(data, "overlap"),
        )


def _fit_pooling(table: TotalsTable, seconds: FloatArray) -> tuple[float, ...]:
    mean = table.decode_context / table.num_decodes
    features = np.array([table.max_decode_context, mean, np.ones(len(table))])
    return relative_fit(features, seconds)


def _fit_floored(table: TotalsTable, seconds: FloatArray) -> tuple[float, ...]:
    """(alpha, beta, c) of max(alpha * n^2 + beta * n, c): for each number of tokens up to which the
    floor may reach, the floor from the batches below and the rest from those above; the best."""
    features = np.array([table.double_pairs, table.num_new])
    best: tuple[float, tuple[float, ...]] = (np.inf, ())
    for split in _SPLITS:
        below = table.num_new <= split
        if len(table) - below.sum() < LEAST_POINTS:
            break
        alpha, beta = relative_fit(features[:, ~below], seconds[~below])
        # The constant that minimises the squares of the relative errors below.
        inverse = 1 / seconds[below]
        floor = float(inverse.sum() / (inverse @ inverse)) if below.any() else 0.0
        errors = np.maximum(np.array([alpha, beta]) @ features, floor) / seconds - 1
        best = min(best, (float(errors @ errors), (alpha, beta, floor)))
    return best[1]


_SPLITS = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
