"""A policy of one's own: offline requests run only while there is no chat.

docs/policies.md explains it.

cosched serve --cosched-policy own_policy:IdleOnly ...     from the folder that holds this file
"""

import sys
from itertools import chain

from cosched.core.plan import Plan
from cosched.core.request import RequestClass
from cosched.core.view import View
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder


class IdleOnly:
    """offline requests run only while no online request waits or runs"""

    initial = None  # nothing is carried from one plan to the next

    def __init__(self, settings: PolicySettings) -> None:
        """`settings` holds the engine's limits and the targets; this needs none."""

    def plan(self, view: View, state: None) -> tuple[Plan, None]:
        builder = PlanBuilder(view)  # plan and ledger in one: what it accepts, the engine runs
        under_way = [*view.running, *view.unfinished]
        is_busy = any(r.request_class is RequestClass.ONLINE for r in chain(view.online, under_way))
        if is_busy:  # preempted requests keep their KV in the radix tree, and resume from there
            for request in under_way:
                if request.request_class is RequestClass.OFFLINE and request.traits.can_preempt:
                    builder.preempt(request)
        for request in builder.unfinished():  # `build` preempts those that do not continue
            builder.continue_prefill(request, sys.maxsize)
        for request in chain(view.online, () if is_busy else view.offline_order()):
            if (reason := view.why_blocked(request)) is not None:
                builder.skip(request, reason)
            elif not builder.admit(request, view.match(request), sys.maxsize):
                break  # in order: no request overtakes
        return builder.build(), None
