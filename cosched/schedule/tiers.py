"""Tiers of online requests in the default policy (own).

Order        Higher tiers are served first, each in its own order (`online_order`). After 1/share
             iterations in which a tier waited behind others it comes first in one, so none starves.
Set aside    Where a request of a tier would miss a target or finds no memory, running requests of
             lower tiers are set aside for the iteration: they decode in what is left, may be
             preempted, and none is prefilled. So the lowest tier loses first, and before it all
             offline work, which gets only what online requests leave. No tier is set aside in the
             iteration in which a lower one comes first.

A request counts as one that would miss a target if it is late or left out (`OnlineOrder.late`), or
if it decodes, its next token would be late in an iteration of all online decodes, and it can be in
time without those of lower tiers (`OnlineDecodes.is_behind`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cosched.core.plan import SkipReason
from cosched.core.tiers import Tier
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.deadlines import Deadlines
from cosched.schedule.online_order import OnlineOrder

_NO_ROOM = frozenset({SkipReason.MEMORY_BUDGET, SkipReason.REQUEST_SLOTS})


def tiers_in_order(tiers: Sequence[Tier], credits: Sequence[float]) -> tuple[int, ...]:
    """Ranks of the tiers in the order in which they are served; (0,) without tiers."""
    ranks = range(max(len(tiers), 1))
    first = next((rank for rank in ranks if credits[rank] >= 1), 0)
    return (first, *(rank for rank in ranks if rank != first))


def first_late(
    builder: PlanBuilder,
    deadlines: Deadlines,
    orders: Sequence[OnlineOrder],
    tiers: Sequence[int],
) -> int | None:
    """The first place in `tiers` with a request that would miss a target, while lower tiers run;
    None: there is none. No tier of `tiers` is set aside."""
    lowest = _lowest_running(builder, tiers)
    for rank in range(lowest):
        if orders[rank].late or deadlines.decodes.is_behind(rank, deadlines.alone_s):
            return rank
    return None


def first_without_room(
    builder: PlanBuilder, orders: Sequence[OnlineOrder], tiers: Sequence[int]
) -> int | None:
    """The same of requests that find no memory or slot in the builder's plan."""
    lowest = _lowest_running(builder, tiers)
    highest = min((request.tier for request in builder.online.requests), default=0)
    if highest < lowest and not builder.ledger.decodes_fit():
        return highest

    def waits(order: OnlineOrder) -> bool:
        return any(builder.skipped.get(request.rid) in _NO_ROOM for request in order.due)

    return next((rank for rank in range(lowest) if waits(orders[rank])), None)


def _lowest_running(builder: PlanBuilder, tiers: Sequence[int]) -> int:
    """0 too if a lower tier comes first: then none is set aside."""
    if len(tiers) < 2 or list(tiers) != sorted(tiers):
        return 0
    return max((request.tier for request in builder.online.requests), default=0)


def next_credits(
    tiers: Sequence[Tier],
    credits: Sequence[float],
    order: Sequence[int],
    *,
    working: Collection[int],
    prefilled: Collection[int],
) -> tuple[float, ...]:
    """After a plan with the tiers in this order. working: those with requests that wait, compute
    their prompts or are set aside. prefilled: those with prefills in the plan."""
    after = [*credits]
    for rank in range(1, len(tiers)):
        if rank not in working:
            after[rank] = 0.0
        elif rank == order[0]:
            # It comes first until it finds room.
            after[rank] -= rank in prefilled
        elif any(higher in working for higher in range(rank)):
            after[rank] = min(credits[rank] + tiers[rank].share, 1.0 + tiers[rank].share)
    return tuple(after)
