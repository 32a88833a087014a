"""The predictors of three papers, extended where SGLang's batches ask for it (docs/predict.md).

Each is fitted by least squares on relative errors with coefficients that cannot be negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cosched.core.batch import BatchTotals
from cosched.predict.features import FloatArray, GraphSizes, TotalsTable
from cosched.predict.fitted import (
    FittedPredictor,
    check_points,
    number,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoPredictor(FittedPredictor):
    """Prefill max(alpha * n^2 + beta * n, c), decode gamma * max(l) + delta * mean(l), mixed
    lambda * max + (1 - lambda) * sum of the two (Echo §5.2, Eq. 6 to 8).

    n: length of the prompt; l: context lengths of the decodes. Deviations: n^2 is the sum of
    n * (2c + n) over all prefills, n new tokens over c cached, and n their sum, since SGLang
    prefills several prompts and chunks at once; decode has a constant, the reading of the weights,
    without which a short context would take no time. That decode time does not depend on the
    number of decodes is the paper's.

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
        prefills, decodes, mixed = _phases(table, predictor="echo")
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

    def _prefill_s(self, totals: TotalsTable) -> FloatArray:
        alpha, beta, floor = self.prefill
        return np.maximum(alpha * totals.double_pairs + beta * totals.num_new, floor)

    def _decode_s(self, totals: TotalsTable) -> FloatArray:
        gamma, delta, constant = self.decode
        mean = totals.decode_context / totals.num_decodes
        return constant + gamma * totals.max_decode_context + delta * mean

    def predict_s(self, totals: BatchTotals) -> float:
        prefill_s = decode_s = 0.0
        if totals.num_new:
            alpha, beta, floor = self.prefill
            prefill_s = alpha * totals.double_pairs + beta * totals.num_new
            if prefill_s < floor:
                prefill_s = floor
        if totals.num_decodes:
            gamma, delta, constant = self.decode
            mean = totals.decode_context / totals.num_decodes
            decode_s = constant + gamma * totals.max_decode_context + delta * mean
        longer = prefill_s if prefill_s > decode_s else decode_s
        return self.overlap * longer + (1 - self.overlap) * (prefill_s + decode_s)

    @classmethod
    def from_dict(cls, data: Any) -> EchoPredictor:
        return cls(
            prefill=numbers(data, "prefill", 3),
            decode=numbers(data, "decode", 3),
            overlap=number(data, "overlap"),
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
        prefills, decodes, _ = _phases(table, predictor="bros")
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
        if len(table) - below.sum() < _LEAST:
            break
        alpha, beta = relative_fit(features[:, ~below], seconds[~below])
        # The constant that minimises the squares of the relative errors below.
        inverse = 1 / seconds[below]
        floor = float(inverse.sum() / (inverse @ inverse)) if below.any() else 0.0
        errors = np.maximum(np.array([alpha, beta]) @ features, floor) / seconds - 1
        best = min(best, (float(errors @ errors), (alpha, beta, floor)))
    return best[1]


_SPLITS = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
_LEAST = 8
"""Batches of a kind from which a phase is fitted; at least 8 for at most three coefficients."""

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


def _phases(table: TotalsTable, *, predictor: str) -> tuple[Mask, Mask, Mask]:
    """Which batches are prefill-only, decode-only, mixed; ConfigError if one of the first two
    is rare."""
    has_prefill, has_decode = table.num_new > 0, table.num_decodes > 0
    prefills, decodes = has_prefill & ~has_decode, has_decode & ~has_prefill
    check_points("prefill-only", int(prefills.sum()), least=_LEAST, predictor=predictor)
    check_points("decode-only", int(decodes.sum()), least=_LEAST, predictor=predictor)
    return prefills, decodes, has_prefill & has_decode
