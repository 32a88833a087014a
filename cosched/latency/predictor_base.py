"""What a predictor is, and the inverse that all of them share."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cosched.errors import ConfigError
from cosched.latency.features import QUERY_TILE, BatchTotals
from cosched.latency.interp import FloatArray
from cosched.latency.nnls import nnls_normal

__all__ = ["Predictor", "check_points", "largest_prefill", "number", "numbers", "relative_fit"]


class Predictor(Protocol):
    """A policy's belief of how long an iteration takes.

    Pure: the same totals give the same seconds. More tokens in a prefill never make a prediction
    smaller, rounding included; `max_prefill` relies on it.
    """

    @property
    def name(self) -> str: ...

    def predict_s(self, totals: BatchTotals) -> float:
        """Time of the iteration [s]; 0.0 for an empty one. Never raises."""
        ...

    def max_prefill(
        self, totals: BatchTotals, num_cached: int, limit_s: float, limit_tokens: int
    ) -> int:
        """The largest n in 0..limit_tokens for which the iteration with one more prefill, of n
        tokens over `num_cached`, is predicted to take at most `limit_s`; 0 when not even one token
        fits. The exact inverse of `predict_s` (HyGen Alg. 1, get_max_prefill, without its memory
        budget). Does not change `totals`."""
        return largest_prefill(self.predict_s, totals, num_cached, limit_s, limit_tokens)

    def describe(self) -> dict[str, object]:
        """What the predictor is, for a results file: plain JSON values."""
        ...


class FittedPredictor(Predictor, Protocol):
    """A predictor whose coefficients do not change, so that a file can hold them."""

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values from which `predictor_from_dict` makes an equal predictor."""
        ...

    def describe(self) -> dict[str, object]:
        return self.to_dict()


def largest_prefill(
    predict_s: Callable[[BatchTotals], float],
    totals: BatchTotals,
    num_cached: int,
    limit_s: float,
    limit_tokens: int,
) -> int:
    """`Predictor.max_prefill` by bisection of `predict_s`: about 14 predictions for 8192 tokens."""
    trial = totals.copy()
    trial.num_prefills += 1
    trial.num_cached += num_cached
    num_new, pairs, tail_pairs = totals.num_new, totals.double_pairs, totals.double_tail_pairs
    longest = totals.max_prefill_context
    twice_cached = 2 * num_cached
    twice_tail_start = 2 * (num_cached + QUERY_TILE)

    def seconds(n: int) -> float:
        trial.num_new = num_new + n
        trial.double_pairs = pairs + n * (twice_cached + n)
        tail = n - QUERY_TILE
        trial.double_tail_pairs = (
            tail_pairs + tail * (twice_tail_start + tail) if tail > 0 else tail_pairs
        )
        context = n + num_cached
        trial.max_prefill_context = context if context > longest else longest
        return predict_s(trial)

    if limit_tokens <= 0 or seconds(limit_tokens) <= limit_s:  # most prompts fit whole
        return max(limit_tokens, 0)
    return bisect_right(range(1, limit_tokens), limit_s, key=seconds)


def relative_fit(features: FloatArray, seconds: FloatArray) -> tuple[float, ...]:
    """Coefficients >= 0 that minimise the squares of the relative errors; features are rows."""
    matrix = features.T / seconds[:, None]
    return tuple(nnls_normal(matrix.T @ matrix, matrix.sum(axis=0)).tolist())


def check_points(kind: str, num: int, *, least: int, predictor: str) -> None:
    """ConfigError when there are too few batches of a kind to fit a predictor."""
    if num < least:
        raise ConfigError(
            f"the {predictor!r} predictor needs at least {least} {kind} batches to fit; "
            f"there are {num}"
        )


def number(data: Mapping[str, Any], key: str) -> float:
    """The number >= 0 at `key`; ConfigError naming it when it is none."""
    return _checked(data.get(key), key)


def numbers(data: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    """The `length` numbers >= 0 at `key`; ConfigError naming them when they are none."""
    values = data.get(key)
    if not isinstance(values, list | tuple) or len(values) != length:
        raise ConfigError(f"{key} is {values!r}; it must be a list of {length} numbers")
    return tuple(_checked(value, f"{key}[{i}]") for i, value in enumerate(values))


def _checked(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} is {value!r}; it must be a number, at least 0")
    return float(value)
