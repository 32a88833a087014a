"""Tiers of online requests in the default policy (own).

Order        Higher tiers are served first, each in its own order (`online_order`). After 1/share
             iterations in which a tier waited behind others it comes first in one, so none starves.
Set aside    Where a request of a tier would miss a target, running requests of lower tiers are set
             aside for the iteration: they decode in the rest, and none is prefilled. No tier is
             set aside in the iteration in which a lower one comes first.
Memory       Where a request finds no memory or slot, those of lower tiers are preempted for it, the
             lowest and youngest first.

So the lowest tier loses first, and before it all offline work, which gets only what online requests
leave.

A request counts as one that would miss a target if it is late or left out (`OnlineOrder.late`), or
if it decodes, its next token would be late in an iteration of all online decodes, and it can be in
time without those of lower tiers (`OnlineDecodes.is_behind`).
"""

from __future__ import annotations

from collections.abc import Sequence

from cosched.core.tiers import Tier
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.deadlines import Deadlines, online_prefills
from cosched.schedule.online_order import OnlineOrder


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
    None: there is none, or a lower tier comes first. O(1) where one tier is served."""
    if len(tiers) == 1 or list(tiers) != sorted(tiers):
        return None
    lowest = max((request.tier for request in builder.online.requests), default=0)
    for place, (tier, order) in enumerate(zip(tiers, orders, strict=True)):
        if tier < lowest and (order.late or deadlines.decodes.is_behind(tier, deadlines.alone_s)):
            return place
    return None


def next_credits(
    tiers: Sequence[Tier], credits: Sequence[float], order: Sequence[int], builder: PlanBuilder
) -> tuple[float, ...]:
    """After the builder's plan with the tiers in this order."""
    if not tiers:
        return tuple(credits)
    prefilled = {r.tier for r in online_prefills(builder.view) if r.rid in builder.prefill}
    working = {r.tier for r in (*online_prefills(builder.view), *builder.aside().requests)}
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
