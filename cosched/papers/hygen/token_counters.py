"""Fair online service: the Virtual Token Counter as HyGen's online policy (HyGen §4.1).

HyGen names VTC (Sheng et al., OSDI 2024) beside first come, first served as a policy of its online
phase. Each tenant has a counter of what it has been given: `PROMPT_WEIGHT` for a prompt token,
`OUTPUT_WEIGHT` for a generated one. Waiting requests are admitted from the tenant with the least
counter, each tenant's oldest first, until one does not fit. The counter of a tenant that begins to
wait is lifted to the least of those that wait already; if none does, to that of the tenant that was
admitted last. So time without requests earns nothing.

Deviations: prompt tokens count as they are computed, chunk by chunk, and cached ones not at all. A
decode counts when it is planned. The budget of an iteration is that of all online requests.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace

import msgspec

from cosched.core.group import RankNeeds
from cosched.core.plan import Plan
from cosched.core.request import Request, RequestClass, num_tokens_left
from cosched.core.view import View
from cosched.papers.hygen.policy import HygenPolicy
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.online_order import rank_needs, time_budget
from cosched.schedule.phases import two_phases

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""As in VTC's evaluation."""

_MOST_TENANTS = 1024
"""Counters that are kept; the least go first."""


class TokenCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What tenants have been given [weighted tokens].

    counters  by tenant
    waiting   tenants whose requests waited after the last plan
    last      counter of the tenant that was admitted last
    """

    counters: dict[str, float] = {}
    waiting: tuple[str, ...] = ()
    last: float = 0.0


class VtcPolicy:
    """`HygenPolicy` with online requests in the order of the counters."""

    initial = TokenCounters()

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def plan(self, view: View, state: TokenCounters) -> tuple[Plan, TokenCounters]:
        counters = lifted(state, {request.tenant for request in view.online})
        builder = PlanBuilder(view)
        pace = time_budget(builder, self._settings)
        waiting = least_served_first(view.online, counters)
        two_phases(builder, pace, HygenPolicy.steps, waiting=waiting)
        plan = builder.build(limits=pace.limits())
        return plan, charged(counters, view, plan, last=state.last)

    def needs(self, view: View) -> RankNeeds:
        return rank_needs(view, self._settings)


def lifted(state: TokenCounters, waiting: Iterable[str]) -> dict[str, float]:
    """The counters once these tenants wait."""
    counters = dict(state.counters)
    now = {*waiting}
    before = [counters[tenant] for tenant in state.waiting if tenant in now]
    floor = min(before, default=state.last)
    for tenant in now.difference(state.waiting):
        counters[tenant] = max(counters.get(tenant, 0.0), floor)
    return counters


def least_served_first(
    requests: Iterable[Request], counters: Mapping[str, float]
) -> Iterator[Request]:
    """Waiting requests, oldest first -> in the order in which VTC admits them. Of equal counters
    the tenant with the oldest request comes first."""
    queues: defaultdict[str, deque[Request]] = defaultdict(deque)
    for request in requests:
        queues[request.tenant].append(request)
    heap = [(counters[tenant], queue[0].arrival_seq, tenant) for tenant, queue in queues.items()]
    heapify(heap)
    while heap:
        counter, _, tenant = heap[0]
        queue = queues[tenant]
        request = queue.popleft()
        if queue:
            counter += PROMPT_WEIGHT * num_tokens_left(request)
            heapreplace(heap, (counter, queue[0].arrival_seq, tenant))
        else:
            heappop(heap)
        yield request


def charged(counters: dict[str, float], view: View, plan: Plan, *, last: float) -> TokenCounters:
    """What the tenants have been given once the plan has run."""
    given: defaultdict[str, float] = defaultdict(float)
    waiting: dict[str, None] = {}
    for request in view.unfinished:
        if request.request_class is RequestClass.ONLINE:
            given[request.tenant] += PROMPT_WEIGHT * plan.prefill.get(request.rid, 0)
    for request in view.online:
        if request.rid not in plan.prefill:
            waiting[request.tenant] = None
            continue
        given[request.tenant] += PROMPT_WEIGHT * plan.prefill[request.rid]
        last = counters[request.tenant]
    idle = plan.paused.union(stop.rid for stop in plan.preempt)
    for request in view.running_of(RequestClass.ONLINE).requests if plan.decodes else ():
        given[request.tenant] += OUTPUT_WEIGHT * (request.rid not in idle)
    counters = {**counters, **{t: counters.get(t, 0.0) + amount for t, amount in given.items()}}
    while len(counters) > _MOST_TENANTS:
        del counters[min(counters, key=counters.__getitem__)]
    return TokenCounters(counters=counters, waiting=tuple(waiting), last=last)
