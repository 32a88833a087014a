"""Latencies of online requests beside their isolated baseline (`cosched.predict.isolated`), and
tolerance mode: the operator promises that mean and p99 stay within a share of that baseline."""

from __future__ import annotations

import math
import re
from collections import Counter

import msgspec

from cosched.errors import ConfigError, choices

TOLERANCE_METAVAR = "ttft=5%,tpot=5%"
TOLERANCE_HELP = (
    "maximum increase of mean and p99 of online requests over the isolated baseline, for cosched "
    "and its ablations (docs/policies.md); either key may be left out"
)

MOST = 10.0
"""The largest share: eleven times as long."""


class ToleranceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By what share mean and p99 of the online requests may be above what these would have alone
    (docs/policies.md); absent: nothing is promised of it.

    ttft  of the time to the first token; 0.05 is 5 %
    tpot  of the time per output token after it
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST:
                raise ConfigError(
                    f"tolerance.{name} {value} is not a share above 0 and up to {MOST:g} "
                    "(0.05 is 5 %)"
                )


def parse_tolerance(text: str) -> ToleranceConfig:
    """``ttft=5%,tpot=5%``, either of the two or both. ConfigError naming what is wrong with it."""
    known = ToleranceConfig.__struct_fields__
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, is_given, value = (piece.strip() for piece in part.partition("="))
        if name not in known or not is_given:
            raise ConfigError(
                f"tolerance {text!r}: {part.strip()!r} is not KEY=SHARE%; the keys are "
                f"{choices(known)}"
            )
        if name in shares:
            raise ConfigError(f"tolerance {text!r}: {name!r} is given twice")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?%", value):
            raise ConfigError(
                f"tolerance {text!r}: {name} {value!r} is not a percentage such as 5% or 2.5%"
            )
        percent = float(value[:-1])
        if not 0 < percent <= 100 * MOST:
            raise ConfigError(
                f"tolerance {text!r}: {name} {value!r} is not above 0% and up to {100 * MOST:g}%"
            )
        shares[name] = percent / 100
    return ToleranceConfig(**shares)


_WINDOW = 1000
"""Requests over which the mean is kept: what is older fades, so that a quiet night does not pay for
a slow day."""

_HORIZON = 50
"""Number of requests within which the balance is given out, or a deficit saved."""

_MOST_HEADROOM = 10.0
"""Most headroom [promised shares]: what was saved is not spent all at once."""

_LEAST_FOR_TAIL = 100
"""Requests of which one is in the last percent."""

_TAIL_EVERY = 10
"""Requests between two looks at p99."""

_LEAST_LEFT = -10.0

_TAIL_FROM = 0.5
"""Of the promised share: where p99 is that far up, headroom begins to shrink."""


class LatencyComparison:
    """One latency of the online requests, as it was and in the isolated baseline [s]."""

    def __init__(self) -> None:
        self._tails = tuple(Tail(0.99, num=_WINDOW) for _ in range(2))
        self.num = 0
        """Requests judged."""
        self.total_baseline_s = self.total_achieved_s = 0.0

    def judge(self, *, baseline_s: float, achieved_s: float) -> None:
        """The latency of a request in the isolated baseline, and its own [s]."""
        self.num += 1
        self.total_baseline_s += baseline_s
        self.total_achieved_s += achieved_s
        for tail, value in zip(self._tails, (baseline_s, achieved_s), strict=True):
            tail.add(value)

    @property
    def tails_s(self) -> tuple[float | None, float | None]:
        """p99 of the baseline, p99 of the achieved, of the latest 1,000 to 2,000 [s]."""
        baseline, achieved = self._tails
        return baseline.value(), achieved.value()


class Promise(LatencyComparison):
    """One latency of the online requests, and what is promised of it.

        balance  = sum of (1 + share) * baseline - achieved, older requests fading
        headroom = balance / horizon [mean baselines], at most `_MOST_HEADROOM` shares; above one
                  share less as p99 of the achieved nears (1 + share) * p99 of the baseline

    One share of a mean is too little to move p99.

    A request that took what was promised leaves the balance as it is. So the mean settles where it
    was promised to be, whatever delays them: long iterations, predictions that are off,
    prompts that found less in the cache.

    share  by which mean and p99 may be above the baseline's
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self._balance_s = 0.0
        self._baseline_s = 0.0
        self._weight = 0.0
        self._left_to_tail = 1.0
        """Of the share by which p99 may be up; below 0: p99 is beyond it."""
        self.most_s = math.inf
        """Latency that one in a hundred may exceed: the more p99 is up, the less. inf: not known
        yet [s]."""

    def judge(self, *, baseline_s: float, achieved_s: float) -> None:
        """The latency of a request in the isolated baseline, and its own [s]."""
        super().judge(baseline_s=baseline_s, achieved_s=achieved_s)
        if not self._weight:
            self._balance_s = self.share * _HORIZON * baseline_s  # headroom to begin with
        kept = 1 - 1 / _WINDOW
        self._weight = kept * self._weight + 1
        self._baseline_s = kept * self._baseline_s + baseline_s
        most_s = _MOST_HEADROOM * self.share * _HORIZON * self.mean_baseline_s
        saved_s = (1 + self.share) * baseline_s - achieved_s
        self._balance_s = min(kept * self._balance_s + saved_s, most_s)
        if not self.num % _TAIL_EVERY:
            self._look_at_tail()

    @property
    def mean_baseline_s(self) -> float:
        """Of the latest requests; 0.0: nothing is known yet [s]."""
        return self._baseline_s / self._weight if self._weight else 0.0

    @property
    def headroom(self) -> float:
        """Share of the mean baseline by which offline work may lengthen the latency of the next
        requests."""
        if not self._weight:
            return self.share
        headroom = self._balance_s / (_HORIZON * self.mean_baseline_s)
        saved = max(headroom - self.share, 0.0) * max(self._left_to_tail, 0.0)
        return min(max(headroom, 0.0), self.share) + saved

    @property
    def saved_s(self) -> float:
        """The balance [s]."""
        return self._balance_s

    @property
    def usual_s(self) -> float:
        """The balance to begin with; 0.0: nothing is known yet [s]."""
        return self.share * _HORIZON * self.mean_baseline_s

    def _look_at_tail(self) -> None:
        baseline_s, achieved_s = self.tails_s
        if self.num < _LEAST_FOR_TAIL or not baseline_s or not achieved_s:
            return
        used = (achieved_s / baseline_s - 1) / self.share
        self._left_to_tail = min(max((1 - used) / (1 - _TAIL_FROM), _LEAST_LEFT), 1.0)
        self.most_s = (1 + self.share * self._left_to_tail) * baseline_s


_STEP = math.log1p(0.0025)
"""Values are distinguished to a quarter of a percent."""

_LEAST, _MOST = 1e-6, 1e6


class Tail:
    """A quantile of the last values: of `num` to twice as many, so that old ones are forgotten.

    Counts in steps of 0.25 %, at most 11,064 of them; the answer is at most that far off.
    """

    def __init__(self, quantile: float, *, num: int) -> None:
        """quantile: between 0 and 1."""
        self._above = 1 - quantile
        self._num = num
        self._counts: Counter[int] = Counter()
        self._older: Counter[int] = Counter()
        self._num_here = 0
        self._num_older = 0

    def __len__(self) -> int:
        return self._num_here + self._num_older

    def add(self, value: float) -> None:
        """value: what is outside 1e-6 to 1e6 counts as these."""
        self._counts[round(math.log(min(max(value, _LEAST), _MOST)) / _STEP)] += 1
        self._num_here += 1
        if self._num_here >= self._num:
            self._older, self._num_older = self._counts, self._num_here
            self._counts, self._num_here = Counter(), 0

    def value(self) -> float | None:
        """None: there is none yet. O(distinct values)."""
        left = self._above * len(self)
        for step in sorted(self._counts.keys() | self._older.keys(), reverse=True):
            left -= self._counts[step] + self._older[step]
            if left < 0:
                return math.exp(step * _STEP)
        return None
