"""The batch size of BROS (§4.2) as a policy of one's own; docs/policies.md."""

from itertools import chain, filterfalse
from math import inf

import msgspec

from cosched.core.plan import Plan, SkipReason
from cosched.core.request import Request, RequestClass
from cosched.core.view import View
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder


class Active(msgspec.Struct, frozen=True):
    most: int = 128  # requests in one iteration: the paper's B


class BatchSize:
    """doubles the batch while no online request lacks time; 128 again after one did"""

    initial = Active()

    def __init__(self, settings: PolicySettings) -> None:
        self.slo = settings.slo

    def residual_s(self, builder: PlanBuilder, request: Request) -> float:
        """Time until its next token is due [s]."""
        gap_s = builder.gap_s(request)
        if gap_s is None:
            waited_s = builder.view.start_s - request.arrival_s
            return (request.slo.ttft_s or self.slo.ttft_s) - waited_s
        return (request.slo.tpot_s or self.slo.tpot_s) - gap_s

    def plan(self, view: View, state: Active) -> tuple[Plan, Active]:
        builder, most = PlanBuilder(view), min(2 * state.most, view.caps.max_running_requests)
        known = [*view.running, *view.unfinished, *view.online]
        online = (r for r in known if r.request_class is RequestClass.ONLINE)
        left_s = {r.rid: self.residual_s(builder, r) for r in online}
        # A request that an average iteration makes late sets no limit.
        limit_s = min((s for s in left_s.values() if s > view.mean_iteration_s), default=inf)
        bound = {r.rid for r in view.cannot_pause(view.running)}  # these run in any case
        bound |= {r.rid for r in view.unfinished if not r.traits.can_preempt}
        known.sort(key=lambda r: (r.rid not in bound, left_s.get(r.rid, inf), r.arrival_seq))
        taken: set[str] = set()
        for request in filterfalse(view.why_blocked, chain(known, view.offline_order())):
            if len(taken) >= state.most:
                builder.skip(request, SkipReason.BATCH_SIZE)
                break
            if builder.take(request, limit_s):
                taken.add(request.rid)
            elif request.rid not in left_s:
                break
            elif builder.skipped[request.rid] is SkipReason.LATENCY_BUDGET:
                most = 128
                break
        for request in view.running:
            if request.rid not in taken:
                builder.pause(request)
        return builder.build(), Active(most)
