"""What is believed of the output that a request is still to generate."""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist

from cosched.core.estimates import LengthEstimate
from cosched.length.config import LengthConfig
from cosched.length.facts import Cells, Facts, cells_of
from cosched.length.histogram import Hints, Histogram, Pair
from cosched.length.learned import Features, TokenModel, features_of
from cosched.length.window import Window

__all__ = ["NUM_ENDS", "Belief", "LengthModel"]

NUM_ENDS = 8
"""Of a length that is not certain, by which it is described (`LengthEstimate.ends`)."""

_SCORES = 512
"""Requests by which the upper estimate is corrected."""
_FIRST_STEP = 16
"""Tokens that come out before a belief is looked at again, at least."""
_BEYOND = (2.0, 4.0)
"""Of what has come out: median and upper length where no request of any likeness got so long. As
if lengths had no scale (a Pareto tail of index 1 has the median of the survivors of t at 2 t)."""
_RENEWED = 32
"""Requests that end before a belief about one that waits is looked at again, at most."""
_NORMAL = NormalDist()
_HALVINGS = tuple(-math.log2(1 - (i + 0.5) / NUM_ENDS) for i in range(NUM_ENDS))
"""How often half of all must have ended until the middle of each part has."""


class Belief:
    """Of one request. Made when it is first asked about; follows what has come out since, and while
    it waits what has been learned since."""

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
        """Tokens with which it is looked at again."""
        self._median = 0
        self.upper = 0
        """Tokens of the whole output at the upper end, valid before `until`."""
        self.ends: tuple[int, ...] = ()
        """Tokens of the whole output with which it may end (`LengthEstimate`), likewise."""
        self._asked = -1
        """Tokens after which it was last asked: a plan asks several times, and each plan anew about
        those that wait."""
        self._answer = LengthEstimate(0, 0)
        self._renewed = 0
        """Requests that have ended with which it is looked at again while it waits."""

    def remaining(self, num_produced: int, *, waits: bool = False) -> LengthEstimate:
        """What is still to come after so many tokens; 0 at the limit and at least 1 before it.

        Looked up when it is first asked, each time the output has doubled, and where it is longer
        than it was thought: in between the expected total stays, so that plans rest on something.
        Of a request that waits also when twice as many have ended as then, or `_RENEWED` more:
        what was believed when nothing was known must not keep it waiting.
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
        # Asked of all that runs, in each plan: without calls.
        median_left = self._median - num_produced
        median_left = 1 if median_left < 1 else left if median_left > left else median_left
        upper_left = self.upper - num_produced
        if upper_left < median_left:
            upper_left = median_left
        upper_left = left if upper_left > left else upper_left
        return LengthEstimate(median_left, upper_left, self.ends)

    def _ends(self, num_produced: int) -> tuple[int, ...]:
        """The middles of equally likely parts of what is still to come, which is Weibull's
        distribution with this median and this upper quantile. Where both are the same it is
        certain."""
        limit = self.facts.limit
        median = self._median - num_produced
        stretch = (self.upper - num_produced) / median
        if stretch <= 1:
            return (min(self._median, limit),)
        power = math.log(stretch) / math.log(-math.log2(1 - self._model.config.coverage))
        lefts = (math.ceil(median * halvings**power) for halvings in _HALVINGS)
        return tuple(min(num_produced + left, limit) for left in lefts)

    @property
    def cells(self) -> Cells:
        if self._cells is None:
            self._cells = cells_of(self.facts)
        return self._cells

    @property
    def features(self) -> Features:
        if self._features is None:
            self._features = features_of(self.facts)
        return self._features


class LengthModel:
    """All that is learned about lengths; one per replica, where plans are made.

    A pure function of the requests that have ended, in their order: it knows no clock and no
    chance.
    """

    def __init__(self, config: LengthConfig) -> None:
        self.config = config
        self._levels = (0.5, config.coverage)
        coverage, window = config.coverage, config.window
        self.histogram = Histogram(coverage=coverage, window=window, max_cells=config.max_cells)
        self._hints = Hints(coverage=coverage, window=window)
        self._tokens = TokenModel(coverage=config.coverage) if config.mode == "learned" else None
        self._scores = Window(_SCORES, typecode="d")
        self.num_learned = 0
        """Requests that it has learned from."""
        self._correction = 1.0
        """Factor on the upper quantile with which it would have covered the share it is to cover of
        the newest requests: a conformal correction (Vovk et al. 2005; Romano et al. 2019) over a
        sliding window."""

    def belief(self, facts: Facts) -> Belief:
        return Belief(self, facts)

    def learn(self, belief: Belief, num_output_tokens: int) -> None:
        """A request has ended by itself or at its limit, after so many tokens. Not for one that was
        aborted: its length says nothing."""
        if not self.config.learns:
            return
        facts = belief.facts
        self.num_learned += 1
        before = self.histogram.learn(belief.cells, num_output_tokens)
        if before is None:
            return
        root, like = before
        if self._tokens is not None:
            like = self._tokens.learn(belief.features, root, like, num_output_tokens)
        hinted = self._hints.totals(facts) if self.config.hints else None
        # The limit is known, and cuts what is believed: it is no part of the error.
        upper = min((hinted or like).upper, facts.limit)
        self._scores.add(math.log((num_output_tokens + 1) / (upper + 1)))
        if len(self._scores) * (1 - self.config.coverage) >= 1:
            self._correction = math.exp(self._scores.quantile(self.config.coverage))
        if facts.hint is not None and self.config.hints:
            self._hints.learn(facts, num_output_tokens, like)

    def totals(self, belief: Belief, num_produced: int) -> Pair:
        """Of the whole output of a request that has produced so many tokens."""
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
        found = self._hints.totals(facts) if self.config.hints else None
        like = self.histogram.totals(belief.cells)
        if like is None:
            return found or Pair(facts.limit, facts.limit)
        if found is None:
            found = like
            if self._tokens is not None:
                root = self.histogram.root
                assert root is not None, "something is known"
                found = self._tokens.totals(belief.features, root, like)
        first = Pair(found.median, found.upper * self._correction)
        if num_produced == 0:
            return first
        # What is known of the request beyond its likenesses stretches theirs.
        median, upper = (
            self._survived(belief, i, first[i] / max(like[i], 1.0), num_produced) for i in range(2)
        )
        return Pair(median, upper)

    def _survived(self, belief: Belief, i: int, stretch: float, num_produced: int) -> float:
        """The i-th quantile of those that got longer."""
        stretch = max(stretch, 1e-3)
        total = self.histogram.survivors(belief.cells, self._levels[i], num_produced / stretch)
        return _BEYOND[i] * num_produced if total is None else stretch * total

    def _oracle(self, facts: Facts, num_produced: int) -> Pair:
        if facts.hint is None:
            return Pair(facts.limit, facts.limit)
        hint, sigma = float(facts.hint), self.config.sigma
        if self.config.mode == "oracle" or not sigma:
            return Pair(hint, hint)
        # Depends on the id alone: the same in each run, and on each rank.
        place = (zlib.crc32(facts.rid.encode()) + 0.5) / 2**32
        told = hint * math.exp(sigma * _NORMAL.inv_cdf(place))
        # The truth is as uncertain around what is told, of those that got longer than it has.
        below = _NORMAL.cdf(math.log(num_produced / told) / sigma) if num_produced else 0.0
        median, upper = (
            told * math.exp(sigma * _NORMAL.inv_cdf(min(below + level * (1 - below), 1 - 1e-9)))
            for level in self._levels
        )
        return Pair(median, upper)
