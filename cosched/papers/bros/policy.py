"""BROS: deadlines token by token, and online work that steps aside for offline work (§4).

Idea         every online request has a residual time: how long its next token may still take. The
             least of them bounds the iteration. Online requests are packed by residual time,
             offline ones are added in what is left, and where the batch or the time is full the
             online request with most time to spare changes places with an offline one.
Assumptions  the predictor knows how long a batch takes before it runs; prefill and decode share an
             iteration; a running request can sit out an iteration with its KV kept.
Good         single gaps are short and not only their mean; a crowd of chats is served by urgency.
Bad          a request that ran ahead lends nothing: every gap is measured anew. The order of late
             requests is literally by lateness, which under overload makes those late that still
             had time (`late_last`). No prefix order, no look at the memory of later iterations.
Parameters   TTFT and TPOT targets [s], per request or the server's; `Budgets.idle_share`,
             `Budgets.token_group`; `BrosOptions` for the ablations.

Of an online request i at the start of the iteration (Table 1, Eq. 6)

    t_i        time since its latest token, before the first since its arrival; 0 where the token is
               on its way
    k_i        tokens left in its token group; of a prefill: chunks left
    residual   target - t_i - (k_i - 1) * mean iteration
    in the batch, its token is in time if     C <= residual
    left out, if it is in the next one and    C <= residual - mean iteration

C is the predicted time of the iteration.

Steps (Alg. 1)
1. Online requests, waiting and running, by residual time. The least residual that can still be met
   is the limit of the iteration.
2. They are taken in this order until B requests are in or the next one does not fit the limit (the
   early return). Where KV memory is missing offline requests are stopped.
3. Offline requests: those that run, then those that wait. One that does not fit takes the place of
   the online request with most time to spare, if that one and all others left out stay in time.
4. B doubles after an iteration without early return, up to the request slots, and is 128 again
   after one with it.

Deviations from the paper, each for a reason (docs/policies/bros.md has more of them)
* The limit is the least residual of those that can still be met. Literally one late request makes
  it negative, and nobody is admitted at all. Where none can be met: the least TPOT target, or what
  the first request takes alone.
* Offline work is bounded by Eq. 6 for those that are left out too, not only for those in the batch;
  Alg. 1 checks neither them nor the one that it exchanges.
* A prompt that does not fit whole is cut, beside the decodes of the online requests that run, and
  counts as an early return. The paper computes prompts whole.
* An online request for which memory is missing is skipped, and does not end the loop: that would
  hold the decodes that need none.
* Offline requests that wait: those that were stopped by what must be restored, then the others in
  the order of arrival; what never ran needs no restoring and would always precede the others.
  Whoever is in front of the pool has the turn after `PATIENCE` admissions of others.
* An iteration with offline work takes at most `Budgets.idle_share` of the TTFT target, with online
  requests or without: one that comes meanwhile waits for this iteration and for the next, which is
  planned already. The paper names no bound; with its targets (0.4 s and 0.2 s) two iterations as
  long as the TPOT target are all of the time to the first token.
* t_i begins anew with each token, as the paper's Table 1 has it, also within a group. So a group
  may take longer than its target as a whole; with groups of one token there is no difference.
* Only a running online request changes places; one that waits does not. Its prompt must be computed
  soon anyway, together with those of all others that were put off, which Eq. 6 does not count.
* No new offline request is admitted while an online one waits for memory or slots.
* An unfinished online prefill is stopped only for one that is more urgent even if the first had
  computed nothing, by more than computing the lost part again takes. The residual time of a prompt
  grows with each chunk: literally, two nearly equal ones stop each other in every iteration.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from cosched.core.batch import BatchTotals
from cosched.core.plan import Plan, PreemptMode, SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.core.view import OfflineOrder, View
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.ledger import Ledger
from cosched.schedule.phases import (
    Steps,
    admission_tokens,
    admit_online,
    continue_online,
    follow,
    has_time,
    is_turn_of_decodes,
    is_worth_its_place,
    make_room_for_decodes,
    must_wait,
    offline_room,
    offline_tokens,
    owes_recomputing,
    stop_beyond_limit,
)
from cosched.schedule.preemption import recompute_s

BASE_SIZE = 128
"""Requests in an iteration at first and after an early return (§4.2, B_base)."""

PATIENCE = 16
"""Admissions in a row that may pass over whoever is in front of the pool (own)."""

CANDIDATES = 8
"""Stopped requests in front of the pool of which the one with least to restore is next (own)."""

MOST_EXCHANGES = 16
"""Of one plan (own): the others follow in the next ones."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from plan to plan.

    batch_size  most requests in the iteration (B_curr)
    num_passed  admissions in a row that passed over the front of the pool
    """

    batch_size: int = BASE_SIZE
    num_passed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BrosOptions:
    """In what the ablations differ.

    late_last  online requests that cannot be in time come behind those that can
    replaces   offline requests may take the place of online ones (Alg. 1, lines 25 to 32)
    beside     offline requests run beside online ones (lines 15 to 33)
    stop       how requests are stopped; None: what costs least
    """

    late_last: bool = False
    replaces: bool = True
    beside: bool = True
    stop: PreemptMode | None = None


_ALL = BrosOptions()


class BrosPolicy:
    """Alg. 1 with the batch size of §4.2. See the module's docstring."""

    initial = Pressure()

    def __init__(self, settings: PolicySettings, options: BrosOptions = _ALL) -> None:
        self._settings = settings
        self._options = options

    def plan(self, view: View, carry: Pressure) -> tuple[Plan, Pressure]:
        builder = PlanBuilder(view, stop=self._options.stop)
        stop_beyond_limit(builder, _STEPS)
        make_room_for_decodes(builder, _STEPS)
        packing = _Packing(builder, self._settings, self._options, carry)
        packing.take_online()
        packing.add_offline()
        most = view.caps.max_running_requests
        batch_size = BASE_SIZE if packing.is_early else min(2 * carry.batch_size, most)
        after = Pressure(batch_size=batch_size, num_passed=packing.num_passed)
        return packing.builder.build(limits=packing.limits()), after


_STEPS = Steps()


class _Entry(NamedTuple):
    """An online request in the order of Alg. 1, line 3.

    context  tokens that its next decode attends to; 0: it has prompt tokens to compute
    """

    residual_s: float
    arrival_seq: int
    request: Request
    context: int


class _Trial(NamedTuple):
    """What would be in if `out` sat out: its ledger, and the limit that holds then (Eq. 6 for it
    and all others left out)."""

    out: _Entry
    ledger: Ledger
    limit_s: float


class _Within:
    """Implements `cosched.schedule.phases.Pace`: all that is in a ledger takes at most so long.

    limit_s  most predicted time of the iteration [s]
    beside   entries to whose decodes an online prompt that does not fit whole leaves room
    """

    def __init__(
        self, builder: PlanBuilder, limit_s: float, *, beside: Sequence[_Entry] = ()
    ) -> None:
        self._ledger = builder.ledger
        self._predictor = builder.view.predictor
        self._limit_s = limit_s
        self._beside = beside

    def online_tokens(self, num_cached: int, limit: int) -> int:
        totals = self._ledger.totals
        most = self._predictor.max_prefill(totals, num_cached, self._limit_s, limit)
        if 0 < most < limit and self._beside:
            totals = totals.copy()
            totals.add_decodes([entry.context for entry in self._beside if entry.context])
            most = self._predictor.max_prefill(totals, num_cached, self._limit_s, limit) or most
        return most

    def offline_tokens(self, num_cached: int, limit: int, *, is_last: bool = False) -> int:
        return self._predictor.max_prefill(self._ledger.totals, num_cached, self._limit_s, limit)

    def has_offline_time(self) -> bool:
        return self._ledger.seconds_with(1, 0) <= self._limit_s

    def offline_decodes(self, contexts: Sequence[int]) -> int:
        seconds = self._ledger.seconds_with_decodes
        if seconds(contexts) <= self._limit_s:
            return len(contexts)
        return bisect_right(
            range(1, len(contexts)), self._limit_s, key=lambda n: seconds(contexts[:n])
        )


class _Packing:
    """One plan under construction.

    is_early    an online request did not fit the limit (lines 11-12)
    """

    def __init__(
        self,
        builder: PlanBuilder,
        settings: PolicySettings,
        options: BrosOptions,
        carry: Pressure,
    ) -> None:
        self.builder = builder
        self.num_passed = carry.num_passed
        self.is_early = False
        self._view = view = builder.view
        self._options = options
        self._budgets = settings.budgets
        self._slo = settings.slo
        self._most = min(carry.batch_size, view.caps.max_running_requests)
        self._size = 0
        self._decodes_only = is_turn_of_decodes(builder)
        self._is_short = False
        """An online request waits for memory or a slot."""
        self._is_unfinished_left_out = False
        """An unfinished online prefill had its turn, and does not fit."""
        self._shortest_s = self._alone_s(None, 1)
        self._chosen: list[_Entry] = []
        """Running online requests that are in, the least urgent last."""
        self._queue = queue = self._by_residual()
        first = self._first_attainable()
        self._online_s = self._limit_s(first, settings.latency_budget_s)
        num_late = 0
        if options.late_last and first is not None:
            self._queue = queue[first:] + queue[:first]
            num_late = first
        self._keep_unfinished_ahead(num_late)
        self._offline_s = min(self._online_s, self._idle_s())

    def limits(self) -> Mapping[str, float]:
        limits = {"online": self._online_s, "offline": self._offline_s}
        return {phase: limit_s for phase, limit_s in limits.items() if limit_s < math.inf}

    # Line 3: the order

    def _by_residual(self) -> list[_Entry]:
        """Running and waiting online requests, most urgent first.

        The waiting ones are in order already where all have one target; sorting two ordered runs is
        merging them, which is what Fig. 8 is about. O(online requests).
        """
        view, builder = self._view, self.builder
        start_s, mean_s = view.start_s, view.mean_iteration_s
        group = self._budgets.token_group
        tpot_s = _target(None, self._slo.tpot_s)
        queue: list[_Entry] = []
        requests, contexts = builder.running_of(RequestClass.ONLINE)
        for request, context in zip(requests, contexts, strict=True):
            own_s = request.slo.tpot_s
            residual_s = tpot_s if own_s is None else own_s
            # As `PlanBuilder.gap_s`, without its look at the context.
            if context <= num_tokens_of(request):
                last_s = request.last_token_s
                if last_s is not None:
                    residual_s -= start_s - last_s
            if group > 1:
                num_left = group - (context - request.num_prompt_tokens - 1) % group
                residual_s += (group - 1) * (tpot_s if own_s is None else own_s)
                residual_s -= (num_left - 1) * mean_s
            queue.append(_Entry(residual_s, request.arrival_seq, request, context))
        for request in builder.unfinished():
            if request.request_class is RequestClass.ONLINE and request.traits.can_stop:
                queue.append(self._prefill_entry(request))
        queue += map(self._prefill_entry, view.online)
        queue.sort()
        return queue

    def _keep_unfinished_ahead(self, num_late: int) -> None:
        """An unfinished prefill has its place in the queue before the waiting requests that are not
        more urgent by more than stopping it costs (own). num_late: entries at the end of the queue
        that cannot be in time.

        It is as urgent as if it had computed nothing, and by the time that computing the lost part
        again takes: progress must not make it give way, or two prompts of nearly equal residual
        times would stop each other in every iteration.
        """
        queue, view = self._queue, self._view
        unfinished = {request.rid: request for request in self.builder.unfinished()}
        for place in range(len(queue)) if unfinished else ():
            request = unfinished.get(queue[place].request.rid)
            if request is None:
                continue
            residual_s = self._residual_s(request, num_tokens_of(request))
            residual_s -= recompute_s(view, request)
            num_ahead = len(queue) - num_late
            for before in range(0 if place < num_ahead else num_ahead, place):
                entry = queue[before]
                if not entry.context and entry.residual_s >= residual_s:
                    queue.insert(before, queue.pop(place))
                    break

    def _prefill_entry(self, request: Request) -> _Entry:
        num_tokens = num_tokens_of(request) - request.num_computed_tokens
        residual_s = self._residual_s(request, num_tokens)
        return _Entry(residual_s, request.arrival_seq, request, 0)

    def _residual_s(self, request: Request, num_tokens: int) -> float:
        """Of a request with so many tokens to compute until its next one comes out."""
        view, group = self._view, self._budgets.token_group
        last_s = request.last_token_s
        if last_s is None:
            target_s = _target(request.slo.ttft_s, self._slo.ttft_s)
            residual_s = target_s - (view.start_s - request.arrival_s)
        else:  # it was stopped
            target_s = group * _target(request.slo.tpot_s, self._slo.tpot_s)
            residual_s = target_s - (view.start_s - last_s)
        chunk = view.caps.max_chunk_tokens
        if chunk is not None and num_tokens > chunk:
            residual_s -= ((num_tokens - 1) // chunk) * view.mean_iteration_s
        return residual_s

    # Line 4: the limit

    def _first_attainable(self) -> int | None:
        """Place of the most urgent one whose token would be in time if it were alone (own)."""
        queue = self._queue
        for place in range(bisect_left(queue, (self._shortest_s,)), len(queue)):
            residual_s, _, request, context = queue[place]
            if residual_s >= self._alone_s(request, context):
                return place
        return None

    def _limit_s(self, first: int | None, latency_budget_s: float | None) -> float:
        """T_min^res: the least residual that can still be met [s]. first: its place."""
        if latency_budget_s is not None:
            return latency_budget_s
        if first is not None:
            return self._queue[first].residual_s
        if not self._queue:
            return self._idle_s()
        tpot_s = min(_target(e.request.slo.tpot_s, self._slo.tpot_s) for e in self._queue)
        most_late = self._queue[0]
        return max(tpot_s, self._alone_s(most_late.request, most_late.context))

    def _idle_s(self) -> float:
        """Most time of an iteration with offline work in it, for those that come meanwhile [s]."""
        return self._budgets.idle_share * _target(None, self._slo.ttft_s)

    def _alone_s(self, request: Request | None, context: int) -> float:
        """Predicted time of an iteration of its own, with a chunk of its prompt at the most [s]."""
        totals = BatchTotals()
        if context:
            totals.add_decode(context)
        else:
            assert request is not None
            num_cached = request.num_computed_tokens or self._view.match(request).cached
            num_tokens = max(num_tokens_of(request) - num_cached, 1)
            chunk = self._view.caps.max_chunk_tokens
            totals.add_prefill(num_tokens if chunk is None else min(num_tokens, chunk), num_cached)
        return self._view.predictor.predict_s(totals)

    # Lines 5 to 14: online requests

    def take_online(self) -> None:
        builder, queue = self.builder, self._queue
        for request in builder.unfinished():
            if not request.traits.can_stop and not self._decodes_only:
                continue_online(builder, _Within(builder, self._online_s), _STEPS, request)
                self._size += 1
        if not self._view.rules.partial:
            self._count_all_decodes()
        index = 0
        passed: list[_Entry] = []
        while index < len(queue) and self._size < self._most:
            entry = queue[index]
            if entry.context:
                if not self._view.rules.partial:
                    index += 1
                    continue
                run = _decodes_from(queue, index, self._most - self._size)
                contexts = [e.context for e in run]
                num_fitting = _Within(builder, self._online_s).offline_decodes(contexts)
                builder.ledger.add_decodes(contexts[:num_fitting])
                self._chosen += run[:num_fitting]
                self._size += num_fitting
                index += num_fitting
                if num_fitting < len(run):
                    self.is_early = True
                    break
                continue
            if self._decodes_only or self._take_prefill(entry, queue[index + 1 :]):
                index += 1
                continue
            if builder.skipped[entry.request.rid] is SkipReason.LATENCY_BUDGET:
                self.is_early = True
                if self._size:
                    break
                passed.append(entry)  # nobody is in: it must not keep everybody out
                index += 1
                continue
            self._is_short = True
            index += 1
        rest = [*passed, *queue[index:]]
        if passed and not self._size:
            # Nothing fits the time, and something must run.
            rest = [e for e in rest if not self._take_whatever_it_takes(e)]
        self._hold_the_rest(rest)

    def _count_all_decodes(self) -> None:
        """Nobody can sit out (decision 10)."""
        builder = self.builder
        for request_class in RequestClass:
            _, contexts = builder.running_of(request_class)
            builder.ledger.add_decodes(contexts)
            self._size += len(contexts)

    def _take_prefill(self, entry: _Entry, behind: Sequence[_Entry]) -> bool:
        """Compute what fits of a prompt; True also where it cannot take part now whoever else
        does."""
        builder, request = self.builder, entry.request
        pace = _Within(builder, self._online_s, beside=behind if self._view.rules.partial else ())
        if self._view.waiting(request.rid) is None:
            num_cached = request.num_computed_tokens
            continue_online(builder, pace, _STEPS, request)
        else:
            if must_wait(builder, request):
                return True
            if self._is_unfinished_left_out and builder.stops_online_prefill():
                builder.skip(request, SkipReason.UNFINISHED_PREFILL)
                return False
            num_cached = self._view.match(request).cached
            if not admit_online(builder, pace, _STEPS, request):
                return False
        num_tokens = builder.prefill.get(request.rid, 0)
        if not num_tokens:
            self._is_unfinished_left_out |= self._view.waiting(request.rid) is None
            return False
        num_left = num_tokens_of(request) - num_cached - num_tokens
        if num_left and builder.ledger.tokens > 0:
            self.is_early = True  # not the engine's chunk, but the time has cut it
        self._size += 1
        return True

    def _take_whatever_it_takes(self, entry: _Entry) -> bool:
        builder, pace = self.builder, _Within(self.builder, math.inf)
        if self._size:
            return False
        if self._view.waiting(entry.request.rid) is None:
            continue_online(builder, pace, _STEPS, entry.request)
        elif not admit_online(builder, pace, _STEPS, entry.request):
            return False
        if entry.request.rid not in builder.prefill:
            return False  # it cannot take part now
        self._size += 1
        return True

    def _hold_the_rest(self, rest: Sequence[_Entry]) -> None:
        """Running online requests that are not in sit out; those that cannot are in. Offline work
        leaves those that still can be met the time that they need (Eq. 6)."""
        builder, view = self.builder, self._view
        if view.rules.partial:
            running = [e for e in rest if e.context]
            is_full = self._size >= self._most
            reason = SkipReason.BATCH_SIZE if is_full else SkipReason.LATENCY_BUDGET
            stuck = builder.hold_all([e.request for e in running], reason)
            if stuck:
                rids = {request.rid for request in stuck}
                builder.ledger.add_decodes([e.context for e in running if e.request.rid in rids])
                self._size += len(stuck)
                rest = [e for e in rest if e.request.rid not in rids]
        else:
            rest = [e for e in rest if not e.context]
        for entry in rest:
            if not entry.context:
                full = self._size >= self._most
                builder.skipped.setdefault(
                    entry.request.rid,
                    SkipReason.BATCH_SIZE if full else SkipReason.LATENCY_BUDGET,
                )
        mean_s = view.mean_iteration_s
        least_s = min(
            (e.residual_s for e in rest if e.residual_s >= self._shortest_s), default=math.inf
        )
        self._offline_s = min(self._offline_s, least_s - mean_s)

    # Lines 15 to 33: offline requests

    def add_offline(self) -> None:
        is_alone = not self._queue
        if not (self._options.beside or is_alone):
            self._hold_offline(*self.builder.running_of(RequestClass.OFFLINE))
            return
        holds_any = self._view.rules.partial and self._decode_offline()
        if self._decodes_only:
            return
        for request in self.builder.unfinished():
            if request.request_class is RequestClass.OFFLINE and request.traits.can_stop:
                self._continue_offline(request)
        order = self._view.offline_order()
        reason = None
        if owes_recomputing(self.builder):
            reason = SkipReason.RECOMPUTE_DEBT
        elif self.builder.stops_online_prefill():
            reason = SkipReason.UNFINISHED_PREFILL
        elif self._is_short:
            reason = SkipReason.MEMORY_BUDGET
        elif holds_any:
            reason = SkipReason.LATENCY_BUDGET
        if reason is not None:
            front = next(order, None)
            if front is not None:
                self.builder.skip(front, reason)
            return
        self._admit_offline(order)

    def _decode_offline(self) -> bool:
        """Running offline requests decode, oldest first. True: some sit out."""
        decodes = self.builder.running_of(RequestClass.OFFLINE)
        requests, contexts = decodes.requests, self.builder.reads_of(decodes)
        num_fitting = self._num_decodes_that_fit(contexts)
        if num_fitting < len(requests):
            places = sorted(range(len(requests)), key=lambda i: requests[i].arrival_seq)
            requests = [requests[i] for i in places]
            contexts = [contexts[i] for i in places]
            num_fitting = self._num_decodes_that_fit(contexts)
        self._add_offline_decodes(contexts[:num_fitting])
        for _ in range(MOST_EXCHANGES):
            if num_fitting == len(requests) or not self._exchange_decode(contexts[num_fitting]):
                break
            num_fitting += 1
        return self._hold_offline(requests[num_fitting:], contexts[num_fitting:])

    def _num_decodes_that_fit(self, contexts: Sequence[int]) -> int:
        room = max(self._most - self._size, 0)
        return _Within(self.builder, self._offline_s).offline_decodes(contexts[:room])

    def _add_offline_decodes(self, contexts: Sequence[int]) -> None:
        self.builder.ledger.add_decodes(contexts)
        self._size += len(contexts)

    def _hold_offline(self, requests: Sequence[Request], contexts: Sequence[int]) -> bool:
        if not requests or not self._view.rules.partial:
            return False
        builder = self.builder
        is_full = self._size >= self._most
        reason = SkipReason.BATCH_SIZE if is_full else SkipReason.LATENCY_BUDGET
        stuck = {request.rid for request in builder.hold_all(requests, reason)}
        if stuck:
            self._add_offline_decodes(
                [c for r, c in zip(requests, contexts, strict=True) if r.rid in stuck]
            )
        return len(stuck) < len(requests)

    def _continue_offline(self, request: Request) -> None:
        builder = self.builder
        pace = _Within(builder, self._offline_s)
        num_cached = request.num_computed_tokens
        if self._size >= self._most and builder.runs_anything():
            builder.skip(request, SkipReason.BATCH_SIZE)
        elif builder.go_on(request, offline_tokens(builder, pace, request, num_cached)):
            self._size += 1

    def _admit_offline(self, order: OfflineOrder) -> None:
        room = offline_room(self.builder)
        reason = self._why_none_comes(room)
        if order.knows_prefixes and reason is None:
            for request in (*self._view.running, *self._view.unfinished):
                if request.num_output_tokens == 0:
                    follow(order, request, request.num_prefix_tokens)
        ahead: list[Request] = []  # the first of the order that are not admitted
        while reason is None:
            _look_ahead(order, ahead)
            if not ahead:
                return
            front, request = ahead[0], self._next_offline(ahead)
            if must_wait(self.builder, request):
                ahead.remove(request)
                continue
            if not self._admit_one(request):
                if request is front or must_wait(self.builder, front) or not self._admit_one(front):
                    return
                request = front
            ahead.remove(request)
            follow(order, request, self._view.match(request).cached)
            self.num_passed = 0 if request is front else self.num_passed + 1
            room = None if room is None else room - 1
            reason = self._why_none_comes(room)
        first = ahead[0] if ahead else next(order, None)
        if first is not None:
            self.builder.skip(first, reason)

    def _why_none_comes(self, room: int | None) -> SkipReason | None:
        """Why no waiting offline request can be admitted, whichever it is; None: one may be. room:
        that the operator allows; None: any number. Looks nothing up in the tree, which is the
        dearest part of a plan."""
        builder = self.builder
        if room == 0:
            return SkipReason.OPERATOR_LIMIT
        if builder.ledger.slots <= 0:
            return SkipReason.REQUEST_SLOTS
        reason = self._why_no_place()
        if reason is None:
            return None
        trial = self._without_least_urgent()
        if trial is not None and trial.ledger.seconds_with(1, 0) <= trial.limit_s:
            return None
        return reason

    def _why_no_place(self) -> SkipReason | None:
        """Why not one prompt token more fits unless somebody changes places."""
        builder = self.builder
        if self._size >= self._most and builder.runs_anything():
            return SkipReason.BATCH_SIZE
        if not has_time(builder, _Within(builder, self._offline_s)):
            return SkipReason.LATENCY_BUDGET
        return None

    def _next_offline(self, ahead: Sequence[Request]) -> Request:
        """Of those that were stopped the one with least to restore (line 17); who is in front where
        none was stopped, or has been passed over often enough."""
        stopped = [request for request in ahead if request.num_preemptions]
        if not stopped or self.num_passed >= PATIENCE:
            return ahead[0]
        return min(stopped, key=self._restore_need)  # of equals the first

    def _restore_need(self, request: Request) -> int:
        """Tokens of KV to load or to compute anew (M^cpu, and what no host memory holds)."""
        match = self._view.match(request)
        return num_tokens_of(request) - match.cached + match.host

    def _admit_one(self, request: Request) -> bool:
        builder = self.builder
        reason = self._why_no_place()
        if reason is not None:
            builder.skip(request, reason)
            return self._exchange_prefill(request)
        match = self._view.match(request)
        if not is_worth_its_place(builder, request, match):
            builder.skip(request, SkipReason.EVICTION_LOSS)
            return False
        pace = _Within(builder, self._offline_s)
        at_most = admission_tokens(builder, pace, request, match)
        if not builder.admit(request, match, at_most):
            if builder.skipped[request.rid] is SkipReason.LATENCY_BUDGET:
                return self._exchange_prefill(request)
            return False
        self._size += 1
        return True

    # Lines 25 to 32: exchange

    def _exchange_decode(self, context: int) -> bool:
        """A running offline request takes the place of the least urgent online one."""
        trial = self._without_least_urgent()
        if trial is None or trial.ledger.seconds_with_decodes((context,)) > trial.limit_s:
            return False
        _put_aside(trial.out, self.builder)
        self._exchanged(trial)
        self._add_offline_decodes((context,))
        return True

    def _exchange_prefill(self, request: Request) -> bool:
        """A waiting offline request does so with its whole prompt: a part yields no token, and
        tokens are what is maximised (Eq. 1)."""
        trial = self._without_least_urgent()
        if trial is None:
            return False
        match = self._view.match(request)
        num_tokens = num_tokens_of(request) - match.cached
        if trial.ledger.seconds_with(num_tokens, match.cached) > trial.limit_s:
            return False
        builder = self.builder.fork()
        _put_aside(trial.out, builder)
        if not is_worth_its_place(builder, request, match):
            return False
        if not builder.admit(request, match, num_tokens):
            return False
        if builder.prefill[request.rid] < num_tokens:
            return False
        self.builder = builder
        self._exchanged(trial)
        self._size += 1
        return True

    def _without_least_urgent(self) -> _Trial | None:
        """What would be in without the running online request that has most time to spare. None:
        there is none, it cannot sit out, or has no time to. O(1)."""
        if not (self._options.replaces and self._chosen and self._view.rules.partial):
            return None
        out = self._chosen[-1]
        limit_s = min(self._offline_s, out.residual_s - self._view.mean_iteration_s)
        if limit_s < self._shortest_s or not self._view.can_hold(out.request):
            return None
        ledger = self.builder.ledger.fork()
        ledger.drop_decode(out.context)
        return _Trial(out, ledger, limit_s)

    def _exchanged(self, trial: _Trial) -> None:
        self._chosen.pop()
        self._size -= 1
        self._offline_s = trial.limit_s


def _put_aside(out: _Entry, builder: PlanBuilder) -> None:
    """A running online request that was in sits out."""
    builder.hold(out.request)
    builder.ledger.drop_decode(out.context)


def _look_ahead(order: OfflineOrder, ahead: list[Request]) -> None:
    """Up to `CANDIDATES` that were stopped, and the one behind them: in the order of arrival what
    was stopped is older than what never ran."""
    while len(ahead) < CANDIDATES and all(request.num_preemptions for request in ahead):
        request = next(order, None)
        if request is None:
            return
        ahead.append(request)


def _decodes_from(queue: Sequence[_Entry], index: int, most: int) -> Sequence[_Entry]:
    """The decodes that follow each other from there, `most` of them at the most."""
    end = index
    while end < len(queue) and end - index < most and queue[end].context:
        end += 1
    return queue[index:end]


def _target(own_s: float | None, default_s: float | None) -> float:
    """A request's own target, or the server's."""
    target_s = default_s if own_s is None else own_s
    assert target_s is not None, "the server's targets are always set"
    return target_s
