"""The batch of a BROS plan under construction, and online requests by residual time, until one does
not fit the limit (Alg. 1, lines 5 to 14)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from cosched.core.batch import IntArray
from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.papers.bros.residual_order import Entry, ResidualOrder
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.ledger import Ledger
from cosched.schedule.phases import (
    Steps,
    admit_online,
    continue_online,
    must_decode,
    must_wait,
)

_STEPS = Steps()


class Within:
    """Implements `cosched.schedule.base.Pace`: all that is in a ledger takes at most `limit_s`.

    limit_s  most predicted time of the iteration [s]
    beside   entries to whose decodes an online prompt that does not fit whole leaves time
    """

    admits = False

    def __init__(
        self, builder: PlanBuilder, limit_s: float, *, beside: Sequence[Entry] = ()
    ) -> None:
        self._ledger = builder.ledger
        self._predictor = builder.view.predictor
        self._limit_s = limit_s
        self._beside = beside

    def begin_offline(self) -> None: ...

    def online_tokens(self, num_cached: int, limit: int, *, encoded: int = 0) -> int:
        totals = self._ledger.totals
        most = self._predictor.max_prefill(totals, num_cached, self._limit_s, limit)
        if 0 < most < limit and self._beside:
            totals = totals.copy()
            totals.add_decodes([entry.context for entry in self._beside if entry.context])
            most = self._predictor.max_prefill(totals, num_cached, self._limit_s, limit) or most
        return most

    def offline_tokens(
        self, num_cached: int, limit: int, *, encoded: int = 0, is_last: bool = False
    ) -> int:
        return self._predictor.max_prefill(self._ledger.totals, num_cached, self._limit_s, limit)

    def has_offline_time(self) -> bool:
        return self._ledger.seconds_with(1, 0) <= self._limit_s

    def decodes_fit(self, contexts: Sequence[int] | IntArray) -> bool:
        return self._ledger.seconds_with_decodes(contexts) <= self._limit_s

    def offline_decodes(self, contexts: Sequence[int] | IntArray) -> int:
        seconds = self._ledger.seconds_with_decodes
        if self.decodes_fit(contexts):
            return len(contexts)
        return bisect_right(
            range(1, len(contexts)), self._limit_s, key=lambda n: seconds(contexts[:n])
        )


class Trial(NamedTuple):
    """The batch if `out` paused: its ledger, and the limit that holds then (Eq. 6 for it and all
    others left out)."""

    out: Entry
    ledger: Ledger
    limit_s: float


class Packing:
    """size, most: requests in the batch, and the most there may be. online_s, offline_s: most time
    of the iteration before and with offline work [s]. chosen: running online requests that are in,
    the least urgent last. decodes_only: nothing may be prefilled. is_early: an online request did
    not fit the limit (lines 11-12). is_short: one waits for memory or a slot. is_left_out: an
    unfinished online prefill had its place in the order, and does not fit."""

    def __init__(
        self, builder: PlanBuilder, order: ResidualOrder, *, most: int, replaces: bool
    ) -> None:
        self.builder = builder
        self.view = builder.view
        self.most = most
        self.size = 0
        self.online_s = order.limit_s
        self.offline_s = min(order.limit_s, order.idle_s)
        self.chosen: list[Entry] = []
        self.decodes_only = must_decode(builder)
        self.is_early = False
        self.is_short = False
        self.is_left_out = False
        self._replaces = replaces
        self._shortest_s = order.shortest_s

    @property
    def is_full(self) -> bool:
        return self.size >= self.most

    def add_decodes(self, contexts: Sequence[int] | IntArray) -> None:
        self.builder.ledger.add_decodes(contexts)
        self.size += len(contexts)

    def pause(self, requests: Sequence[Request], contexts: Sequence[int]) -> set[str]:
        """Running requests that are not in pause. Those that cannot are in; returns their rids."""
        reason = SkipReason.BATCH_SIZE if self.is_full else SkipReason.LATENCY_BUDGET
        stuck = {request.rid for request in self.builder.pause_all(requests, reason)}
        if stuck:
            self.add_decodes([c for r, c in zip(requests, contexts, strict=True) if r.rid in stuck])
        return stuck

    def without_least_urgent(self) -> Trial | None:
        """The batch without the running online request that has most time to spare. None: there is
        none, it cannot pause, or has no time to. O(1)."""
        if not (self._replaces and self.chosen and self.view.rules.partial):
            return None
        out = self.chosen[-1]
        limit_s = min(self.offline_s, out.residual_s - self.view.mean_iteration_s)
        if limit_s < self._shortest_s or self.view.cannot_pause((out.request,)):
            return None
        ledger = self.builder.ledger.fork()
        ledger.drop_decode(out.context)
        return Trial(out, ledger, limit_s)

    def exchange(self, trial: Trial, builder: PlanBuilder) -> None:
        """The trial's request pauses in this builder."""
        self.builder = builder
        self.chosen.pop()
        self.size -= 1
        self.offline_s = trial.limit_s


def put_aside(out: Entry, builder: PlanBuilder) -> None:
    """A running online request that was in pauses."""
    builder.pause(out.request)
    builder.ledger.drop_decode(out.context)


def take_online(packing: Packing, order: ResidualOrder) -> None:
    """Requests left out pause, and bound offline work (Eq. 6)."""
    rest = _take_in_order(packing, order.entries)
    _pause_the_rest(packing, rest, order.shortest_s)


def _take_in_order(packing: Packing, queue: Sequence[Entry]) -> Sequence[Entry]:
    """Returns those that are not in."""
    builder, is_partial = packing.builder, packing.view.rules.partial
    for request in builder.unfinished():
        if not request.traits.can_preempt and not packing.decodes_only:
            continue_online(builder, Within(builder, packing.online_s), _STEPS, request)
            packing.size += 1
    if not is_partial:
        # No request can pause (decision 10).
        for request_class in RequestClass:
            packing.add_decodes(builder.running_of(request_class).contexts)
    index = 0
    passed: list[Entry] = []
    while index < len(queue) and not packing.is_full:
        entry = queue[index]
        if entry.context:
            num_run, num_fitting = _take_decodes(packing, queue, index)
            index += num_fitting
            if num_fitting < num_run:
                packing.is_early = True
                break
            continue
        if packing.decodes_only or _take_prefill(packing, entry, queue[index + 1 :]):
            index += 1
            continue
        if builder.skipped[entry.request.rid] is not SkipReason.LATENCY_BUDGET:
            packing.is_short = True
        else:
            packing.is_early = True
            if packing.size:
                break
            passed.append(entry)  # nothing is in: it must not keep all others out
        index += 1
    rest = [*passed, *queue[index:]]
    if passed and not packing.size:
        # Nothing fits the time, and something must run.
        rest = [e for e in rest if packing.size or not _take_whatever_it_takes(packing, e)]
    return rest


def _take_decodes(packing: Packing, queue: Sequence[Entry], index: int) -> tuple[int, int]:
    """The number of decodes that follow each other from there, and how many of them fit."""
    if not packing.view.rules.partial:
        return 1, 1  # counted already
    end, most = index, min(len(queue), index + packing.most - packing.size)
    while end < most and queue[end].context:
        end += 1
    run = queue[index:end]
    contexts = [entry.context for entry in run]
    num_fitting = Within(packing.builder, packing.online_s).offline_decodes(contexts)
    packing.add_decodes(contexts[:num_fitting])
    packing.chosen += run[:num_fitting]
    return len(run), num_fitting


def _take_prefill(packing: Packing, entry: Entry, behind: Sequence[Entry]) -> bool:
    """Compute what fits of a prompt; True also where it cannot take part now, with or without
    others."""
    view, builder, request = packing.view, packing.builder, entry.request
    pace = Within(builder, packing.online_s, beside=behind if view.rules.partial else ())
    is_unfinished = view.waiting(request.rid) is None
    if is_unfinished:
        num_cached = request.num_computed_tokens
        continue_online(builder, pace, _STEPS, request)
    else:
        if must_wait(builder, request):
            return True
        if packing.is_left_out and builder.preempts_online_prefill():
            builder.skip(request, SkipReason.UNFINISHED_PREFILL)
            return False
        num_cached = view.match(request).cached
        if not admit_online(builder, pace, _STEPS, request):
            return False
    num_tokens = builder.prefill.get(request.rid, 0)
    if not num_tokens:
        packing.is_left_out |= is_unfinished
        return False
    num_left = num_tokens_of(request) - num_cached - num_tokens
    if num_left and builder.ledger.tokens > 0:
        packing.is_early = True  # not the engine's chunk, but the time has cut it
    packing.size += 1
    return True


def _take_whatever_it_takes(packing: Packing, entry: Entry) -> bool:
    builder = packing.builder
    pace = Within(builder, math.inf)
    if packing.view.waiting(entry.request.rid) is None:
        continue_online(builder, pace, _STEPS, entry.request)
    elif not admit_online(builder, pace, _STEPS, entry.request):
        return False
    if entry.request.rid not in builder.prefill:
        return False  # it cannot take part now
    packing.size += 1
    return True


def _pause_the_rest(packing: Packing, rest: Sequence[Entry], shortest_s: float) -> None:
    """Running online requests that are not in pause; those that cannot are in. Offline work leaves
    those that can still be met the time that they need (Eq. 6)."""
    builder, view = packing.builder, packing.view
    if view.rules.partial:
        running = [e for e in rest if e.context]
        stuck = packing.pause([e.request for e in running], [e.context for e in running])
        rest = [e for e in rest if e.request.rid not in stuck]
    else:
        rest = [e for e in rest if not e.context]
    reason = SkipReason.BATCH_SIZE if packing.is_full else SkipReason.LATENCY_BUDGET
    for entry in rest:
        if not entry.context:
            builder.skipped.setdefault(entry.request.rid, reason)
    least_s = min((e.residual_s for e in rest if e.residual_s >= shortest_s), default=math.inf)
    packing.offline_s = min(packing.offline_s, least_s - view.mean_iteration_s)
