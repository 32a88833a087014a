"""The rule that plans where a policy cannot: nothing in it depends on time, order or belief.

Idea         what runs decodes; an unfinished prefill goes on, or is stopped where there is no room;
             waiting online requests are admitted in the order in which they came, as far as the
             engine's limits allow. Offline requests are admitted only while no online request is
             there, so that a job ends even where the rule stays.
Bad          keeps no target, and nothing is stopped for an online request.
"""

from __future__ import annotations

from cosched.core.budget import IterationBudget
from cosched.core.plan import EMPTY_PLAN, Plan, Preemption, SkipReason
from cosched.core.request import RequestClass
from cosched.core.view import View

__all__ = ["SafePolicy"]


class SafePolicy:
    """See the module's docstring."""

    def plan(self, view: View) -> Plan:
        rules = view.rules
        if rules.decodes_due and not rules.mixed and view.running:
            return EMPTY_PLAN
        budget = IterationBudget(view)
        prefill: dict[str, int] = {}
        preempt: list[Preemption] = []
        skipped: dict[str, SkipReason] = {}
        for request in view.unfinished:
            num_tokens = budget.continuation(request)
            if num_tokens > 0:
                budget.charge_continuation(request, num_tokens)
                prefill[request.rid] = num_tokens
            elif request.traits.can_stop:
                budget.refund_preemption(request)
                preempt.append(Preemption(rid=request.rid))
            else:
                return EMPTY_PLAN
        waiting = view.online
        if not view.running_of(RequestClass.ONLINE).requests and not any(True for _ in waiting):
            waiting = view.offline
        for request in waiting:
            if view.is_barred(request):
                skipped[request.rid] = SkipReason.ENGINE_REFUSED
                continue
            match = view.match(request)
            reason = budget.refusal(request, match)
            if reason is not None:
                skipped[request.rid] = reason
                break
            num_tokens = budget.chunk(request, match.cached, num_loaded=match.host)
            budget.charge_admission(request, match, num_tokens)
            prefill[request.rid] = num_tokens
        return Plan(prefill=prefill, preempt=tuple(preempt), skipped=skipped)
