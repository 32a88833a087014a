"""Sarathi++: chunked prefill in two phases, online first (HyGen §5.1, the SLO-unaware baseline).

Idea         every iteration has a fixed token budget. Running requests decode, then online prefill
             takes what it needs, then offline prefill fills the rest in chunks.
Assumptions  prefill and decode share an iteration (mixed batches); the token budget was chosen so
             that a full iteration keeps the TPOT target.
Good         simple, no model of the hardware.
Bad          tokens are not time: a hundred offline decodes or one long offline context stretch
             every online token gap.
Parameters   token budget of an iteration [tokens]: the engine's ``--chunked-prefill-size``.

Deviations from HyGen's Algorithm 1 without its latency budget: admission counts the output a
request may still generate (SGLang's rule), not only its prompt; and offline requests are also
stopped when the decodes themselves would not fit in memory. Who is preempted: `victims`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from cosched.core.plan import Plan
from cosched.core.request import RequestClass
from cosched.core.view import View
from cosched.papers.hygen.victims import largest_of_latest
from cosched.schedule.base import UNLIMITED
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import Steps, admit_in_order, two_phases

_STEPS = Steps(victims=largest_of_latest)


class SarathiPolicy:
    """Two phases over one token budget. See the module's docstring and `phases`."""

    initial = None

    def __init__(self, steps: Steps = _STEPS) -> None:
        self._steps = steps

    def plan(self, view: View, state: None) -> tuple[Plan, None]:
        return _build(view, self._steps), None


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The time for which offline requests have been waiting without a break.

    since_s       when it began [s]; None: none wait
    num_admitted  requests admitted for the first time since then
    last          of these, requests that the last plan admits: the engine may have refused them
    """

    since_s: float | None = None
    num_admitted: int = 0
    last: tuple[str, ...] = ()


class ThrottledPolicy:
    """The same with a limit on offline requests admitted per second: HyGen* (HyGen §5.1). The
    SLO-aware profiler finds the rate."""

    initial = Backlog()

    def __init__(self, offline_rate: float) -> None:
        """offline_rate: most offline requests admitted per second while some wait [1/s]."""
        self._offline_rate = offline_rate

    def plan(self, view: View, state: Backlog) -> tuple[Plan, Backlog]:
        if not view.num_offline:
            return _build(view, Steps()), self.initial
        since_s = view.now_s if state.since_s is None else state.since_s
        num_refused = sum(1 for rid in state.last if _waits_unserved(view, rid))
        num_admitted = state.num_admitted - num_refused
        due = 1 + int(self._offline_rate * (view.now_s - since_s))
        most = max(due - num_admitted, 0)
        admit = partial(admit_in_order, most=most)
        plan = _build(view, replace(_STEPS, admit=admit))
        last = tuple(rid for rid in plan.prefill if _waits_unserved(view, rid))
        return plan, Backlog(since_s=since_s, num_admitted=num_admitted + len(last), last=last)


def _build(view: View, steps: Steps) -> Plan:
    builder = PlanBuilder(view)
    builder.ledger.add_decodes(view.running_of(RequestClass.ONLINE).contexts)
    two_phases(builder, UNLIMITED, steps)
    return builder.build()


def _waits_unserved(view: View, rid: str) -> bool:
    """An offline request that waits and never ran."""
    request = view.waiting(rid)
    return (
        request is not None
        and request.request_class is RequestClass.OFFLINE
        and not request.num_preemptions
    )
