"""What the tokens of a prompt say about the length of its reply, beyond that of similar requests.

A linear model of hashed tokens and pairs of tokens, small enough to learn in the scheduler. It
takes the place of the language model that EcoServe fine-tunes for this (EcoServe §2.3).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cosched.predict.length_histogram import Pair

_HEAD, _TAIL = 96, 32
"""Tokens at the ends of a prompt that are used: instructions are there."""
_BITS = 14
_SHIFT = np.uint64(64 - _BITS)
_TOKEN, _PAIR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
"""Odd factors of multiplicative hashing (Knuth 1973)."""
_RATE = 0.1
_FIRST_SQUARES, _MOST_SQUARES = 1e-2, 0.5
"""Bounds of AdaGrad's sums: steps stay large enough to follow traffic that changes."""
_SMOOTH = 0.6
"""Error of the logarithm below which the step of the median shrinks."""
_MOST_LOG = 3.0
"""Largest change to the logarithm of a length."""

Features: TypeAlias = npt.NDArray[np.int64]
"""Indices of the weights of a prompt's tokens and pairs of tokens, each once."""


def features_of(prompt: Sequence[int]) -> Features:
    if len(prompt) > _HEAD + _TAIL:
        prompt = array("q", [*prompt[:_HEAD], *prompt[-_TAIL:]])
    ids = np.array(prompt, dtype=np.int64).view(np.uint64)
    hashed = ids * _TOKEN
    pairs = (hashed[:-1] ^ ids[1:]) * _PAIR
    return np.unique((np.concatenate((hashed, pairs)) >> _SHIFT).view(np.int64))


class TokenModel:
    """Factors on the median and on the upper quantile of similar requests.

    Their logarithms are linear in the features. Learned by pinball loss (Koenker and Bassett 1978)
    and AdaGrad (Duchi et al. 2011), with one step per request that ends.
    """

    def __init__(self, *, coverage: float) -> None:
        """coverage: level of the upper quantile."""
        self._coverage = coverage
        self._weights = np.zeros((1 << _BITS, 2))
        self._squares = np.full((1 << _BITS, 2), _FIRST_SQUARES)

    def totals(self, features: Features, similar: Pair) -> Pair:
        """Estimate for a request. similar: that of similar requests."""
        if not len(features):
            return similar
        logs = self._weights[features].sum(axis=0) / math.sqrt(len(features))
        median, upper = (math.exp(min(max(x, -_MOST_LOG), _MOST_LOG)) for x in logs.tolist())
        median *= similar.median
        return Pair(median, max(upper * similar.upper, median))

    def learn(self, features: Features, similar: Pair, length: int) -> Pair:
        """Learn from a request that has ended. Returns the estimate for it before that."""
        before = self.totals(features, similar)
        if not len(features):
            return before
        error = math.log(max(length, 1) / max(before.median, 1.0))
        slopes = (
            min(max(error / _SMOOTH, -0.5), 0.5),
            self._coverage if length > before.upper else self._coverage - 1,
        )
        step = np.array(slopes) / math.sqrt(len(features))
        squares = np.minimum(self._squares[features] + step * step, _MOST_SQUARES)
        self._squares[features] = squares
        self._weights[features] += _RATE * step / np.sqrt(squares)
        return before
