"""Estimates of the output that a request has still to generate."""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist

import msgspec

from cosched.core.estimates import LengthEstimate
from cosched.errors import ConfigError, choices
from cosched.predict.length_histogram import (
    Cells,
    Facts,
    Hints,
    Histogram,
    Pair,
    Similar,
    Window,
    cells_of,
)
from cosched.predict.length_tokens import Features, TokenModel, features_of

NUM_ENDS = 8
"""Possible ends that describe an uncertain length (`LengthEstimate.ends`)."""

_SCORES = 512
"""Requests by which the upper estimate is corrected."""
_FIRST_STEP = 16
"""Least number of tokens between two look-ups."""
_BEYOND = (2.0, 4.0)
"""Median and upper length, in multiples of the output, where no similar request got that long: as
if lengths had no scale (a Pareto tail of index 1 has the median of the survivors of t at 2 t)."""
_RENEWED = 32
"""Most requests that end before the estimate of a waiting request is looked up again."""
_NORMAL = NormalDist()
_HALVINGS = tuple(-math.log2(1 - (i + 0.5) / NUM_ENDS) for i in range(NUM_ENDS))
"""How many halvings of those still running until the middle of each part has ended."""


MODES = ("histogram", "learned", "limit", "oracle", "oracle-noise")


class LengthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the output that a request has still to generate is estimated.

    mode       histogram: from the lengths of earlier similar requests; learned: from the tokens of
               its prompt too; limit: the most it may generate, nothing is learned; oracle: its
               hint, taken as exact; oracle-noise: its hint with an error of known size, for
               experiments
    coverage   share of the requests that are to end within the upper estimate
    padding    the upper estimate is the median plus this share of it instead (EcoServe §2.3: 0.10,
               0.15, 0.20)
    hints      use ``output_tokens_hint`` as far as hints have been accurate; the oracles always do
    window     newest lengths kept for each group of similar requests
    max_cells  groups of similar requests that are kept; the least recently used one goes first
    sigma      of oracle-noise: standard deviation of the logarithm of its error
    """

    mode: str = "histogram"
    coverage: float = 0.95
    padding: float | None = None
    hints: bool = True
    window: int = 128
    max_cells: int = 8192
    sigma: float = 0.23

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"length.mode {self.mode!r} is unknown: {choices(MODES)}")
        if not 0.5 < self.coverage < 1:
            raise ConfigError(f"length.coverage must be above 0.5 and below 1, not {self.coverage}")
        for name in ("padding", "sigma"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"length.{name} must be 0 or more, not {value}")
        for name in ("window", "max_cells"):
            value = getattr(self, name)
            if value < 8:
                raise ConfigError(f"length.{name} must be 8 or more, not {value}")

    @property
    def learns(self) -> bool:
        """Finished requests are learned from."""
        return self.mode in ("histogram", "learned")

    @property
    def needs_hints(self) -> bool:
        """Only hints are used: a simulation must give the true lengths."""
        return self.mode in ("oracle", "oracle-noise")


class Belief:
    """The estimate for one request. Made at the first question; follows the request's output, and
    while the request waits, what has been learned."""

    __slots__ = (
        "_answer",
        "_asked",
        "_cells",
        "_features",
        "_median",
        "_model",
        "_renewed",
        "ends",
        "facts",
        "until",
        "upper",
    )

    def __init__(self, model: LengthModel, facts: Facts) -> None:
        self.facts = facts
        self._model = model
        self._cells: Cells | None = None
        self._features: Features | None = None
        self.until = 0
        """Output tokens at which it is looked up again."""
        self._median = self.upper = 0
        """Tokens of the whole output, valid before `until`."""
        self.ends: tuple[int, ...] = ()
        """Possible lengths of the whole output (`LengthEstimate`), likewise."""
        self._asked = -1
        """Output tokens at the last question: a plan asks several times."""
        self._answer = LengthEstimate(0, 0)
        self._renewed = 0
        """Learned requests at which it is looked up again while the request waits."""

    def remaining(self, num_produced: int, *, waits: bool = False) -> LengthEstimate:
        """What is still to come after `num_produced` tokens; 0 at the limit, at least 1 before it.

        Looked up at the first question, each time the output has doubled, and where it is longer
        than expected; in between the expected total stays, so that plans are stable. For a waiting
        request also when twice as many requests have ended, or `_RENEWED` more: an estimate from
        before anything was known must not keep it waiting.
        """
        if num_produced != self._asked:
            self._answer = self._remaining(num_produced)
            self._asked = num_produced
        elif waits and self._model.num_learned >= self._renewed:
            self.until = 0
            self._answer = self._remaining(num_produced)
        return self._answer

    def _remaining(self, num_produced: int) -> LengthEstimate:
        left = self.facts.limit - num_produced
        if left <= 0:
            return LengthEstimate(0, 0)
        if num_produced >= self.until:
            median, upper = self._model.totals(self, num_produced)
            self._median = max(round(median), num_produced + 1)
            self.upper = max(math.ceil(upper), self._median)
            self.until = max(num_produced + _FIRST_STEP, min(2 * num_produced, self._median))
            self.ends = self._ends(num_produced)
            num_learned = self._model.num_learned
            self._renewed = num_learned + min(max(num_learned, 1), _RENEWED)
        # Every plan asks this of every running request: no calls of min and max.
        median_left = self._median - num_produced
        median_left = 1 if median_left < 1 else left if median_left > left else median_left
        upper_left = self.upper - num_produced
        if upper_left < median_left:
            upper_left = median_left
        upper_left = left if upper_left > left else upper_left
        return LengthEstimate(median_left, upper_left, self.ends)

    def _ends(self, num_produced: int) -> tuple[int, ...]:
        """The middles of equally likely parts of what is still to come: a Weibull distribution with
        this median and this upper quantile; one end if both are equal."""
        limit = self.facts.limit
        median = self._median - num_produced
        stretch = (self.upper - num_produced) / median
        if stretch <= 1:
            return (min(self._median, limit),)
        power = math.log(stretch) / self._model.log_halvings
        ends = [num_produced + math.ceil(median * halvings**power) for halvings in _HALVINGS]
        return tuple([end if end < limit else limit for end in ends])

    @property
    def cells(self) -> Cells:
        if self._cells is None:
            self._cells = cells_of(self.facts)
        return self._cells

    @property
    def features(self) -> Features:
        if self._features is None:
            self._features = features_of(self.facts.prompt)
        return self._features


class LengthModel:
    """All that is learned about lengths; one per replica, where plans are made.

    Depends only on the requests that have ended, in their order: no clock, no randomness.
    """

    def __init__(self, config: LengthConfig) -> None:
        self.config = config
        self._levels = (0.5, config.coverage)
        self.log_halvings = math.log(-math.log2(1 - config.coverage))
        """Of the halvings of those still running until the upper quantile."""
        coverage, window = config.coverage, config.window
        self.histogram = Histogram(coverage=coverage, window=window, max_cells=config.max_cells)
        self._hints = Hints(coverage=coverage, window=window)
        self._tokens = TokenModel(coverage=coverage) if config.mode == "learned" else None
        self._scores = Window(_SCORES)
        self.num_learned = 0
        """Requests that it has learned from."""
        self._correction = 1.0
        """Factor on the upper quantile with which it would have covered its share of the newest
        requests: a conformal correction over a sliding window (Vovk et al. 2005; Romano et al.
        2019)."""

    def belief(self, facts: Facts) -> Belief:
        return Belief(self, facts)

    def learn(self, belief: Belief, num_output_tokens: int) -> None:
        """A request has ended by itself or at its limit. Not for an aborted one: its length says
        nothing."""
        if not self.config.learns:
            return
        facts = belief.facts
        self.num_learned += 1
        similar = self.histogram.learn(belief.cells, num_output_tokens)
        if similar is None:
            return
        if self._tokens is not None:
            similar = self._tokens.learn(belief.features, similar, num_output_tokens)
        hinted = self._hints.totals(facts) if self.config.hints else None
        # The limit is known, and cuts the estimate: it is no part of the error.
        upper = min((hinted or similar).upper, facts.limit)
        self._scores.add(math.log((num_output_tokens + 1) / (upper + 1)))
        if len(self._scores) * (1 - self.config.coverage) >= 1:
            self._correction = math.exp(self._scores.quantile(self.config.coverage))
        if facts.hint is not None and self.config.hints:
            self._hints.learn(facts, num_output_tokens, similar)

    def totals(self, belief: Belief, num_produced: int) -> Pair:
        """The whole output of a request that has generated `num_produced` tokens."""
        facts, config = belief.facts, self.config
        if config.mode == "limit":
            return Pair(facts.limit, facts.limit)
        if config.needs_hints:
            found = self._oracle(facts, num_produced)
        else:
            found = self._learned(belief, num_produced)
        if config.padding is not None:
            return Pair(found.median, found.median * (1 + config.padding))
        return found

    def _learned(self, belief: Belief, num_produced: int) -> Pair:
        facts = belief.facts
        hinted = self._hints.totals(facts) if self.config.hints else None
        others = self.histogram.similar(belief.cells)
        if others is None:
            return hinted or Pair(facts.limit, facts.limit)
        found = similar = others.totals()
        if hinted is not None:
            found = hinted
        elif self._tokens is not None:
            found = self._tokens.totals(belief.features, similar)
        first = Pair(found.median, found.upper * self._correction)
        if num_produced == 0:
            return first
        # What is known of the request beyond similar ones stretches their lengths.
        median, upper = (
            self._survived(others, i, first[i] / max(similar[i], 1.0), num_produced)
            for i in range(2)
        )
        return Pair(median, upper)

    def _survived(self, others: Similar, i: int, stretch: float, num_produced: int) -> float:
        """The i-th quantile of those that got longer."""
        stretch = max(stretch, 1e-3)
        total = others.survivors(self._levels[i], num_produced / stretch)
        return _BEYOND[i] * num_produced if total is None else stretch * total

    def _oracle(self, facts: Facts, num_produced: int) -> Pair:
        if facts.hint is None:
            return Pair(facts.limit, facts.limit)
        hint, sigma = float(facts.hint), self.config.sigma
        if self.config.mode == "oracle" or not sigma:
            return Pair(hint, hint)
        # Depends on the id alone: the same in each run and on each rank.
        place = (zlib.crc32(facts.rid.encode()) + 0.5) / 2**32
        noisy = hint * math.exp(sigma * _NORMAL.inv_cdf(place))
        # The truth scatters around it as widely, among the lengths that have been passed.
        below = _NORMAL.cdf(math.log(num_produced / noisy) / sigma) if num_produced else 0.0
        median, upper = (
            noisy * math.exp(sigma * _NORMAL.inv_cdf(min(below + level * (1 - below), 1 - 1e-9)))
            for level in self._levels
        )
        return Pair(median, upper)
