"""Round robin: iterations of online and of offline requests in turn (BROS §2.2, §7).

Idea         two queues, each first come, first served. An iteration has requests of one class:
             those that run decode, and waiting ones are admitted while they fit. The next iteration
             is the other class's.
Assumptions  a running request can pause for an iteration with its KV kept.
Good         neither class starves.
Bad          no target is considered: every online token waits for an offline iteration.
Parameters   none; the engine's token budget bounds an iteration.

Where one class has nothing to do the other one is next. A request is preempted only where the
decodes themselves do not fit, the youngest offline one first. Where the engine cannot pause
decodes, they run in every iteration, and only prefills alternate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from cosched.core.plan import Plan, SkipReason
from cosched.core.request import Request, RequestClass
from cosched.core.view import View
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import (
    Steps,
    make_room_for_decodes,
    must_decode,
    must_wait,
    offline_admissions_left,
    owes_recomputing,
    preempt_beyond_limit,
)


class Turn(msgspec.Struct, frozen=True):
    """offline: the next iteration is the offline requests'."""

    offline: bool = False


class RoundRobinPolicy:
    """See the module's docstring."""

    initial = Turn()

    def plan(self, view: View, state: Turn) -> tuple[Plan, Turn]:
        builder = PlanBuilder(view)
        preempt_beyond_limit(builder, _STEPS)
        make_room_for_decodes(builder, _STEPS)
        served = RequestClass.OFFLINE if state.offline else RequestClass.ONLINE
        other = RequestClass.ONLINE if state.offline else RequestClass.OFFLINE
        trial = builder.fork()
        if not _serve(trial, served, other):
            _serve(builder, other, served)
            return builder.build(), state
        return trial.build(), Turn(offline=not state.offline)


_STEPS = Steps()


def _serve(builder: PlanBuilder, served: RequestClass, other: RequestClass) -> bool:
    """An iteration of one class. False: it has nothing to do."""
    view = builder.view
    running = builder.running_of(served).requests
    held = builder.running_of(other).requests
    if view.rules.partial:
        builder.pause_all(held)
    if not must_decode(builder):
        for request in builder.unfinished():
            if _continues(request, served):
                builder.continue_prefill(request, sys.maxsize, unreserved=True)
        if not (
            builder.preempts_online_prefill()
            or (served is RequestClass.OFFLINE and owes_recomputing(builder))
        ):
            _admit(builder, served)
    return bool(running) or bool(builder.prefill)


def _continues(request: Request, served: RequestClass) -> bool:
    """An unfinished online prefill continues in each iteration: preempted, it would lose what it
    has computed in every other one."""
    return request.request_class in (served, RequestClass.ONLINE) or not request.traits.can_preempt


def _admit(builder: PlanBuilder, served: RequestClass) -> None:
    view = builder.view
    waiting: Iterable[Request] = view.online
    num_left = None
    if served is RequestClass.OFFLINE:
        waiting, num_left = view.offline_order(), offline_admissions_left(builder)
    for request in waiting:
        if must_wait(builder, request):
            continue
        if num_left == 0:
            builder.skip(request, SkipReason.OPERATOR_LIMIT)
            return
        if not builder.admit(request, view.match(request), sys.maxsize):
            return
        num_left = None if num_left is None else num_left - 1
