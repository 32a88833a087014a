"""The rule that plans where a policy cannot: nothing in it depends on time, order or estimates.

Idea         running requests decode; an unfinished prefill continues, or is preempted if it does
             not fit; waiting online requests are admitted in order of arrival, within the engine's
             limits. Offline requests are admitted only while there is no online request, so that a
             job ends even where the rule stays.
Bad          keeps no target, and preempts nothing for an online request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cosched.core.plan import EMPTY_PLAN, Plan
from cosched.core.request import Request, RequestClass
from cosched.core.view import View
from cosched.schedule.builder import PlanBuilder


class SafePolicy:
    """See the module's docstring."""

    initial = None

    def plan(self, view: View, state: None) -> tuple[Plan, None]:
        rules = view.rules
        if rules.must_decode and not rules.mixed and view.running:
            return EMPTY_PLAN, None
        builder = PlanBuilder(view)
        for request in view.unfinished:
            if not builder.continue_prefill(request, sys.maxsize):
                if not request.traits.can_preempt:
                    return EMPTY_PLAN, None
                builder.preempt(request)
        waiting: Iterable[Request] = view.online
        if not view.running_of(RequestClass.ONLINE).requests and not any(True for _ in waiting):
            waiting = view.offline_order()
        for request in waiting:
            if (reason := view.why_blocked(request)) is not None:
                builder.skip(request, reason)
            elif not builder.admit(request, view.match(request), sys.maxsize):
                break
        return builder.build(), None
