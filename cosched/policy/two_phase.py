"""Two phases over one ledger: online requests first, offline ones into what they leave (HyGen §4.1,
Algorithm 1). Policies differ in the time they give each phase.

Running requests decode. Online prefill takes what it needs, oldest first; where request slots or KV
memory are missing, running offline requests are stopped, youngest first, with their KV kept in the
radix tree, and an unfinished offline prefill is stopped when an online one needs its place. Offline
work is taken in the pool's order, running before waiting; where the pool knows which requests begin
alike, a head that none has computed yet is computed by one of them and the others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol

from cosched.core.budget import IterationBudget
from cosched.core.plan import Plan, Preemption, SkipReason
from cosched.core.request import Request, RequestClass
from cosched.core.view import Decodes, Match, SharingOrder, View

__all__ = ["TimeLedger", "TwoPhaseDraft", "Unlimited", "two_phase_plan"]


class TimeLedger(Protocol):
    """The predicted time of the iteration while its plan grows.

    Every method that asks "does it fit" charges nothing; every `add` does.
    """

    def online_tokens(self, num_cached: int, limit: int) -> int:
        """Most prompt tokens, up to `limit`, of an online prefill that fit beside what is in."""
        ...

    def offline_tokens(self, num_cached: int, limit: int, *, is_last: bool = False) -> int:
        """The same for an offline prefill; maybe fewer where that serves the iterations to come.
        is_last: none joins the batch after it."""
        ...

    def has_offline_time(self) -> bool:
        """False: not one token of any offline prefill fits."""
        ...

    def offline_decodes(self, contexts: Sequence[int]) -> int:
        """How many of the first offline decodes fit beside what is in; context: tokens attended
        to."""
        ...

    def add_prefill(self, num_tokens: int, num_cached: int) -> None: ...

    def add_decodes(self, contexts: Sequence[int]) -> None: ...


class Unlimited:
    """Time does not matter."""

    def online_tokens(self, num_cached: int, limit: int) -> int:
        return limit

    def offline_tokens(self, num_cached: int, limit: int, *, is_last: bool = False) -> int:
        return limit

    def has_offline_time(self) -> bool:
        return True

    def offline_decodes(self, contexts: Sequence[int]) -> int:
        return len(contexts)

    def add_prefill(self, num_tokens: int, num_cached: int) -> None:
        pass

    def add_decodes(self, contexts: Sequence[int]) -> None:
        pass


def two_phase_plan(view: View, time: TimeLedger, *, most_offline: int | None = None) -> Plan:
    """The plan of one iteration.

    time          holds the decodes of the running online requests already
    most_offline  most offline requests that may be admitted from the pool; None: any number
    """
    return TwoPhaseDraft(view, time, most_offline).build()


class TwoPhaseDraft:
    """A plan under construction: the ledgers and what was decided so far.

    Who admits offline requests by another rule overrides `_admit_offline`; who continues or stops
    others, `_decode_order` and `_victims`.
    """

    _decode_order: Callable[[Request], Any] = attrgetter("arrival_seq")
    """Sort key: who decodes where not all fit."""

    def __init__(self, view: View, time: TimeLedger, most_offline: int | None = None) -> None:
        self._view = view
        self._time = time
        self._most_offline = most_offline
        self._budget = IterationBudget(view)
        self._offline = view.running_of(RequestClass.OFFLINE)
        self._prefill: dict[str, int] = {}
        self._preempted: dict[str, Preemption] = {}
        self._held: set[str] = set()
        self._skipped: dict[str, SkipReason] = {}
        self._sharing: SharingOrder | None = None

    def build(self) -> Plan:
        self._stop_beyond_limit()
        self._make_room_for_decodes()
        if self._is_turn_of_decodes():
            self._offline_decodes()
        else:
            is_online_served = self._online_phase()
            self._offline_decodes()
            if is_online_served:
                self._offline_prefills()
            self._stop_what_does_not_go_on()
        self._keep_one_running()
        return Plan(
            prefill=self._prefill,
            preempt=tuple(self._preempted.values()),
            hold=frozenset(self._held),
            skipped=self._skipped,
        )

    def _is_turn_of_decodes(self) -> bool:
        """Where prefill and decode cannot share a batch they take turns. An unfinished prefill then
        stays as it is."""
        rules = self._view.rules
        return rules.decodes_due and not rules.mixed and self._decodes_any()

    def _decodes_any(self) -> bool:
        return any(not self._is_stopped(r) for r in self._view.running)

    def _stop_what_does_not_go_on(self) -> None:
        """The engine goes on with an unfinished prefill wherever it prefills anything."""
        for request in self._view.unfinished:
            if request.rid not in self._prefill and not self._is_stopped(request):
                if request.traits.can_stop:
                    self._preempt(request)
                else:
                    self._prefill.clear()

    def _online_phase(self) -> bool:
        """Admit online requests. False: one still waits, so no offline prefill may start."""
        for request in self._view.unfinished:
            if request.request_class is RequestClass.ONLINE or not request.traits.can_stop:
                self._continue_online(request)
        return all(self._admit_online(request) for request in self._view.online)

    def _offline_decodes(self) -> None:
        """Running offline requests decode while they fit; the others sit out."""
        if not self._view.rules.partial:
            return
        running, contexts = self._running_offline()
        num_fitting = self._time.offline_decodes(contexts)
        if num_fitting < len(running):
            running, contexts = Decodes.of(sorted(running, key=self._decode_order))
            num_fitting = self._time.offline_decodes(contexts)
        self._time.add_decodes(contexts[:num_fitting])
        for request in running[num_fitting:]:
            self._held.add(request.rid)
            self._budget.refund_hold(request)
            self._skipped[request.rid] = SkipReason.LATENCY_BUDGET

    def _offline_prefills(self) -> None:
        for request in self._view.unfinished:
            is_offline = request.request_class is RequestClass.OFFLINE
            if is_offline and request.traits.can_stop and not self._is_stopped(request):
                num_cached = request.num_computed_tokens
                num_tokens = self._budget.continuation(
                    request, at_most=self._offline_tokens(request, num_cached)
                )
                if num_tokens > 0:
                    self._budget.charge_continuation(request, num_tokens)
                    self._take(request, num_tokens, num_cached)
        order = iter(self._view.offline)
        if self._held:  # what runs comes before what waits
            for request in islice(order, 1):
                self._skipped[request.rid] = SkipReason.LATENCY_BUDGET
            return
        if isinstance(order, SharingOrder):
            self._sharing = order
            for request in (*self._view.running, *self._view.unfinished):
                if request.num_output_tokens == 0:
                    self._follow(request, request.num_prefix_tokens)
        self._admit_offline(order)

    def _stop_beyond_limit(self) -> None:
        """Stop what runs offline beyond the operator's limit, where that is wanted."""
        limits = self._view.offline_limits
        if limits.stop_running and limits.most_running is not None:
            num_beyond = self._num_running_offline() - limits.most_running
            for victim in self._victims()[: max(num_beyond, 0)]:
                self._preempt(victim)

    def _offline_room(self) -> int | None:
        """Offline requests that may be admitted by the operator's limit; None: any number."""
        most = self._view.offline_limits.most_running
        return None if most is None else max(most - self._num_running_offline(), 0)

    def _num_running_offline(self) -> int:
        """Those that are not stopped, unfinished prefills included."""
        unfinished = [
            r
            for r in self._view.unfinished
            if r.request_class is RequestClass.OFFLINE and not self._is_stopped(r)
        ]
        return len(self._running_offline().requests) + len(unfinished)

    def _admit_offline(self, order: Iterator[Request]) -> None:
        """In the pool's order, until one does not fit."""
        num_admitted = 0
        room = self._offline_room()
        for request in order:
            if self._must_wait(request):
                continue
            if num_admitted == room:
                self._skipped[request.rid] = SkipReason.OPERATOR_LIMIT
                break
            if num_admitted == self._most_offline:
                self._skipped[request.rid] = SkipReason.RATE_LIMIT
                break
            if self._budget.slots <= 0:
                self._skipped[request.rid] = SkipReason.REQUEST_SLOTS
                break
            if not self._has_time():
                self._skipped[request.rid] = SkipReason.LATENCY_BUDGET
                break
            match = self._view.match(request)
            if not self._admit(request, match, self._admission_tokens(request, match.cached)):
                break
            num_admitted += 1
            self._follow(request, match.cached)

    def _must_wait(self, request: Request) -> bool:
        """Whether a waiting request cannot be admitted whatever room there is; others can."""
        if self._view.is_barred(request):
            self._skipped[request.rid] = SkipReason.ENGINE_REFUSED
            return True
        if (
            self._view.rules.decodes_due
            and not request.traits.can_mix
            and self._view.caps.mixed_batches
            and self._decodes_any()
        ):
            self._skipped[request.rid] = SkipReason.DECODES_DUE
            return True
        return False

    def _has_time(self) -> bool:
        """Looking into the cache is the dearest part of a plan: only where it could matter."""
        return self._time.has_offline_time() or not self._runs_anything()

    def _follow(self, request: Request, num_cached: int) -> None:
        """Who shares what this request computes now waits until it is in the tree, unless it is
        next to nothing."""
        num_shared = num_cached + _LEAST_SHARED
        if self._sharing is not None and num_shared <= _num_tokens(request):
            self._sharing.skip_sharing(request, num_shared)

    def _online_tokens(self, request: Request, num_cached: int) -> int:
        """Prompt tokens of an online prefill that the time allows; some in any case where nothing
        else runs, or a fixed budget below the shortest iteration would stop everything."""
        remaining = _num_tokens(request) - num_cached
        num_tokens = self._time.online_tokens(num_cached, remaining)
        if num_tokens and not request.traits.can_cut:
            return remaining
        if num_tokens:
            # Where chunks come in large units only, one too long is better than none.
            return max(num_tokens, min(remaining, self._view.caps.chunk_unit))
        return 0 if self._runs_anything() else self._least(request, remaining)

    def _least(self, request: Request, remaining: int) -> int:
        """What an idle engine computes of a prompt whatever time says."""
        if not request.traits.can_cut:
            return remaining
        return min(remaining, self._least_progress())

    def _least_progress(self) -> int:
        return max(_LEAST_PROGRESS, self._view.caps.chunk_unit)

    def _offline_tokens(self, request: Request, num_cached: int, *, is_last: bool = False) -> int:
        """Prompt tokens of an offline prefill that the time allows; no crumbs: a chunk costs a
        forward of its own, however short it is."""
        remaining = _num_tokens(request) - num_cached
        num_tokens = self._time.offline_tokens(num_cached, remaining, is_last=is_last)
        least = max(_LEAST_CHUNK, self._view.caps.chunk_unit)
        if num_tokens >= (min(remaining, least) if request.traits.can_cut else remaining):
            return num_tokens
        # Work that waits for an idle engine: were it left out, nothing would ever correct a belief
        # that is too slow.
        return 0 if self._runs_anything() else self._least(request, remaining)

    def _admission_tokens(self, request: Request, num_cached: int) -> int:
        """The same for one that is admitted; the last that finds a slot may stay unfinished."""
        is_last = self._budget.slots == 1 and self._budget.unfinished > 0
        return self._offline_tokens(request, num_cached, is_last=is_last)

    def _runs_anything(self) -> bool:
        return bool(self._prefill) or any(
            r.rid not in self._held and r.rid not in self._preempted for r in self._view.running
        )

    def _make_room_for_decodes(self) -> None:
        """Stop offline requests until every remaining one can write its next token."""
        if self._budget.available >= 0:
            return
        for victim in self._victims():
            self._preempt(victim)
            if self._budget.available >= 0:
                break

    def _continue_online(self, request: Request) -> None:
        num_cached = request.num_computed_tokens
        at_most = self._online_tokens(request, num_cached)
        if self._budget.continuation(request, at_most=at_most) <= 0:
            for victim in self._victims():
                self._preempt(victim)
                if self._budget.continuation(request, at_most=at_most) > 0:
                    break
        # An online prefill is not dropped halfway for what may be generated one day: it goes on as
        # long as there is memory for the chunk itself.
        num_tokens = self._budget.chunk(request, num_cached, at_most=at_most)
        if num_tokens > 0:
            self._budget.charge_continuation(request, num_tokens)
            self._take(request, num_tokens, num_cached)

    def _admit_online(self, request: Request) -> bool:
        """Admit it, stopping offline work when that makes it fit. False: it keeps its place, and
        none is admitted before it."""
        if self._must_wait(request):
            return True
        match = self._view.match(request)
        at_most = self._online_tokens(request, match.cached)
        if not self._admit(request, match, at_most):
            if at_most > 0:
                for victim in self._victims_for(request, match, at_most):
                    self._preempt(victim)
            return self._admit(request, match, at_most)
        return True

    def _victims_for(self, request: Request, match: Match, at_most: int) -> list[Request]:
        """The fewest offline requests, youngest first, whose stop admits an online one; none when
        stopping all of them would not do."""
        trial = self._budget.fork()
        chosen: list[Request] = []
        for victim in self._victims():
            reason = trial.refusal(request, match, at_most=at_most)
            if reason is None:
                return chosen
            if reason is SkipReason.UNFINISHED_PREFILL or (
                reason is SkipReason.TOKEN_BUDGET and self._prefill
            ):
                return []  # what is in the way is online
            trial.refund_preemption(victim)
            chosen.append(victim)
        return chosen if trial.refusal(request, match, at_most=at_most) is None else []

    def _victims(self) -> list[Request]:
        """Offline requests that may be stopped: an unfinished prefill, then the youngest."""
        running = [r for r in self._running_offline().requests if r.traits.can_stop]
        running.sort(key=_ARRIVAL, reverse=True)
        return [
            r
            for r in self._view.unfinished
            if r.request_class is RequestClass.OFFLINE
            and r.traits.can_stop
            and not self._is_stopped(r)
        ] + running

    def _running_offline(self) -> Decodes:
        """Those that are not stopped."""
        stopped = self._preempted
        if not stopped:
            return self._offline
        return Decodes.of([r for r in self._offline.requests if r.rid not in stopped])

    def _is_stopped(self, request: Request) -> bool:
        return request.rid in self._preempted

    def _admit(self, request: Request, match: Match, at_most: int) -> bool:
        if at_most <= 0:
            self._skipped[request.rid] = SkipReason.LATENCY_BUDGET
            return False
        reason = self._budget.refusal(request, match, at_most=at_most)
        if reason is not None:
            self._skipped[request.rid] = reason
            return False
        num_tokens = self._budget.chunk(
            request, match.cached, at_most=at_most, num_loaded=match.host
        )
        self._budget.charge_admission(request, match, num_tokens)
        self._take(request, num_tokens, match.cached)
        self._skipped.pop(request.rid, None)
        return True

    def _take(self, request: Request, num_tokens: int, num_cached: int) -> None:
        self._prefill[request.rid] = num_tokens
        self._time.add_prefill(num_tokens, num_cached)

    def _preempt(self, request: Request) -> None:
        self._preempted[request.rid] = Preemption(rid=request.rid)
        self._budget.refund_preemption(request)

    def _keep_one_running(self) -> None:
        """An iteration without any work would be taken for idleness: the oldest decodes."""
        if not self._held or self._prefill:
            return
        running = [r for r in self._view.running if not self._is_stopped(r)]
        if all(r.rid in self._held for r in running):
            oldest = min(running, key=lambda r: r.arrival_seq)
            self._held.discard(oldest.rid)


_ARRIVAL = attrgetter("arrival_seq")

_LEAST_CHUNK = 16
"""Prompt tokens that are worth a forward of their own, where a prompt does not end in fewer."""

_LEAST_PROGRESS = 64
"""Prompt tokens that an iteration without any other work computes, however long that may take."""

_LEAST_SHARED = 64
"""Tokens that are worth waiting for another request to compute them."""


def _num_tokens(request: Request) -> int:
    return request.num_prompt_tokens + request.num_output_tokens
