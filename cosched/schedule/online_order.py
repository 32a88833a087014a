"""The order of online requests without a first token, if not all of them can meet their targets.

In an overload first come, first served makes all requests late: each waits for requests that are
late already. Here as many requests as possible meet their targets and are served first, and the
late ones behind them.

    due   earliest deadline first; if a request would miss its deadline because of those before it,
          the longest of them is left out (Moore, 1968: the fewest late jobs on one machine)
    late  requests whose deadline has passed or that were left out, oldest first

Prefills have the time that decodes leave without missing their own targets
(`Deadlines.prefill_time_s`). If that may not be enough for all of them, decodes wait, provided that
more first tokens meet their targets by it than decodes are expected to miss theirs, and that no
request waits whose deadline has passed: only then is there time for decodes to catch up. While late
requests wait, one in `LATE_TURN` prefills is the oldest of them, more the longer it has waited, and
all once it has waited for `Budgets.late_bound`.

Tiers are served one after the other, each in this order: its requests have the time that those of
higher tiers leave, the late ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappush, heappushpop
from itertools import chain
from typing import NamedTuple

from cosched.core.group import RankNeeds
from cosched.core.request import LateReason, Request
from cosched.core.view import View
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.deadlines import Deadlines, online_prefills
from cosched.schedule.time_budget import TimeBudget

LATE_TURN = 16
"""One in this many online prefills is a late one, while no late one has waited for long."""

_MOST_LOOKED_AT = 64
"""Requests whose feasibility is computed; those with later deadlines come behind them."""


class OnlineOrder(NamedTuple):
    """Online requests without a first token, unfinished prefills included.

    newly_late  late requests of which no plan before this one said so, and why they are
    borrows     the due requests would not all be in time else: decodes wait for them and catch up
    """

    due: list[Request]
    late: list[Request]
    newly_late: Mapping[str, LateReason]
    borrows: bool = False


def by_tier(view: View, tiers: Sequence[int]) -> list[list[Request]]:
    """The online requests without a first token of each of these tiers."""
    groups: dict[int, list[Request]] = {tier: [] for tier in tiers}
    for request in online_prefills(view):
        if request.tier in groups:
            groups[request.tier].append(request)
    return [*groups.values()]


def merged(orders: Sequence[OnlineOrder]) -> OnlineOrder:
    """One order of all tiers."""
    if len(orders) == 1:
        return orders[0]
    return OnlineOrder(
        due=[*chain.from_iterable(order.due for order in orders)],
        late=[*chain.from_iterable(order.late for order in orders)],
        newly_late={rid: why for order in orders for rid, why in order.newly_late.items()},
        borrows=any(order.borrows for order in orders),
    )


def tiers_by_feasibility(
    builder: PlanBuilder, deadlines: Deadlines, tiers: Sequence[int]
) -> list[OnlineOrder]:
    """The order of each tier, in the order in which they are served. Decodes wait for no first
    token of a lower tier."""
    view = builder.view
    orders: list[OnlineOrder] = []
    ahead_s = 0.0
    for place, requests in enumerate(by_tier(view, tiers)):
        may_borrow = True
        if orders:
            last = orders[-1]
            ahead = chain(last.due[:_MOST_LOOKED_AT], last.late[:_MOST_LOOKED_AT])
            ahead_s += sum(map(deadlines.prefill_s, ahead))
            may_borrow = all(r.tier not in tiers[:place] for r in builder.online.requests)
        orders.append(
            by_feasibility(view, deadlines, requests, ahead_s=ahead_s, may_borrow=may_borrow)
        )
    return orders


def by_feasibility(
    view: View,
    deadlines: Deadlines,
    requests: Iterable[Request] | None = None,
    *,
    ahead_s: float = 0.0,
    may_borrow: bool = True,
) -> OnlineOrder:
    """O(n) for n online requests without a first token, O(m log m) for those whose deadline is
    still to come. requests: of one tier; None: all. ahead_s: time of prefills that come before [s].
    may_borrow: decodes may wait for them."""
    start_s = view.start_s
    due_s: dict[str, float] = {}
    coming: list[Request] = []
    late: list[Request] = []
    newly_late: dict[str, LateReason] = {}
    for request in online_prefills(view) if requests is None else requests:
        due_s[request.rid] = deadline_s = request.arrival_s + deadlines.ttft_s(request)
        if deadline_s > start_s:
            coming.append(request)
            continue
        late.append(request)
        if request.late is None:
            newly_late[request.rid] = LateReason.OVERDUE
    coming.sort(key=lambda r: due_s[r.rid])
    looked_at = [
        _Prefill(request, deadlines.prefill_s(request), due_s[request.rid] - start_s)
        for request in coming[:_MOST_LOOKED_AT]
    ]
    chosen = _most_in_time(looked_at, deadlines.prefill_time_s, ahead_s)
    borrows = False
    if may_borrow and not late:
        # While requests wait whose deadline has passed, decodes have no time to catch up.
        num_sure = len(_most_in_time(looked_at, deadlines.sure_prefill_time_s, ahead_s))
        if num_sure < len(looked_at):
            more = _most_in_time(looked_at, deadlines.most_prefill_time_s, ahead_s)
            if len(more) >= len(chosen):
                num_misses = deadlines.num_tpot_misses([(p.seconds, p.within_s) for p in more])
                if len(more) - num_sure > num_misses:
                    chosen, borrows = more, True
    due = [prefill.request for prefill in chosen]
    if len(due) < len(coming):
        rids = {request.rid for request in due}
        behind = coming[_MOST_LOOKED_AT:]
        left_out = [prefill for prefill in looked_at if prefill.request.rid not in rids]
        for request, seconds, within_s in left_out:
            if request.late is None:
                is_alone_late = seconds > deadlines.prefill_time_s(within_s)
                why = LateReason.TOO_LONG if is_alone_late else LateReason.CROWDED
                newly_late[request.rid] = why
        late += [prefill.request for prefill in left_out]
        late.sort(key=lambda r: r.arrival_seq)
        due += behind
    return OnlineOrder(due, late, newly_late, borrows)


def time_budget(builder: PlanBuilder, settings: PolicySettings) -> TimeBudget:
    """Of the next iteration, where online requests are served in the order of arrival. Counts the
    time of the running online requests' decodes."""
    return _budget(Deadlines(builder, settings), builder.view)


def rank_needs(view: View, settings: PolicySettings) -> RankNeeds:
    """What online requests of this rank need of an iteration with that time budget."""
    deadlines = Deadlines(PlanBuilder(view), settings)
    return deadlines.needs(_budget(deadlines, view))


def _budget(deadlines: Deadlines, view: View) -> TimeBudget:
    borrows = by_feasibility(view, deadlines).borrows
    prefills = deadlines.prefill_slacks(online_prefills(view))
    return deadlines.budget(
        prefills,
        online_s=deadlines.online_s(prefills if borrows else None),
        offline_s=deadlines.offline_s(prefills),
    )


class _Prefill(NamedTuple):
    """seconds: its own time. within_s: until its deadline [s]."""

    request: Request
    seconds: float
    within_s: float


def _most_in_time(
    coming: Sequence[_Prefill], time_s: Callable[[float], float], ahead_s: float
) -> list[_Prefill]:
    """Moore's algorithm. coming: by deadline. time_s: time to a deadline -> time for prefills.
    ahead_s: time of prefills before them [s]."""
    total_s = ahead_s
    chosen: list[tuple[float, int]] = []  # as a heap: the longest first, of equals the latest
    for place, (_, seconds, within_s) in enumerate(coming):
        total_s += seconds
        if total_s <= time_s(within_s):
            heappush(chosen, (-seconds, -place))
        else:
            total_s += heappushpop(chosen, (-seconds, -place))[0]
    return [coming[place] for place in sorted(-place for _, place in chosen)]
