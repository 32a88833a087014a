"""A policy of one's own: offline requests run only while nobody chats.

docs/policies/own_policy.md explains it.

cosched serve --cosched-policy own_policy:IdleOnly ...     from the folder that holds this file
"""

from itertools import chain

from cosched.core.budget import IterationBudget
from cosched.core.plan import Plan, Preemption
from cosched.core.request import RequestClass
from cosched.core.view import View
from cosched.policy.base import PolicySettings


class IdleOnly:
    """offline requests run only while no online request waits or runs"""

    def __init__(self, settings: PolicySettings) -> None:
        """`settings` holds the engine's limits, the targets and a predictor; this needs none."""

    def plan(self, view: View) -> Plan:
        budget = IterationBudget(view)  # the ledger: knows what the engine will accept
        prefill, preempt, skipped = {}, [], {}
        under_way = [*view.running, *view.unfinished]
        is_busy = any(r.request_class is RequestClass.ONLINE for r in chain(view.online, under_way))
        if is_busy:  # stopped requests keep their KV in the radix tree, and resume where they were
            for request in under_way:
                if request.request_class is RequestClass.OFFLINE:
                    preempt.append(Preemption(rid=request.rid))
                    budget.refund_preemption(request)
        stopped = {stop.rid for stop in preempt}
        for request in view.unfinished:  # go on with it, or stop it: one of the two is a must
            if request.rid in stopped:
                continue
            if num_tokens := budget.continuation(request):
                budget.charge_continuation(request, num_tokens)
                prefill[request.rid] = num_tokens
            else:
                preempt.append(Preemption(rid=request.rid))
                budget.refund_preemption(request)
        for request in chain(view.online, () if is_busy else view.offline):
            match = view.match(request)
            if reason := budget.refusal(request, match):
                skipped[request.rid] = reason
                break
            prefill[request.rid] = num_tokens = budget.chunk(request, match.cached)
            budget.charge_admission(request, match, num_tokens)
        return Plan(prefill=prefill, preempt=tuple(preempt), skipped=skipped)
