"""A plan is checked against the engine's limits before anything is done."""

from __future__ import annotations

from cosched.core.plan import Plan
from cosched.core.view import View
from cosched.errors import PlanError

__all__ = ["validate"]


def validate(plan: Plan, view: View) -> None:
    """PlanError names the limit a plan breaks. O(requests named in the plan)."""
    if not (plan.prefill or plan.preempt or plan.hold or view.unfinished):
        return
    stopped = {preemption.rid for preemption in plan.preempt}
    if len(stopped) != len(plan.preempt):
        raise PlanError(f"a request is preempted twice: {[p.rid for p in plan.preempt]}")
    unfinished = {request.rid for request in view.unfinished}
    for rid in unfinished if plan.prefill else ():
        if rid not in plan.prefill and rid not in stopped:
            raise PlanError(
                f"unfinished prefill {rid} is neither continued nor preempted while others are "
                "prefilled"
            )
    if stopped & plan.prefill.keys():
        raise PlanError(f"preempted and prefilled at once: {sorted(stopped & plan.prefill.keys())}")
    if stopped:
        for request in (*view.unfinished, *view.running):
            if request.rid in stopped and not request.traits.can_stop:
                raise PlanError(f"preempted, but it cannot be: {request.rid}")
        unknown = stopped - unfinished - {request.rid for request in view.running}
        if unknown:
            raise PlanError(f"preempted but not running: {sorted(unknown)}")
    for rid, num_tokens in plan.prefill.items():
        if num_tokens <= 0:
            raise PlanError(f"prefill of {rid} is {num_tokens} tokens; it must be at least 1")
        if rid not in unfinished and not view.is_waiting(rid):
            raise PlanError(f"prefilled, but it neither waits nor is unfinished: {rid}")
    if plan.hold:
        if not view.rules.partial:
            raise PlanError(f"held, but the batch cannot be divided now: {sorted(plan.hold)}")
        running = {request.rid for request in view.running}
        absent = set(plan.hold) - (running - stopped)
        if absent:
            raise PlanError(f"held but not running: {sorted(absent)}")
        if not plan.prefill and len(plan.hold) + len(stopped & running) == len(running):
            raise PlanError("all running requests are held and nothing is prefilled")
