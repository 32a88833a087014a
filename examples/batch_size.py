"""BROS's rule for the batch size (§4.2) as a policy of one's own: docs/policies/own_policy.md."""

import math
from itertools import chain, filterfalse

import msgspec

from cosched.core.plan import Plan, SkipReason
from cosched.core.request import Request, RequestClass
from cosched.core.view import View
from cosched.planning.builder import PlanBuilder, num_tokens_of
from cosched.policy.base import PolicySettings


class Active(msgspec.Struct, frozen=True):
    """most: requests that may run in one iteration (the paper's B)"""

    most: int = 128


class BatchSize:
    """twice as many requests while no online one lacks time, 128 again after one did"""

    initial = Active()

    def __init__(self, settings: PolicySettings) -> None:
        self.slo = settings.slo

    def plan(self, view: View, carry: Active) -> tuple[Plan, Active]:
        builder, reason = PlanBuilder(view), None
        order = [*view.running, *view.unfinished, *filterfalse(view.is_barred, view.online)]
        left_s = {r.rid: self.residual_s(r, view.start_s) for r in order}
        order.sort(key=lambda r: (left_s[r.rid], r.arrival_seq))
        online = [r for r in order if r.request_class is RequestClass.ONLINE]
        in_time = (left_s[r.rid] for r in online if seconds_of(builder, r) <= left_s[r.rid])
        late_s = max(self.slo.tpot_s, seconds_of(builder, online[0])) if online else math.inf
        limit_s = next(in_time, late_s)
        bound = [r for r in view.running if not view.can_hold(r)]  # they decode in any case
        num_active = sum(take(builder, r, math.inf) for r in bound)
        for request in chain(order, filterfalse(view.is_barred, view.offline_order())):
            ...


def residual_s(request, start_s, slo): ...


def seconds_of(builder: PlanBuilder, request: Request) -> float:
    """Predicted time of an iteration with one request alone [s]."""
    trial = builder.fork()
    take(trial, request, math.inf)
    return trial.ledger.seconds()


def take(builder: PlanBuilder, request: Request, limit_s: float) -> bool:
    """Let a request run, if the iteration then takes `limit_s` at most."""
    view, ledger = builder.view, builder.ledger
    match = view.match(request) if view.waiting(request.rid) else None
    if match is None and request not in view.unfinished:
        contexts = [request.num_computed_tokens + 1]
        if ledger.seconds_with_decodes(contexts) > limit_s and builder.hold(request):
            return False
        ledger.add_decodes(contexts)
        return True
    cached = match.cached if match else request.num_computed_tokens
    num_tokens = num_tokens_of(request) - cached
    at_most = view.predictor.max_prefill(ledger.totals, cached, limit_s, num_tokens)
    if at_most < num_tokens and not request.traits.can_cut:
        at_most = 0
    return builder.admit(request, match, at_most) if match else builder.go_on(request, at_most)
