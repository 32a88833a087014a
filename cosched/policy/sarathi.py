"""Sarathi++: chunked prefill in two phases, online first (HyGen §5.1, the SLO-unaware baseline).

Idea         every iteration has a fixed token budget. Running requests decode, then online prefill
             takes what it needs, then offline prefill fills the rest in chunks.
Assumptions  prefill and decode share an iteration (mixed batches); the token budget was chosen so
             that a full iteration keeps the TPOT target.
Good         simple, no model of the hardware.
Bad          tokens are not time: a hundred offline decodes or one long offline context stretch
             every online token gap, and nothing here notices.
Parameters   token budget of an iteration [tokens]: the engine's ``--chunked-prefill-size``.

Online requests are admitted oldest first. Where request slots or KV memory are missing for one,
running offline requests are stopped, youngest first, with their KV kept in the radix tree; an
unfinished offline prefill is stopped when the online request needs its place. Offline work is taken
in the pool's order, running before waiting.

Deviations from HyGen's Algorithm 1 without its latency budget: admission counts the output a
request may still generate (SGLang's rule), not only its prompt; and offline requests are also
stopped when the decodes themselves would not fit in memory.
"""

from __future__ import annotations

from cosched.core.budget import IterationBudget
from cosched.core.plan import Plan, Preemption, SkipReason
from cosched.core.request import Request, RequestClass
from cosched.core.view import Match, View

__all__ = ["SarathiPolicy"]


class SarathiPolicy:
    """Two phases over one token budget. See the module's docstring."""

    def plan(self, view: View) -> Plan:
        return _Draft(view).build()


class _Draft:
    """A plan under construction: the ledger and what was decided so far."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._budget = IterationBudget(view)
        self._prefill: dict[str, int] = {}
        self._preempted: dict[str, Preemption] = {}
        self._skipped: dict[str, SkipReason] = {}

    def build(self) -> Plan:
        self._make_room_for_decodes()
        if self._online_phase():
            self._offline_phase()
        for request in self._view.unfinished:
            if request.rid not in self._prefill and request.rid not in self._preempted:
                self._preempt(request)
        return Plan(
            prefill=self._prefill,
            preempt=tuple(self._preempted.values()),
            skipped=self._skipped,
        )

    def _online_phase(self) -> bool:
        """Admit online requests. False: one still waits, so no offline work may start."""
        for request in self._view.unfinished:
            if request.request_class is RequestClass.ONLINE:
                self._continue_online(request)
        return all(self._admit_online(request) for request in self._view.online)

    def _offline_phase(self) -> None:
        for request in self._view.unfinished:
            if request.request_class is RequestClass.OFFLINE and not self._is_stopped(request):
                num_tokens = self._budget.continuation(request)
                if num_tokens > 0:
                    self._budget.charge_continuation(request, num_tokens)
                    self._prefill[request.rid] = num_tokens
        for request in self._view.offline:
            if not self._admit(request, self._view.match(request)):
                break

    def _make_room_for_decodes(self) -> None:
        """Stop offline requests until every remaining one can write its next token."""
        kv = self._view.kv
        page = self._view.caps.page_size
        available = kv.free + kv.evictable
        if available >= len(self._view.running) * page:
            return
        need = sum(page for r in self._view.running if r.num_computed_tokens % page == 0)
        for victim in self._victims():
            if need <= available:
                break
            available += self._view.preemption_gain(victim)
            need -= page if victim.num_computed_tokens % page == 0 else 0
            self._preempt(victim)

    def _continue_online(self, request: Request) -> None:
        for victim in self._victims():
            if self._budget.continuation(request) > 0:
                break
            self._preempt(victim)
        # The engine never drops an online prefill halfway: it goes on even where memory is short.
        num_tokens = self._budget.chunk(request, request.num_computed_tokens)
        if num_tokens > 0:
            self._budget.charge_continuation(request, num_tokens)
            self._prefill[request.rid] = num_tokens

    def _admit_online(self, request: Request) -> bool:
        """Admit it, stopping offline work when that makes it fit."""
        match = self._view.match(request)
        if not self._admit(request, match):
            for victim in self._victims_for(request, match):
                self._preempt(victim)
            return self._admit(request, match)
        return True

    def _victims_for(self, request: Request, match: Match) -> list[Request]:
        """The fewest offline requests, youngest first, whose stop admits an online one; none when
        stopping all of them would not do."""
        trial = self._budget.fork()
        chosen: list[Request] = []
        for victim in self._victims():
            reason = trial.refusal(request, match)
            if reason is None:
                return chosen
            if reason is SkipReason.UNFINISHED_PREFILL or (
                reason is SkipReason.TOKEN_BUDGET and self._prefill
            ):
                return []  # what is in the way is online
            trial.refund_preemption(victim)
            chosen.append(victim)
        return chosen if trial.refusal(request, match) is None else []

    def _victims(self) -> list[Request]:
        """Offline requests that may be stopped: an unfinished prefill, then the youngest."""
        running = [
            r
            for r in self._view.running
            if r.request_class is RequestClass.OFFLINE and not self._is_stopped(r)
        ]
        running.sort(key=lambda r: -r.arrival_seq)
        return [
            r
            for r in self._view.unfinished
            if r.request_class is RequestClass.OFFLINE and not self._is_stopped(r)
        ] + running

    def _is_stopped(self, request: Request) -> bool:
        return request.rid in self._preempted

    def _admit(self, request: Request, match: Match) -> bool:
        reason = self._budget.refusal(request, match)
        if reason is not None:
            self._skipped[request.rid] = reason
            return False
        num_tokens = self._budget.chunk(request, match.cached)
        self._budget.charge_admission(request, match, num_tokens)
        self._prefill[request.rid] = num_tokens
        self._skipped.pop(request.rid, None)
        return True

    def _preempt(self, request: Request) -> None:
        self._preempted[request.rid] = Preemption(rid=request.rid)
        self._budget.refund_preemption(request)
