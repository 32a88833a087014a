"""When batches will be finished: what is left of each, at the measured rate of offline work.

A batch's share of the rate is what the feeder gives it (`cosched.batch.fairness`): tenants have
shares by their weights, and in a tenant late batches come first, by their deadline; the others
share what is left. When the last line of a batch has begun, its replies go on: how long this tail
takes is told by the lengths of replies and not by the rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import accumulate
from statistics import NormalDist

from cosched.batch.data import Batch
from cosched.batch.rate import OUTPUT_TOKEN, Rate, RateMeter, work_of
from cosched.batch.replies import Replies, Running, octave

_LEAST_SPREAD = 0.1
"""Of any rate over any time: what is left of a batch is itself an estimate."""
_CORRELATED_S = 3600.0
"""How long the rate stays high or low, about: chat comes and goes by the hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Of the lines of a batch that have no result.

    num_tokens   work
    num_here     of it, of lines at the scheduler
    num_running  of it, of lines that have begun
    num_waiting  lines that have not, by the octave of their prompts
    share        of all running lines, that are of this batch
    """

    num_tokens: float
    num_here: float = 0.0
    num_running: float = 0.0
    num_waiting: Mapping[int, float] = field(default_factory=dict)
    share: float = 0.0

    def end_s(self, finish_s: float, *, replies: Replies | None, rate: Rate) -> float:
        """When its last reply ends, where its work is done after `finish_s` at its share [s]."""
        if not self.num_tokens or replies is None or not rate.iteration_s:
            return finish_s
        begun_s = finish_s * (1 - self.num_running / self.num_tokens)
        num_tokens = replies.tail(
            num_waiting=self.num_waiting, num_steps=begun_s / rate.iteration_s, share=self.share
        )
        return max(finish_s, begun_s + num_tokens * rate.tail_iteration_s)


def lefts(
    batches: Sequence[Batch],
    sizes: Mapping[str, Sequence[int]],
    *,
    rate: Rate,
    meter: RateMeter,
    replies: Replies | None,
) -> dict[str, Left]:
    """Batch -> what is left of it.

    sizes    batch -> bytes of each of its lines at the scheduler
    replies  None: no line has ended

    Lines that are not sent are as those that were: what has ended so far was chosen by the
    scheduler, and says less of what is left.
    """
    per_byte = meter.prompt_tokens_per_byte
    kinds = {name: Counter(octave(size * per_byte) for size in sizes[name]) for name in sizes}
    waits = _waiting(kinds.values(), meter.progress.running)
    running = 0.0 if replies is None else OUTPUT_TOKEN * replies.left()

    def tokens(batch: Batch, size: int) -> float:
        if replies is None:
            return batch.request.num_bytes / max(batch.total, 1) * rate.tokens_per_byte
        num_prompt = size * per_byte
        return work_of(num_prompt, replies.length(octave(num_prompt)))

    found = {}
    for batch in batches:
        here = [(octave(size * per_byte), tokens(batch, size)) for size in sizes.get(batch.id, ())]
        num_left = batch.total - batch.completed - batch.failed
        num_unsent = max(num_left - len(here), 0)
        num_sent = batch.completed + len(here)
        if num_sent:
            sent = work_of(batch.input_tokens, batch.output_tokens) + sum(num for _, num in here)
            unsent = num_unsent * sent / num_sent
        else:
            share = num_unsent / batch.total if batch.total else 1.0  # not read yet
            unsent = share * batch.request.num_bytes * rate.tokens_per_byte
        waiting = sum(waits[kind] * num for kind, num in here)
        own = kinds.get(batch.id, Counter())
        num_waiting = {kind: num * waits[kind] for kind, num in own.items()}
        share = (len(here) - sum(num_waiting.values())) / max(len(meter.progress.running), 1)
        for kind, num in own.items():
            num_waiting[kind] += num_unsent * num / len(here)
        found[batch.id] = Left(
            num_tokens=waiting + share * running + unsent,
            num_here=waiting + share * running,
            num_running=share * running,
            num_waiting=num_waiting,
            share=share,
        )
    return found


def _waiting(kinds: Iterable[Counter[int]], running: Sequence[Running]) -> dict[int, float]:
    """Octave -> share of the lines at the scheduler that have not begun."""
    here = Counter[int]()
    for some in kinds:
        here.update(some)
    begun = Counter(octave(one.num_prompt) for one in running)
    found = {kind: max(1 - begun[kind] / num, 0.0) for kind, num in here.items()}
    # The octave of a prompt is known from its bytes only: all that run must be among them.
    num = sum(found[kind] * here[kind] for kind in here)
    waiting = max(here.total() - len(running), 0)
    return {kind: share * waiting / num if num else 0.0 for kind, share in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A batch that has not ended.

    due_s       until its window ends [s]
    num_tokens  work of its lines without a result
    weight      of its tenant
    end_s       when its last reply ends, by when its work is done at its rate [s]
    """

    batch_id: str
    tenant: tuple[str, str]
    due_s: float
    num_tokens: float
    weight: float = 1.0
    is_late: bool = False
    end_s: Callable[[float], float] = float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one batch, from now on.

    finish_s     until its last line is finished [s]
    slack_s      what its window leaves when it has but its fair share [s]; less than 0: it is late
    is_late      its slack is below the margin, so it goes before others of its tenant
    work_s       what is left of it takes at the whole rate [s]
    miss_chance  that the window ends first, 0 to 1
    """

    finish_s: float
    slack_s: float
    is_late: bool
    work_s: float
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


def tenant_of(batch: Batch) -> tuple[str, str]:
    return batch.request.owner, batch.request.tenant


def forecasts_of(
    batches: Sequence[Batch],
    *,
    now: float,
    sizes: Mapping[str, Sequence[int]],
    meter: RateMeter,
    rate: Rate,
    num_servers: int,
    weight: Callable[[Batch], float],
    margin_s: float,
) -> dict[str, Forecast]:
    """Batch -> its forecast.

    sizes        batch -> bytes of each of its lines at the scheduler of this server
    rate         of all servers
    weight       of the tenant of a batch
    """
    ended, running = list(meter.ended), meter.progress.running
    replies = Replies(ended, running) if ended else None
    left = lefts(batches, sizes, rate=rate, meter=meter, replies=replies)
    loads = [
        Load(
            batch_id=batch.id,
            tenant=tenant_of(batch),
            due_s=batch.expires_at - now,
            num_tokens=left[batch.id].num_tokens,
            weight=weight(batch),
            end_s=partial(left[batch.id].end_s, replies=replies, rate=rate),
        )
        for batch in batches
    ]
    least_s = sum(one.num_here for one in left.values()) * num_servers / rate.tokens_per_s
    return forecasts(loads, rate=rate, margin_s=margin_s, least_s=least_s)


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
    slack = {load.batch_id: load.due_s - load.end_s(fair[load.batch_id]) for load in loads}
    loads = [replace(load, is_late=slack[load.batch_id] < margin_s) for load in loads]
    finish = _finish_times(loads, rate.tokens_per_s)
    for load in loads:
        if load.num_tokens:
            finish[load.batch_id] = max(load.end_s(finish[load.batch_id]), least_s)
    return {
        load.batch_id: Forecast(
            finish_s=finish[load.batch_id],
            slack_s=slack[load.batch_id],
            is_late=load.is_late,
            work_s=load.num_tokens / rate.tokens_per_s,
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
