"""Distributions of lengths in tokens, and their fit to published statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of whole token counts above 0."""

    @property
    def mean(self) -> float: ...

    def sample(self, rng: np.random.Generator, size: int) -> Tokens: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    num_tokens: int

    def __post_init__(self) -> None:
        assert self.num_tokens >= 1, f"{self.num_tokens=}"

    @property
    def mean(self) -> float:
        return float(self.num_tokens)

    def sample(self, rng: np.random.Generator, size: int) -> Tokens:
        return np.full(size, self.num_tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length in ``[low, high]`` alike."""

    low: int
    high: int

    def __post_init__(self) -> None:
        assert 1 <= self.low <= self.high, f"{self.low=} {self.high=}"

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def sample(self, rng: np.random.Generator, size: int) -> Tokens:
        return rng.integers(self.low, self.high, size=size, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """An inverse cumulative distribution through (probability, point), linear between them; the
    first probability is 0 and the last 1. Points are tokens, or seconds."""

    probabilities: tuple[float, ...]
    points: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.probabilities) == len(self.points) >= 2
        assert (self.probabilities[0], self.probabilities[-1]) == (0, 1)
        assert list(self.probabilities) == sorted(self.probabilities)
        assert list(self.points) == sorted(self.points) and self.points[0] >= 0

    @property
    def mean(self) -> float:
        edges, points = np.asarray(self.probabilities), np.asarray(self.points)
        return float(np.dot(np.diff(edges), (points[1:] + points[:-1]) / 2))

    def values(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        return np.interp(rng.random(size), self.probabilities, self.points)

    def sample(self, rng: np.random.Generator, size: int) -> Tokens:
        return np.rint(self.values(rng, size)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """exp(N(mu, sigma²)) under the condition that it lies in ``[low, high]``, rounded."""

    mu: float
    sigma: float
    low: int = 1
    high: int

    def __post_init__(self) -> None:
        assert self.sigma > 0 and 1 <= self.low < self.high, f"{self=}"

    @property
    def mean(self) -> float:
        return self._moment(1)

    @property
    def std(self) -> float:
        return math.sqrt(max(self._moment(2) - self._moment(1) ** 2, 0.0))

    @property
    def median(self) -> float:
        """Of the truncated distribution."""
        return self.at(0.5)

    def at(self, probability: float) -> float:
        """Quantile of the truncated distribution, by bisection."""
        a, b = self._standard(self.low), self._standard(self.high)
        below = _mass(a, b) * probability
        z = _bisect(lambda z: _mass(a, z) - below, a, b)
        return math.exp(self.mu + self.sigma * z)

    def sample(self, rng: np.random.Generator, size: int) -> Tokens:
        drawn = np.empty(0)
        # A share of the draws falls outside; no inverse of erf is at hand that would spare them.
        while drawn.size < size:
            more = np.exp(rng.normal(self.mu, self.sigma, size=2 * (size - drawn.size) + 64))
            drawn = np.concatenate([drawn, more[(more >= self.low) & (more <= self.high)]])
        return np.rint(drawn[:size]).astype(np.int64)

    def _standard(self, tokens: float) -> float:
        return (math.log(tokens) - self.mu) / self.sigma

    def _moment(self, order: int) -> float:
        """E[X^k] = exp(k·mu + k²·sigma²/2) · P(a - k·sigma, b - k·sigma) / P(a, b), with a and b
        the standardised bounds and P the normal probability of an interval."""
        a, b = self._standard(self.low), self._standard(self.high)
        shift = order * self.sigma
        whole = math.exp(order * self.mu + shift**2 / 2)
        return whole * _mass(a - shift, b - shift) / _mass(a, b)


def fit_lognormal(
    *, mean: float, low: int, high: int, std: float | None = None, cv: float = 1.0
) -> LogNormal:
    """The truncated lognormal of a published mean (and standard deviation).

    With `std`, sigma and mu are chosen so that the truncated distribution has both. Without, sigma
    is that of an untruncated lognormal with coefficient of variation `cv` (std / mean), and mu is
    chosen so that the truncated mean is the published one.
    """
    assert low < mean < high, f"{low=} {mean=} {high=}"

    def with_mean(sigma: float) -> LogNormal:
        def excess(mu: float) -> float:
            return LogNormal(mu=mu, sigma=sigma, low=low, high=high).mean - mean

        # Beyond these the mean sits at a bound, and the mass between them underflows.
        mu = _bisect(excess, math.log(low) - 4 * sigma, math.log(high) + 4 * sigma)
        return LogNormal(mu=mu, sigma=sigma, low=low, high=high)

    if std is None:
        return with_mean(math.sqrt(math.log(1 + cv**2)))
    target = std
    return with_mean(_bisect(lambda sigma: with_mean(sigma).std - target, 0.05, 3.0))


def _mass(a: float, b: float) -> float:
    """Probability that a standard normal variable lies in [a, b], exact in both tails."""
    if a > 0:
        a, b = -b, -a
    return (math.erfc(-b / math.sqrt(2)) - math.erfc(-a / math.sqrt(2))) / 2


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
