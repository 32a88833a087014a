"""BROS: deadlines token by token, and online work that steps aside for offline work (§4).

Idea         every online request has a residual time: how long its next token may still take. The
             least of them bounds the iteration. Online requests are packed by residual time,
             offline ones are added in the rest, and where the batch or the time is full the
             online request with most time to spare changes places with an offline one.
Assumptions  the predictor knows how long a batch takes before it runs; prefill and decode share an
             iteration; a running request can pause for an iteration with its KV kept.
Good         single gaps are short and not only their mean; a crowd of chats is served by urgency.
Bad          a request that ran ahead lends nothing: every gap is measured from its last token. The
             order of late requests is literally by lateness, which under overload makes those late
             that still had time (`late_last`). No prefix order, no look at the memory of later
             iterations.
Parameters   TTFT and TPOT targets [s], per request or the server's; `Budgets.idle_share`,
             `BrosConfig`; `BrosOptions` for the ablations.

Steps (Alg. 1): `ResidualOrder` (lines 3 and 4), `take_online` (5 to 14), `add_offline` (15 to 33).
B, the most requests in an iteration, doubles after one in which all online requests fit, up to the
request slots, and is 128 again after another (the early return).

Deviations from the paper, with reasons: docs/policies.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from cosched.core.plan import Plan, PreemptMode
from cosched.core.request import RequestClass
from cosched.core.view import View
from cosched.papers.bros.offline import add_offline
from cosched.papers.bros.packing import Packing, take_online
from cosched.papers.bros.residual_order import ResidualOrder
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import Steps, make_room_for_decodes, preempt_beyond_limit

BASE_SIZE = 128
"""Requests in an iteration at first and after an early return (§4.2, B_base)."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """The state between two plans.

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
    stop       how requests are preempted; None: what costs least
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

    def plan(self, view: View, state: Pressure) -> tuple[Plan, Pressure]:
        options, most = self._options, view.caps.max_running_requests
        builder = PlanBuilder(view, stop=options.stop)
        preempt_beyond_limit(builder, Steps())
        make_room_for_decodes(builder, Steps())
        order = ResidualOrder(builder, self._settings, late_last=options.late_last)
        size = min(state.batch_size, most)
        packing = Packing(builder, order, most=size, replaces=options.replaces)
        take_online(packing, order)
        num_passed = state.num_passed
        if options.beside or not order.entries:
            num_passed = add_offline(packing, num_passed)
        elif view.rules.partial:
            offline = builder.running_of(RequestClass.OFFLINE)
            packing.pause(offline.requests, offline.contexts.tolist())
        batch_size = BASE_SIZE if packing.is_early else min(2 * state.batch_size, most)
        limits = {"online": packing.online_s, "offline": packing.offline_s}
        limits = {phase: limit_s for phase, limit_s in limits.items() if limit_s < math.inf}
        plan = packing.builder.build(limits=limits)
        return plan, Pressure(batch_size=batch_size, num_passed=num_passed)
