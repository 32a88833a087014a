"""A plan is checked against the engine's limits before anything is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from cosched.core.plan import Plan, PreemptMode
from cosched.core.request import Request, RequestClass
from cosched.core.view import View
from cosched.errors import PlanError
from cosched.schedule.builder import mixes
from cosched.schedule.ledger import Ledger
from cosched.schedule.preemption import can_copy


class _Named(NamedTuple):
    """The requests that a plan names, by rid.

    waits       those that it promises KV; None: it does not wait
    running     those that run
    unfinished  all prefills that are unfinished
    """

    waits: Mapping[str, Request | None]
    running: Mapping[str, Request]
    unfinished: Mapping[str, Request]

    def under_way(self, rid: str) -> Request | None:
        return self.running.get(rid) or self.unfinished.get(rid)


def validate(plan: Plan, view: View) -> None:
    """PlanError names the limit that a plan breaks; one that passes is applied whole. O(requests
    named in the plan).

    Everything the plan spends is spent again on a ledger of its own.
    """
    _check_late(plan, view)
    if not all(map(math.isfinite, plan.limits.values())):
        raise PlanError(f"a limit that is no number of seconds: {dict(plan.limits)}")
    if plan.decodes and not (
        plan.prefill or plan.preempt or plan.paused or plan.promise or plan.loans
    ):
        return
    _check_caps(plan, view)
    unfinished = {request.rid: request for request in view.unfinished}
    waits = {rid: view.waiting(rid) for rid in plan.promise}
    running = view.running_named(_running_ones(plan, waits))
    named = _Named(waits, running, unfinished)
    ledger = Ledger(view)
    preempted = _replay_preemptions(plan, ledger, named)
    _replay_promises(plan, view, ledger, named, preempted)
    _replay_pauses(plan, view, ledger, running, preempted)
    for rid in unfinished if plan.prefill else ():
        if rid not in plan.prefill and rid not in preempted:
            raise PlanError(
                f"unfinished prefill {rid} is neither continued nor preempted while others are "
                "prefilled"
            )
    for rid, num_tokens in plan.prefill.items():
        if num_tokens <= 0:
            raise PlanError(f"prefill of {rid} is {num_tokens} tokens; it must be at least 1")
        if rid in preempted:
            raise PlanError(f"preempted and prefilled at once: {rid}")
        if rid in unfinished:
            _replay_continuation(unfinished[rid], num_tokens, ledger)
        else:
            _replay_admission(rid, num_tokens, view, ledger)
    _check_decodes(plan, view, ledger, preempted)


def _running_ones(plan: Plan, waits: Mapping[str, Request | None]) -> set[str]:
    """rids of a plan that may be of running requests."""
    rids = {rid for rid, request in waits.items() if request is None}
    rids.update(plan.paused, plan.loans, (loan.lender for loan in plan.loans.values()))
    rids.update(preemption.rid for preemption in plan.preempt)
    return rids


def _check_late(plan: Plan, view: View) -> None:
    for rid in plan.late:
        request = view.waiting(rid) or next((r for r in view.unfinished if r.rid == rid), None)
        if request is None or request.request_class is not RequestClass.ONLINE:
            raise PlanError(f"late, but no online request that waits for its first token: {rid}")


def _check_caps(plan: Plan, view: View) -> None:
    caps = view.caps
    if plan.promise and not caps.promises:
        raise PlanError(f"promises KV, but the engine keeps its own reserve: {dict(plan.promise)}")
    if plan.loans and not caps.promises:
        raise PlanError(f"lends KV, but the engine keeps its own reserve: {[*plan.loans]}")
    if not can_copy(view):
        copied = [p.rid for p in plan.preempt if p.mode is PreemptMode.CHECKPOINT]
        if copied:
            raise PlanError(f"there is no host memory for the KV of {sorted(copied)}")


def _replay_preemptions(plan: Plan, ledger: Ledger, named: _Named) -> set[str]:
    preempted: set[str] = set()
    for preemption in plan.preempt:
        rid = preemption.rid
        if rid in preempted:
            raise PlanError(f"a request is preempted twice: {rid}")
        request = named.under_way(rid)
        if request is None:
            raise PlanError(f"preempted but not running: {rid}")
        if not request.traits.can_preempt:
            raise PlanError(f"preempted, but it cannot be: {rid}")
        preempted.add(rid)
        ledger.refund_preemption(request)
    return preempted


def _replay_promises(
    plan: Plan, view: View, ledger: Ledger, named: _Named, preempted: set[str]
) -> None:
    """Before anything is admitted: a promise that is taken back frees memory for another."""
    before = ledger.kv.headroom
    for rid, num_tokens in plan.promise.items():
        request = named.waits[rid] or named.under_way(rid)
        if request is None:
            raise PlanError(f"promised KV, but it neither runs nor waits: {rid}")
        if not 0 <= num_tokens <= request.max_new_tokens:
            raise PlanError(
                f"{rid} is promised {num_tokens} output tokens; it may generate "
                f"{request.max_new_tokens}"
            )
        if named.waits[rid] is not None:
            ledger.kv.promises[rid] = num_tokens  # and charged when it is admitted
        else:
            ledger.kv.promise(request, num_tokens)
    for rid, loan in plan.loans.items():
        borrower, lender = (
            None if name in preempted else named.running.get(name) for name in (rid, loan.lender)
        )
        if borrower is None or lender is None:
            raise PlanError(f"borrows of {loan.lender}, but not both are running: {rid}")
        if rid in plan.promise or loan.lender in plan.loans:
            raise PlanError(f"borrows of {loan.lender}, and is promised KV or lends itself: {rid}")
        ends_at = plan.promise.get(loan.lender, view.promised(lender)) or 0
        if not lender.num_output_tokens < loan.offset <= ends_at:
            raise PlanError(
                f"borrows of {loan.lender} up to its output token {loan.offset}; that one has "
                f"{lender.num_output_tokens} of {ends_at} promised: {rid}"
            )
        ledger.kv.promise(borrower, borrower.num_output_tokens)
    if ledger.kv.headroom < min(before, 0):
        raise PlanError(f"promises {-ledger.kv.headroom} KV tokens more than there are")


def _replay_pauses(
    plan: Plan, view: View, ledger: Ledger, running: Mapping[str, Request], preempted: set[str]
) -> None:
    if over := plan.paused.difference(running) | plan.paused & preempted:
        raise PlanError(f"paused but not running: {min(over)}")
    held = [running[rid] for rid in plan.paused]
    if bound := view.cannot_pause(held):
        raise PlanError(f"paused, but its decode cannot pause now: {bound[0].rid}")
    ledger.refund_pauses(held)
    num_running = len(view.running) - len(preempted & running.keys())
    if plan.paused and not plan.prefill and len(plan.paused) == num_running:
        raise PlanError("all running requests are paused and nothing is prefilled")


def _replay_continuation(request: Request, num_tokens: int, ledger: Ledger) -> None:
    fitting = ledger.chunk(request, None, at_most=num_tokens)
    if fitting != num_tokens or not ledger.may_continue:
        raise PlanError(f"prefill of {request.rid} is {num_tokens} tokens; {fitting} fit")
    ledger.charge_continuation(request, num_tokens)


def _replay_admission(rid: str, num_tokens: int, view: View, ledger: Ledger) -> None:
    request = view.waiting(rid)
    if request is None:
        raise PlanError(f"prefilled, but it neither waits nor is unfinished: {rid}")
    match = view.match(request)
    reason = ledger.refusal(request, match, at_most=num_tokens)
    if reason is not None:
        raise PlanError(
            f"admitted with {num_tokens} tokens, but there is no room: {rid} ({reason.value})"
        )
    fitting = ledger.chunk(request, match, at_most=num_tokens)
    if fitting != num_tokens:
        raise PlanError(f"prefill of {rid} is {num_tokens} tokens; {fitting} fit")
    ledger.charge_admission(request, match, num_tokens)


def _check_decodes(plan: Plan, view: View, ledger: Ledger, preempted: set[str]) -> None:
    if not plan.prefill:
        if not plan.decodes:
            raise PlanError("nothing decodes and nothing is prefilled")
        return
    if plan.decodes != mixes(view, ledger, preempted | plan.paused):
        raise PlanError(
            "prefill and decodes cannot share the iteration"
            if plan.decodes
            else "running requests decode beside this prefill; those that must not are paused"
        )
