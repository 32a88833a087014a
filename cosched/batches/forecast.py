"""When batches will be finished: what is left of each, at the measured rate of offline work.

Rates are tokens (prompt and output, cached ones too) of finished lines per second. A batch's share
of the rate is what the feeder gives it (`cosched.batches.fairness`): tenants have shares by their
weights, and in a tenant late batches come first, by their deadline; the others share what is left.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from statistics import NormalDist, fmean, pstdev

from cosched.batches.data import Batch, Status

__all__ = [
    "Forecast",
    "Load",
    "Outlook",
    "OutlookState",
    "Rate",
    "RateMeter",
    "forecasts",
    "past_rate",
]

_BUCKET_S = 60.0
_NUM_BUCKETS = 60
_LEAST_S = 5.0
"""Of measuring, before there is a rate."""
_FEW_BUCKETS = 5
_UNKNOWN_SPREAD = 0.5
"""Of a rate that was measured for too short to know: its standard deviation, by its mean."""
_LEAST_SPREAD = 0.1
"""Of any rate over any time: what is left of a batch is itself an estimate."""
_CORRELATED_S = 3600.0
"""How long the rate stays high or low, about: chat comes and goes by the hour."""
_TAIL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """tokens_per_s  mean
    spread           standard deviation from one minute to the next, by the mean
    tokens_per_byte  of the lines that were finished: how many tokens a line has, by its length
    """

    tokens_per_s: float
    spread: float
    tokens_per_byte: float


class RateMeter:
    """Measures over the last hour in which there was work. Not for several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds since any moment."""
        self._clock = clock
        self._buckets: deque[tuple[float, float]] = deque(maxlen=_NUM_BUCKETS)  # (seconds, tokens)
        self._seconds = self._tokens = 0.0  # of the bucket that is being filled
        self._last_s: float | None = None  # None: not measuring
        self._most_under_way = 0
        self._has_work = False
        self._all_tokens = self._all_bytes = 0

    def finished(self, *, num_tokens: int, num_bytes: int) -> None:
        """Some lines have been answered."""
        self._all_tokens += num_tokens
        self._all_bytes += num_bytes
        if self._last_s is not None:
            self._tokens += num_tokens
        elif self._has_work:
            # What the first answers took lies before the measurement.
            self._last_s = self._clock()

    def look(self, num_under_way: int) -> None:
        """So many lines are under way now; to be called about once a second.

        The tail of the work does not fill the engine: it is left out.
        """
        self._most_under_way = max(self._most_under_way, num_under_way)
        if self._last_s is not None:
            now_s = self._clock()
            self._seconds += now_s - self._last_s
            self._last_s = now_s
            if self._seconds >= _BUCKET_S:
                self._buckets.append((self._seconds, self._tokens))
                self._seconds = self._tokens = 0.0
        self._has_work = num_under_way >= max(_TAIL * self._most_under_way, 1)
        if not self._has_work:
            self._last_s = None
        if not num_under_way:
            self._most_under_way = 0

    def rate(self) -> Rate | None:
        """None: not known yet, or nothing was ever finished."""
        seconds = self._seconds + sum(seconds for seconds, _ in self._buckets)
        tokens = self._tokens + sum(tokens for _, tokens in self._buckets)
        if seconds < _LEAST_S or not tokens or not self._all_bytes:
            return None
        spread = _UNKNOWN_SPREAD
        if len(self._buckets) >= _FEW_BUCKETS:
            rates = [tokens / seconds for seconds, tokens in self._buckets]
            spread = pstdev(rates) / fmean(rates) if fmean(rates) else _UNKNOWN_SPREAD
        return Rate(
            tokens_per_s=tokens / seconds,
            spread=spread,
            tokens_per_byte=self._all_tokens / self._all_bytes,
        )


def past_rate(ended: Sequence[Batch]) -> Rate | None:
    """Of batches with answers that have ended, as the store has them: what is known before anything
    is measured. Of all servers that share it; too low where the engine had other work too."""
    spans, num_tokens, num_bytes = [], 0, 0.0
    for batch in ended:
        # A second more than it may have been, as times are whole ones.
        end = batch.times.get(Status.CANCELLING) or batch.times[Status.FINALIZING]
        spans.append((batch.times[Status.IN_PROGRESS], end + 1))
        num_tokens += batch.input_tokens + batch.output_tokens
        num_bytes += batch.request.num_bytes * batch.completed / batch.total
    seconds, until = 0, 0
    for start, end in sorted(spans):
        seconds += max(end - max(start, until), 0)
        until = max(until, end)
    if not num_tokens or not num_bytes:
        return None
    return Rate(
        tokens_per_s=num_tokens / seconds,
        spread=_UNKNOWN_SPREAD,
        tokens_per_byte=num_tokens / num_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is left of a batch.

    due_s       until its window ends [s]
    num_tokens  of its lines without a result
    weight      of its tenant
    """

    batch_id: str
    tenant: tuple[str, str]
    due_s: float
    num_tokens: float
    weight: float = 1.0
    is_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one batch, from now on.

    finish_s     until its last line is finished [s]
    slack_s      what its window leaves when it has but its fair share [s]; less than 0: it is late
    is_late      its slack is below the margin, so it goes before others of its tenant
    miss_chance  that the window ends first, 0 to 1
    """

    finish_s: float
    slack_s: float
    is_late: bool
    miss_chance: float


class OutlookState(StrEnum):
    """Why a batch has a forecast, or none.

    MEASURED    the rate is that of finished lines
    ESTIMATING  no rate is known: no batch of the store has finished lines, or too few of them
    PAUSED      the operator pauses offline work
    """

    MEASURED = "measured"
    ESTIMATING = "estimating"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of an open batch beside its counts.

    num_running  lines at the schedulers of all servers, waiting or running
    forecast     only where it is measured
    """

    state: OutlookState
    num_running: int
    forecast: Forecast | None


def forecasts(
    loads: Sequence[Load], *, rate: Rate, margin_s: float, least_s: float = 0.0
) -> dict[str, Forecast]:
    """Batch -> its forecast.

    margin_s  a batch with less slack is late [s]
    least_s   what is at the scheduler already takes so long, and a line among it is anywhere: a
              batch with lines left is not expected to be finished before [s]
    """
    loads = [replace(load, is_late=False) for load in loads]
    fair = _finish_times(loads, rate.tokens_per_s)
    slack = {load.batch_id: load.due_s - fair[load.batch_id] for load in loads}
    loads = [replace(load, is_late=slack[load.batch_id] < margin_s) for load in loads]
    finish = _finish_times(loads, rate.tokens_per_s)
    for load in loads:
        if load.num_tokens:
            finish[load.batch_id] = max(finish[load.batch_id], least_s)
    return {
        load.batch_id: Forecast(
            finish_s=finish[load.batch_id],
            slack_s=slack[load.batch_id],
            is_late=load.is_late,
            miss_chance=_miss_chance(finish[load.batch_id], load.due_s, rate.spread),
        )
        for load in loads
    }


def _finish_times(loads: Sequence[Load], tokens_per_s: float) -> dict[str, float]:
    """Batch -> seconds until it is done, when all go on at once, each at its share of the rate.

    As long as tenants have work, each has done the same number of tokens for its weight. So a batch
    is done when that number has reached what it takes in its tenant, and the time until then is
    that of all the work done by then. O(n log n).
    """
    by_tenant: dict[tuple[str, str], list[Load]] = {}
    for load in loads:
        by_tenant.setdefault(load.tenant, []).append(load)
    groups = sorted(by_tenant.values(), key=_turns)
    ends = [_turns(group) for group in groups]
    # Of the tenants that are done first: their tokens, and the weight of the others.
    done = [0.0, *accumulate(_tokens(group) for group in groups)]
    weights = [*accumulate((group[0].weight for group in groups[::-1]), initial=0.0)][::-1]
    finish = {}
    for group in groups:
        for name, num_tokens in _order(group):
            turns = num_tokens / group[0].weight
            index = bisect_left(ends, turns)
            finish[name] = (done[index] + turns * weights[index]) / tokens_per_s
    return finish


def _tokens(group: Sequence[Load]) -> float:
    return sum(load.num_tokens for load in group)


def _turns(group: Sequence[Load]) -> float:
    """Tokens of a tenant for its weight."""
    return _tokens(group) / group[0].weight


def _order(group: Sequence[Load]) -> Iterator[tuple[str, float]]:
    """Batch of one tenant -> tokens that the tenant has done by the time it is done."""
    for load in group:
        if not load.num_tokens:
            yield load.batch_id, 0.0
    group = [load for load in group if load.num_tokens]
    before = 0.0
    for load in sorted((load for load in group if load.is_late), key=lambda load: load.due_s):
        before += load.num_tokens
        yield load.batch_id, before
    # The others share: the smallest is done when each of them has done as much.
    others = sorted((load for load in group if not load.is_late), key=lambda load: load.num_tokens)
    for index, load in enumerate(others):
        yield load.batch_id, before + (len(others) - index) * load.num_tokens
        before += load.num_tokens


def _miss_chance(finish_s: float, due_s: float, spread: float) -> float:
    """Probability that the mean rate over the window is below the rate that is needed.

    The rate is lognormal with the measured mean and spread: it is never negative. Rates of
    different hours are taken as independent, within an hour the rate stays the same.
    """
    if due_s <= 0:
        return 1.0
    needed = finish_s / due_s  # by the mean rate, as the time is inverse to the rate
    if not needed:
        return 0.0
    over_window = spread * math.sqrt(min(1.0, _CORRELATED_S / due_s))
    variance = math.log1p(over_window**2 + _LEAST_SPREAD**2)  # of the logarithm
    return NormalDist(-variance / 2, math.sqrt(variance)).cdf(math.log(needed))
