"""A plan under construction. Policies are composed of its steps.

Each step updates plan and ledger together, so the plan fits the limits; `build` adds what the
engine requires.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import partial

import numpy as np

from cosched.core.batch import IntArray
from cosched.core.kv_state import Match
from cosched.core.plan import Loan, Plan, Preemption, PreemptMode, SkipReason
from cosched.core.request import LateReason, Request, RequestClass, num_tokens_of
from cosched.core.view import Decodes, View
from cosched.memory.kv_forecast import KvForecast
from cosched.schedule.ledger import Ledger
from cosched.schedule.media import tokens_with_media
from cosched.schedule.preemption import preempt_mode

__all__ = ["PlanBuilder", "mixes"]


class PlanBuilder:
    """Admit, continue, pause, preempt and exchange requests; then `build`.

    Running requests decode unless they are paused (`pause`) or preempted. Their time counts once
    `ledger.add_decodes` names them, so a policy decides in which order time is given out.
    """

    def __init__(
        self,
        view: View,
        *,
        stop: PreemptMode | None = None,
        forecast: KvForecast | None = None,
        tiers: Collection[int] | None = None,
    ) -> None:
        """stop: default mode of `preempt`; None: the cheapest (`preempt_mode`). forecast: admission
        by expected lengths; None: by the engine's rule, or by promises. tiers: those that are
        served; running requests of others are set aside: they do not count as online ones and
        decode in what these leave. None: tiers do not count."""
        self.view = view
        self.online = view.running_of(RequestClass.ONLINE)
        """Running online requests that are not set aside."""
        self._tiers = tiers
        self._aside = Decodes()
        if tiers is not None:
            self.online, self._aside = _divided(self.online, tiers)
        self._stop = stop
        self.ledger = Ledger(view, forecast=forecast)
        self.prefill: dict[str, int] = {}
        """rid -> prompt tokens to compute."""
        self.paused: set[str] = set()
        self.skipped: dict[str, SkipReason] = {}
        self.loans: dict[str, Loan] = {}
        self._preempted: dict[str, Preemption] = {}
        self._left: dict[RequestClass, Decodes] = {}
        """Of each class, those that are not preempted; once they are asked for."""
        self.counts_all_decodes = False
        """The ledger has the time of all decodes (`count_fixed_decodes`)."""

    def fork(self) -> PlanBuilder:
        """A copy for a trial. O(requests in the plan)."""
        other = object.__new__(PlanBuilder)
        other.view = self.view
        other.online, other._aside, other._tiers = self.online, self._aside, self._tiers
        other._stop = self._stop
        other.ledger = self.ledger.fork()
        other.prefill = self.prefill.copy()
        other.paused = self.paused.copy()
        other.skipped = self.skipped.copy()
        other.loans = self.loans.copy()
        other._preempted, other._left = self._preempted.copy(), self._left.copy()
        other.counts_all_decodes = self.counts_all_decodes
        return other

    def count_fixed_decodes(self) -> None:
        """Count the time of the offline decodes, if none of them can pause: they run whatever else
        the iteration does, unless they are preempted."""
        view = self.view
        if not view.rules.partial and not view.caps.shared_prefix:
            self.counts_all_decodes = True
            self.ledger.add_decodes(view.running_of(RequestClass.OFFLINE).contexts)
            self.ledger.add_decodes(self._aside.contexts)

    def running_of(self, request_class: RequestClass) -> Decodes:
        """Running requests of one class that are not preempted, paused ones included."""
        if not self._preempted:
            return self.view.running_of(request_class)
        left = self._left.get(request_class)
        if left is None:
            left = self._without_preempted(self.view.running_of(request_class))
            self._left[request_class] = left
        return left

    def is_aside(self, request: Request) -> bool:
        """True if it is an online request of a tier that is set aside."""
        if self._tiers is None or request.request_class is RequestClass.OFFLINE:
            return False
        return request.tier not in self._tiers

    def aside(self) -> Decodes:
        """Running online requests that are set aside and not preempted."""
        return self._without_preempted(self._aside)

    def below(self, tier: int) -> list[Request]:
        """Running online requests of lower tiers that may be preempted, the lowest and youngest
        first; none where tiers do not count."""
        if self._tiers is None:
            return []
        running = self.running_of(RequestClass.ONLINE).requests
        lower = [r for r in running if r.tier > tier and r.traits.can_preempt]
        return sorted(lower, key=lambda r: (r.tier, r.arrival_seq), reverse=True)

    def _without_preempted(self, decodes: Decodes) -> Decodes:
        return decodes.where([r.rid not in self._preempted for r in decodes.requests])

    def reads_of(self, decodes: Decodes) -> IntArray:
        """For each running request the KV tokens that its next decode reads. Tokens of a shared
        prefix that the engine reads once count for one of its requests."""
        if not self.view.caps.shared_prefix:
            return decodes.contexts
        shared = [self.view.num_shared(request) for request in decodes.requests]
        return decodes.contexts - np.array(shared, dtype=np.int64)

    def unfinished(self) -> Iterator[Request]:
        """Unfinished prefills that are not preempted."""
        for request in self.view.unfinished:
            if request.rid not in self._preempted:
                yield request

    def preempts_online_prefill(self) -> bool:
        """True if admitting a request now would preempt an unfinished online prefill
        (`preempt_unfinished`), which the plan neither continues nor preempts."""
        return not self.prefill and any(
            request.request_class is RequestClass.ONLINE for request in self.unfinished()
        )

    def num_offline_admitted(self) -> int:
        waiting = map(self.view.waiting, self.prefill)
        return sum(r is not None and r.request_class is RequestClass.OFFLINE for r in waiting)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    def is_preempted(self, request: Request) -> bool:
        return request.rid in self._preempted

    def decodes_any(self) -> bool:
        """True if some running request is neither paused nor preempted."""
        held, preempted = self.paused, self._preempted
        if len(held) + len(preempted) < len(self.view.running):
            return True
        return any(r.rid not in held and r.rid not in preempted for r in self.view.running)

    def runs_anything(self) -> bool:
        return bool(self.prefill) or self.decodes_any()

    def skip(self, request: Request, reason: SkipReason) -> None:
        """Note why a request does not run."""
        self.skipped[request.rid] = reason

    def admit(self, request: Request, match: Match, at_most: int) -> bool:
        """Admit a waiting request with up to `at_most` prompt tokens. False: it does not fit, and
        the reason is noted, `SkipReason.LATENCY_BUDGET` if `at_most` is too small. match: its
        `View.match`."""
        if at_most <= 0:
            self.skip(request, SkipReason.LATENCY_BUDGET)
            return False
        ledger = self.ledger
        reason = ledger.refusal(request, match, at_most=at_most)
        if reason is not None:
            if reason is SkipReason.TOKEN_BUDGET and ledger.refusal(request, match) is None:
                reason = SkipReason.LATENCY_BUDGET  # fewer than a page, or than one in a piece
            self.skip(request, reason)
            return False
        num_tokens = ledger.chunk(request, match, at_most=at_most)
        ledger.charge_admission(request, match, num_tokens)
        self.prefill[request.rid] = num_tokens
        self.skipped.pop(request.rid, None)
        return True

    def continue_prefill(self, request: Request, at_most: int, *, unreserved: bool = False) -> bool:
        """Compute up to `at_most` more prompt tokens of an unfinished prefill. False: it cannot
        continue, and the reason is noted, `SkipReason.LATENCY_BUDGET` if `at_most` is too small.

        unreserved: memory for the chunk is enough; none is needed for its output
        """
        num_tokens = self.ledger.continuation(request, at_most=at_most, unreserved=unreserved)
        if num_tokens <= 0:
            reason = self.ledger.why_it_stops(request) if at_most > 0 else None
            self.skip(request, reason or SkipReason.LATENCY_BUDGET)
            return False
        self.ledger.charge_continuation(request, num_tokens)
        self.prefill[request.rid] = num_tokens
        self.skipped.pop(request.rid, None)
        return True

    def take(self, request: Request, limit_s: float) -> bool:
        """Add a request if the predicted iteration then takes at most `limit_s`: admit a waiting
        one or continue an unfinished prefill with as much of its prompt as fits, or count the
        decode of a running one. False: it does not fit, and the reason is noted; a running one
        decodes all the same unless it is paused."""
        view, ledger = self.view, self.ledger
        match = None if view.waiting(request.rid) is None else view.match(request)
        if match is None and request not in view.unfinished:
            contexts = (request.num_computed_tokens + 1,)
            if ledger.seconds_with_decodes(contexts) > limit_s:
                self.skip(request, SkipReason.LATENCY_BUDGET)
                return False
            ledger.add_decodes(contexts)
            return True
        num_cached = request.num_computed_tokens if match is None else match.cached
        num_tokens = num_tokens_of(request) - num_cached
        at_most = tokens_with_media(
            request, num_cached, num_tokens, partial(ledger.most_prefill, num_cached, limit_s)
        )
        if match is None:
            return self.continue_prefill(request, at_most)
        return self.admit(request, match, at_most)

    def gap_s(self, request: Request) -> float | None:
        """Time from its latest token to the start of the planned iteration [s]; 0 if it decodes in
        the iteration that is running. None: it has no token yet."""
        if request.num_computed_tokens == num_tokens_of(request):
            return 0.0
        latest_s = request.last_token_s
        return None if latest_s is None else self.view.start_s - latest_s

    def pause(self, request: Request, reason: SkipReason = SkipReason.LATENCY_BUDGET) -> bool:
        """Pause the decode of a running request for this iteration. False: it cannot pause."""
        return not self.pause_all((request,), reason)

    def pause_all(
        self, requests: Sequence[Request], reason: SkipReason = SkipReason.LATENCY_BUDGET
    ) -> list[Request]:
        """Pause the decode of running requests for this iteration. Returns those that cannot
        pause."""
        going = [request for request in requests if request.rid not in self.paused]
        bound = self.view.cannot_pause(going)
        if bound:
            going = [request for request in going if request not in bound]
        self.ledger.refund_pauses(going)
        pausing = dict.fromkeys([request.rid for request in going], reason)
        self.paused.update(pausing)
        self.skipped.update(pausing)
        return [r for r in requests if r.rid not in pausing] if len(going) < len(requests) else []

    def resume(self, request: Request) -> bool:
        """Let a paused request decode. False: prefills have taken its memory, and it stays
        paused."""
        if self.prefill and not self.ledger.can_decode(request):
            return False
        self._resume(request)
        return True

    def _resume(self, request: Request) -> None:
        self.paused.remove(request.rid)
        self.ledger.charge_pause(request)
        del self.skipped[request.rid]

    def preempt(self, request: Request, mode: PreemptMode | None = None) -> None:
        """Preempt a running request or an unfinished prefill. mode: None: the builder's."""
        if mode is None:
            mode = self._stop or preempt_mode(self.view, request)
        if request.rid in self.paused:
            self._resume(request)
        self.loans.pop(request.rid, None)
        for rid in [rid for rid, loan in self.loans.items() if loan.lender == request.rid]:
            del self.loans[rid]
        self._preempted[request.rid] = Preemption(rid=request.rid, mode=mode)
        self._left.clear()
        self.ledger.refund_preemption(request)
        if self.counts_all_decodes and request not in self.view.unfinished:
            self.ledger.drop_decode(request.num_computed_tokens + 1)

    def exchange(self, out: Request, into: Request, at_most: int | None = None) -> bool:
        """Pause a running request in favour of another: a paused one decodes, a waiting one is
        admitted with up to `at_most` prompt tokens (None: all). False: it does not fit, and nothing
        has changed."""
        is_held = into.rid in self.paused
        match = None if is_held else self.view.match(into)
        if match is not None:
            if at_most is None:
                at_most = num_tokens_of(into) - match.cached
            trial = self.ledger.fork()
            trial.refund_pauses((out,))
            if trial.refusal(into, match, at_most=at_most) is not None:
                return False
        if not self.pause(out):
            return False
        if match is None:
            if not self.resume(into):
                self._resume(out)
                return False
            return True
        assert at_most is not None
        return self.admit(into, match, at_most)

    def promise(self, request: Request, num_tokens: int) -> None:
        """Set KV aside for `num_tokens` output tokens of a request, generated ones included, in
        place of the engine's rule and of an earlier promise. A loan ends."""
        self.loans.pop(request.rid, None)
        self.ledger.kv.promise(request, num_tokens)

    def borrow(self, request: Request, lender: Request, offset: int) -> None:
        """Let a running request grow into the KV that is set aside for another one, until that has
        `offset` output tokens (`Plan.loans`). Its own promise ends."""
        self.promise(request, request.num_output_tokens)
        self.loans[request.rid] = Loan(lender=lender.rid, offset=offset)

    def preempt_unfinished(self) -> None:
        """Preempt unfinished prefills that do not continue; if one cannot be preempted nothing is
        prefilled."""
        for request in self.unfinished():
            if request.rid not in self.prefill:
                if request.traits.can_preempt:
                    self.preempt(request)
                else:
                    self.prefill.clear()

    def build(
        self,
        *,
        limits: Mapping[str, float] | None = None,
        late: Mapping[str, LateReason] | None = None,
    ) -> Plan:
        """The plan, with what the engine requires: if anything is prefilled, unfinished prefills
        continue or are preempted; and an iteration has some work."""
        if self.prefill:
            self.preempt_unfinished()
        self._keep_one_running()
        preempted = self._preempted
        return Plan(
            prefill=self.prefill,
            decodes=not self.prefill
            or mixes(self.view, self.ledger, self.paused | preempted.keys()),
            preempt=tuple(preempted.values()),
            paused=frozenset(self.paused),
            promise={r: n for r, n in self.ledger.kv.promises.items() if r not in self.loans},
            loans=self.loans,
            late={} if late is None else late,
            skipped=self.skipped,
            limits={} if limits is None else limits,
        )

    def _keep_one_running(self) -> None:
        """The engine would take an iteration without work for idleness: the oldest request
        decodes."""
        if self.paused and not self.prefill and not self.decodes_any():
            running = [r for r in self.view.running if not self.is_preempted(r)]
            oldest = min(running, key=lambda r: r.arrival_seq)
            self._resume(oldest)


def _divided(decodes: Decodes, tiers: Collection[int]) -> tuple[Decodes, Decodes]:
    """The requests of these tiers, and all others."""
    is_theirs = [request.tier in tiers for request in decodes.requests]
    return decodes.where(is_theirs), decodes.where([not each for each in is_theirs])


def mixes(view: View, ledger: Ledger, idle: Set[str]) -> bool:
    """True if the prefills of a ledger share the iteration with the running requests that are not
    idle. O(1); O(running) if some running requests cannot share one."""
    if not (view.caps.mixed_batches and ledger.prefills_mix):
        return False
    return view.rules.mixed or all(r.traits.can_mix for r in view.running if r.rid not in idle)
