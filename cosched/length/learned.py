"""What the tokens of a prompt say about the length of the response."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cosched.length.facts import Facts
from cosched.length.histogram import Pair

__all__ = ["Features", "TokenModel", "features_of"]

_HEAD, _TAIL = 96, 32
"""Tokens of a prompt that are looked at."""
_BITS = 14
_SIZE = 1 << _BITS
_UNIGRAM = np.uint64(0x9E3779B97F4A7C15)
_BIGRAM = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(64 - _BITS)
_TOKEN_RATE = 0.1
_RATES = (0.03, 0.03, 0.03, 0.03, 0.1)
"""Steps of AdaGrad: of tokens; of the constant, three logarithms, and the histogram."""
_CONSTANT = 0.5
_MOST_LOG = 20.0
_FIRST_SQUARES = 1e-2
_MOST_TOKEN_SQUARES, _MOST_DENSE_SQUARES = 0.5, 10.0
"""Steps get no smaller than these allow, so that it goes on learning when traffic changes."""
_STACK = 0.5
"""Of the histogram's own estimate, as long as nothing is known about its worth."""
_SMOOTH = 0.6
"""Error of the logarithm below which the median's gradient fades [factor e^0.3 either way]."""
_MOST = 3.0
"""Standard deviations of a feature, beyond which it is cut."""
_SLOWEST = 1 / 500
"""Of the newest request in the means of features."""

_ONES = np.ones(2 * (_HEAD + _TAIL))

Indices = npt.NDArray[np.int64]


class Features(NamedTuple):
    """tokens  places of the prompt's token and pairs of tokens among the weights
    dense   logarithms of the prompt's length, of the number of different tokens in it, of the limit
    """

    tokens: Indices
    dense: tuple[float, float, float]


def features_of(facts: Facts) -> Features:
    """Of the head and the tail of a prompt: where instructions are."""
    prompt = facts.prompt
    if len(prompt) > _HEAD + _TAIL:
        prompt = array("q", [*prompt[:_HEAD], *prompt[-_TAIL:]])
    ids = np.array(prompt, dtype=np.int64).view(np.uint64)
    hashed = ids * _UNIGRAM
    pairs = (hashed[:-1] ^ ids[1:]) * _BIGRAM
    places = (np.concatenate((hashed, pairs)) >> _SHIFT).view(np.int64)
    places.sort()
    if len(places):
        is_first = np.empty(len(places), dtype=bool)
        is_first[0] = True
        np.not_equal(places[1:], places[:-1], out=is_first[1:])
        places = places[is_first]
    return Features(
        places,
        (
            math.log(max(facts.num_tokens, 1)),
            math.log(len(places) + 1),
            math.log(max(facts.limit, 1)),
        ),
    )


class TokenModel:
    """Median and upper quantile of the logarithm of the length: linear in hashed tokens and pairs
    of tokens, in three logarithms, and in what the histogram says beyond the quantiles of all
    requests. Learned by pinball loss (Koenker and Bassett 1978) and AdaGrad (Duchi et al. 2011),
    one step per request: in one pass it does not overfit, and in several it did.
    """

    def __init__(self, *, coverage: float) -> None:
        """coverage: level of the upper quantile."""
        self._level = coverage
        self._weights = np.zeros((_SIZE, 2))
        self._squares = np.full((_SIZE, 2), _FIRST_SQUARES)
        # Of the median and of the upper quantile: constant, three logarithms, the histogram.
        self._dense = [[0.0, 0.0, 0.0, 0.0, _STACK] for _ in range(2)]
        self._dense_squares = [[_FIRST_SQUARES] * 5 for _ in range(2)]
        self._means = [0.0, 0.0, 0.0]
        self._variances = [1.0, 1.0, 1.0]
        self._deviations = [1.0, 1.0, 1.0]
        self._count = 0

    def totals(self, features: Features, root: Pair, like: Pair) -> Pair:
        """Of the length. root: the same of all requests; like: of like ones (`Histogram`)."""
        return _pair(*self._logs(features, self._scaled(features), root, like))

    def learn(self, features: Features, root: Pair, like: Pair, length: int) -> Pair:
        """A request has ended that was so long; root and like: as known before it. What was
        believed before it."""
        scaled = self._scaled(features)
        median, upper = self._logs(features, scaled, root, like)
        truth = math.log(max(length, 1))
        slopes = (
            min(max((truth - median) / _SMOOTH, -0.5), 0.5),
            self._level if truth > upper else self._level - 1,
        )
        places = features.tokens
        if len(places):
            step = np.array(slopes) / math.sqrt(len(places))
            squares = self._squares.take(places, axis=0)
            squares += step * step
            np.minimum(squares, _MOST_TOKEN_SQUARES, out=squares)
            self._squares[places] = squares
            np.sqrt(squares, out=squares)
            step *= _TOKEN_RATE
            np.divide(step, squares, out=squares)
            squares += self._weights.take(places, axis=0)
            self._weights[places] = squares
        for i, slope in enumerate(slopes):
            weights, sums = self._dense[i], self._dense_squares[i]
            told = math.log(max(like[i], 1.0) / max(root[i], 1.0))
            for j, value in enumerate((*scaled, told)):
                gradient = slope * value
                sums[j] = min(sums[j] + gradient * gradient, _MOST_DENSE_SQUARES)
                weights[j] += _RATES[j] * gradient / math.sqrt(sums[j])
        self._follow(features)
        return _pair(median, upper)

    def _scaled(self, features: Features) -> tuple[float, ...]:
        """A constant, and the three logarithms in standard deviations from their means."""
        return (
            _CONSTANT,
            *(
                min(max((value - mean) / deviation, -_MOST), _MOST)
                for value, mean, deviation in zip(
                    features.dense, self._means, self._deviations, strict=True
                )
            ),
        )

    def _logs(
        self, features: Features, scaled: tuple[float, ...], root: Pair, like: Pair
    ) -> tuple[float, float]:
        """Logarithms of both quantiles."""
        places = features.tokens
        median = upper = 0.0
        if len(places):
            weights = self._weights.take(places, axis=0)
            median, upper = (_ONES[: len(places)] @ weights).tolist()
            norm = math.sqrt(len(places))
            median /= norm
            upper /= norm
        one, x, y, z = scaled
        a, b, c, d, e = self._dense[0]
        base = math.log(max(root[0], 1.0))
        told = math.log(max(like[0], 1.0)) - base
        median += base + a * one + b * x + c * y + d * z + e * told
        a, b, c, d, e = self._dense[1]
        base = math.log(max(root[1], 1.0))
        told = math.log(max(like[1], 1.0)) - base
        upper += base + a * one + b * x + c * y + d * z + e * told
        return median, upper

    def _follow(self, features: Features) -> None:
        """Means and deviations of the logarithms; the newest requests weigh most."""
        self._count += 1
        share = max(1 / self._count, _SLOWEST)
        for i, value in enumerate(features.dense):
            before = value - self._means[i]
            self._means[i] += share * before
            self._variances[i] += share * (before * (value - self._means[i]) - self._variances[i])
            self._deviations[i] = math.sqrt(self._variances[i] + 0.01)


def _pair(median: float, upper: float) -> Pair:
    """Of their logarithms."""
    told = math.exp(min(median, _MOST_LOG))
    return Pair(told, max(math.exp(min(upper, _MOST_LOG)), told))
