"""Shares of batches, and forecasts of when they end at the measured rate of offline work.

The feeder takes lines by `shares`: API keys get shares by their weights, and in each key its
tenants; within a tenant late batches come first, by the end of their windows, and the others share
the rest equally. Forecasts assume the same. After the last line of a batch has begun, its replies
continue; the length of this tail follows from the lengths of replies, not from the rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate
from statistics import NormalDist

from cosched.batch.batch_records import WITH_LINES, Batch
from cosched.batch.rate import OUTPUT_TOKEN, Rate, RateMeter, Replies, RunningLine, octave, work_of
from cosched.core.shares import Share

_LEAST_SPREAD = 0.1
"""Least relative spread of any rate: the remaining work is itself an estimate."""
_CORRELATED_S = 3600.0
"""For about how long the rate stays high or low: online traffic changes by the hour."""

_SURE = 0.9
"""Probability with which a batch ends by `Forecast.most_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A batch with waiting lines.

    share  of its tenant
    due    end of the window, if the batch is late; None: it is not late
    """

    batch_id: str
    share: Share
    num_in_flight: int
    num_waiting: int
    due: float | None = None


def shares(demands: Sequence[Demand], *, num_free: int) -> dict[str, int]:
    """Batch -> lines to take of it, `num_free` in all if that many wait.

    Each line is of the API key with the fewest in flight for its weight, in it of the tenant with
    the fewest for its weight, and there of the late batch that is due first, otherwise of the batch
    with the fewest in flight; ties go to the earlier batch. So the share of a key depends neither
    on the number of its tenants nor on that of its batches nor on their windows, and what one
    cannot use goes to the others.
    """
    root = _Sharer(1.0)
    for index, one in enumerate(demands):
        root.add(_Lines(one, index), one.share)
    root.start()
    given: Counter[str] = Counter()
    while root.queue and given.total() < num_free:
        given[root.take()] += 1
    return dict(given)


class _Lines:
    """The waiting lines of a batch."""

    def __init__(self, demand: Demand, index: int) -> None:
        self._name, self._left = demand.batch_id, demand.num_waiting
        self._due = math.inf if demand.due is None else demand.due
        self._index = index
        self.load = demand.num_in_flight

    @property
    def has_more(self) -> bool:
        return self._left > 0

    def start(self) -> None:
        """As of `_Sharer`."""

    def order(self) -> tuple[float, ...]:
        return self._due, self.load, self._index

    def take(self) -> str:
        self._left -= 1
        self.load += 1
        return self._name


class _Sharer:
    """All keys, a key, or a tenant; its parts share what it gets. load: lines in flight."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._parts: dict[str, _Sharer | _Lines] = {}
        self.load = 0
        self.queue: list[tuple[tuple[float, ...], _Sharer | _Lines]] = []
        """The parts with waiting lines: a heap. The index of a batch makes each order unique."""

    def add(self, lines: _Lines, share: Share) -> None:
        sharer = self
        for name, weight in zip(*share, strict=True):
            part = sharer._parts.setdefault(name, _Sharer(weight))
            assert isinstance(part, _Sharer)
            sharer = part
            sharer.load += lines.load
        sharer._parts[str(len(sharer._parts))] = lines

    def start(self) -> None:
        for part in self._parts.values():
            part.start()
        self.queue = [(part.order(), part) for part in self._parts.values() if part.has_more]
        heapify(self.queue)

    @property
    def has_more(self) -> bool:
        return bool(self.queue)

    def order(self) -> tuple[float, ...]:
        return self.load / self._weight, *self.queue[0][0]

    def take(self) -> str:
        _, part = heappop(self.queue)
        name = part.take()
        if part.has_more:
            heappush(self.queue, (part.order(), part))
        self.load += 1
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The lines of a batch without a result.

    num_tokens   their work
    num_here     the part of lines at the scheduler
    num_running  the part of lines that have begun
    num_waiting  octave of the prompts -> lines that have not begun
    share        fraction of all running lines that belong to this batch
    """

    num_tokens: float
    num_here: float = 0.0
    num_running: float = 0.0
    num_waiting: Mapping[int, float] = field(default_factory=dict)
    share: float = 0.0

    def end_s(self, finish_s: float, *, replies: Replies | None, rate: Rate) -> float:
        """When its last reply ends, if its work takes `finish_s` at its share of the rate [s]."""
        is_at_scheduler = bool(self.share or self.num_waiting)
        if not self.num_tokens or not is_at_scheduler or replies is None or not rate.iteration_s:
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
    """Batch -> its remaining work.

    sizes    batch -> bytes of each of its lines at the scheduler
    replies  None: no line has ended

    Lines that are not sent are assumed to be like all that were sent: the ended ones alone are a
    selection of the scheduler's.
    """
    per_byte = meter.prompt_tokens_per_byte
    kinds = {name: Counter(octave(size * per_byte) for size in sizes[name]) for name in sizes}
    waits = _waiting(kinds.values(), meter.progress.running)
    running = 0.0 if replies is None else OUTPUT_TOKEN * replies.left()

    def tokens(batch: Batch, size: int) -> float:
        if replies is None:
            return batch.num_bytes / max(batch.total, 1) * rate.tokens_per_byte
        num_prompt = size * per_byte
        return work_of(num_prompt, replies.length(octave(num_prompt)))

    found = {}
    for batch in batches:
        here = [(octave(size * per_byte), tokens(batch, size)) for size in sizes.get(batch.id, ())]
        num_unsent = max(batch.num_left - len(here), 0)
        num_sent = batch.completed + len(here)
        if num_sent:
            sent = work_of(batch.input_tokens, batch.output_tokens) + sum(num for _, num in here)
            unsent = num_unsent * sent / num_sent
        else:
            share = num_unsent / batch.total if batch.total else 1.0  # not read yet
            unsent = share * batch.num_bytes * rate.tokens_per_byte
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


def _waiting(kinds: Iterable[Counter[int]], running: Sequence[RunningLine]) -> dict[int, float]:
    """Octave -> fraction of the lines at the scheduler that have not begun."""
    here = Counter[int]()
    for some in kinds:
        here.update(some)
    begun = Counter(octave(one.num_prompt) for one in running)
    found = {kind: max(1 - begun[kind] / num, 0.0) for kind, num in here.items()}
    # The octave of a prompt is estimated from its bytes: scale to the number that run.
    num = sum(found[kind] * here[kind] for kind in here)
    waiting = max(here.total() - len(running), 0)
    return {kind: share * waiting / num if num else 0.0 for kind, share in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """A batch that has not ended.

    due_s       until its window ends [s]
    num_tokens  work of its lines without a result
    share       of its tenant
    end_s       the end of its work at its share of the rate -> the end of its last reply [s]
    """

    batch_id: str
    share: Share
    due_s: float
    num_tokens: float
    is_late: bool = False
    end_s: Callable[[float], float] = float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one batch; times from now on.

    finish_s     until its last line is finished, at the mean rate [s]
    most_s       by then it is finished with probability `_SURE` [s]
    slack_s      until its window ends after its work at its fair share [s]
    is_late      its slack is below the margin, so it goes before others of its tenant
    work_s       time of its remaining work at the whole rate [s]
    miss_chance  probability that its window ends first
    """

    finish_s: float
    most_s: float
    slack_s: float
    is_late: bool
    work_s: float
    miss_chance: float

    def line_deadline_s(self, ahead: float, *, margin_s: float) -> float:
        """How long a line may take [s] with that part of the batch ahead of it: the time of the
        part, and the slack that the lines behind it leave. For a late batch it is short enough for
        the scheduler to prefer the line to other offline work."""
        deadline_s = ahead * self.work_s + max(self.slack_s, 0.0)
        return min(deadline_s, margin_s) if self.is_late else deadline_s


class OutlookState(StrEnum):
    """MEASURED: there is a forecast. ESTIMATING: no rate is known, because too few lines of the
    store are finished. PAUSED: the operator pauses offline work."""

    MEASURED = "measured"
    ESTIMATING = "estimating"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutlook:
    """Of an open batch. `num_running`: its lines at the schedulers of all servers, waiting or
    running. `running_done`: mean share of these replies that is generated, of their limits (0 to
    1). `forecast`: None unless MEASURED."""

    state: OutlookState
    num_running: int
    running_done: float
    forecast: Forecast | None


def outlooks_of(
    found: Sequence[Batch],
    forecasts: Mapping[str, Forecast] | None,
    *,
    taken: Mapping[str, int],
    done: float,
) -> dict[str, BatchOutlook]:
    """Of batches with lines to send.

    forecasts  None: the operator pauses offline work
    taken      batch -> lines in flight
    done       `BatchOutlook.running_done`
    """
    states = {True: OutlookState.MEASURED, False: OutlookState.ESTIMATING}
    known = forecasts or {}
    return {
        name: BatchOutlook(
            state=OutlookState.PAUSED if forecasts is None else states[name in known],
            num_running=taken.get(name, 0),
            running_done=done,
            forecast=known.get(name),
        )
        for name in (batch.id for batch in found if batch.status in WITH_LINES)
    }


def forecasts_of(
    batches: Sequence[Batch],
    *,
    now: float,
    sizes: Mapping[str, Sequence[int]],
    meter: RateMeter,
    rate: Rate,
    num_servers: int,
    share: Callable[[str, str], Share],
    margin_s: float,
) -> dict[str, Forecast]:
    """Batch -> its forecast.

    sizes   batch -> bytes of each of its lines at the scheduler of this server
    rate    of all servers
    share   owner and tenant of a batch -> its share
    """
    ended, running = list(meter.ended), meter.progress.running
    replies = Replies(ended, running) if ended else None
    left = lefts(batches, sizes, rate=rate, meter=meter, replies=replies)
    loads = [
        BatchLoad(
            batch_id=batch.id,
            share=share(batch.owner, batch.tenant),
            due_s=batch.expires_at - now,
            num_tokens=left[batch.id].num_tokens,
            end_s=partial(left[batch.id].end_s, replies=replies, rate=rate),
        )
        for batch in batches
    ]
    least_s = sum(one.num_here for one in left.values()) * num_servers / rate.tokens_per_s
    return forecasts(loads, rate=rate, margin_s=margin_s, least_s=least_s)


def forecasts(
    loads: Sequence[BatchLoad], *, rate: Rate, margin_s: float, least_s: float = 0.0
) -> dict[str, Forecast]:
    """Batch -> its forecast.

    margin_s  a batch with less slack is late [s]
    least_s   time of the work at the scheduler. A line may be anywhere in it, so no batch with
              lines left is expected to finish before [s]
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
            most_s=_most_s(finish[load.batch_id], rate.spread),
            slack_s=slack[load.batch_id],
            is_late=load.is_late,
            work_s=load.num_tokens / rate.tokens_per_s,
            miss_chance=_miss_chance(finish[load.batch_id], load.due_s, rate.spread),
        )
        for load in loads
    }


def _finish_times(loads: Sequence[BatchLoad], tokens_per_s: float) -> dict[str, float]:
    """Batch -> seconds until its work is done, when each has its share of the rate."""
    return {name: tokens / tokens_per_s for name, tokens in _done(loads, level=0).items()}


def _done(loads: Sequence[BatchLoad], *, level: int) -> dict[str, float]:
    """Batch -> tokens of all these batches that are done by its end.

    level  of the share paths, whose beginnings are the same: what share at this level

    All that share and have work left have done the same number of tokens per weight. So a batch is
    done when that number reaches what the batch needs within its part, and by then all parts have
    done as much, or all that they have. O(n log n).
    """
    if level == len(loads[0].share.path if loads else ()):
        return dict(_order(loads))
    parts: dict[str, list[BatchLoad]] = {}
    for load in loads:
        parts.setdefault(load.share.path[level], []).append(load)
    if len(parts) == 1:
        return _done(loads, level=level + 1)

    def weight(part: Sequence[BatchLoad]) -> float:
        return part[0].share.weights[level]

    def per_weight(part: Sequence[BatchLoad]) -> float:
        return _tokens(part) / weight(part)

    groups = sorted(parts.values(), key=per_weight)
    ends = [per_weight(group) for group in groups]
    # Tokens of the parts that are done first, and the weight of the others.
    done = [0.0, *accumulate(_tokens(group) for group in groups)]
    weights = [*accumulate((weight(group) for group in groups[::-1]), initial=0.0)][::-1]
    found = {}
    for group in groups:
        for name, num_tokens in _done(group, level=level + 1).items():
            each = num_tokens / weight(group)
            index = bisect_left(ends, each)
            found[name] = done[index] + each * weights[index]
    return found


def _tokens(group: Sequence[BatchLoad]) -> float:
    return sum(load.num_tokens for load in group)


def _order(group: Sequence[BatchLoad]) -> Iterator[tuple[str, float]]:
    """Batch of one tenant -> tokens of the tenant that are done by the end of the batch."""
    for load in group:
        if not load.num_tokens:
            yield load.batch_id, 0.0
    group = [load for load in group if load.num_tokens]
    before = 0.0
    for load in sorted((load for load in group if load.is_late), key=lambda load: load.due_s):
        before += load.num_tokens
        yield load.batch_id, before
    # The others share equally: the smallest is done when all of them have done as much.
    others = sorted((load for load in group if not load.is_late), key=lambda load: load.num_tokens)
    for index, load in enumerate(others):
        yield load.batch_id, before + (len(others) - index) * load.num_tokens
        before += load.num_tokens


def _miss_chance(finish_s: float, due_s: float, spread: float) -> float:
    """Probability that the mean rate over the window is below the rate that is needed.

    The rate is lognormal, so never negative, with the measured mean and spread. Rates of different
    hours are independent; within an hour the rate is constant.
    """
    if due_s <= 0:
        return 1.0
    needed = finish_s / due_s  # relative to the mean rate: time is inverse to rate
    if not needed:
        return 0.0
    return _log_rate(due_s, spread).cdf(math.log(needed))


def _most_s(finish_s: float, spread: float) -> float:
    """The time by which a batch ends with probability `_SURE`."""
    if not finish_s:
        return 0.0
    return finish_s / math.exp(_log_rate(finish_s, spread).inv_cdf(1 - _SURE))


def _log_rate(window_s: float, spread: float) -> NormalDist:
    """The logarithm of the mean rate over a window, relative to the mean of all windows."""
    over_window = spread * math.sqrt(min(1.0, _CORRELATED_S / window_s))
    variance = math.log1p(over_window**2 + _LEAST_SPREAD**2)
    return NormalDist(-variance / 2, math.sqrt(variance))
