"""cosched: online requests that can still meet their targets first; offline requests with the
longest replies first (own).

Idea         in a burst, first come first served makes every request late. Here the requests that
             can still meet their targets are served first, as many as possible, and the late ones
             behind them; decodes keep their pace, so that no request is in time at another's
             expense. What the targets leave is filled with offline requests in the order that ends
             a job soonest.
Assumptions  the predictor knows how long a batch takes before it runs; waiting offline requests
             that share a prefix stand beside each other in the pool.
Good         bursts beyond what the device can do; else it plans as `hygen` and `echo-bs+e+s` do.
Bad          a long prompt makes way for several short ones, and once late it waits for its turn:
             where there is too much for long, the late ones wait longer than they would in the
             order of arrival.
Parameters   TTFT and TPOT targets [s], per request or the server's; `Budgets` in `base`.

Of an iteration, in four modules

1. What chat needs of it (`deadlines`): the time that the next tokens of running online requests
   leave. A request that cannot meet its TPOT target any more does not bound the iteration.
2. Which first tokens come first (`online_order`): the online requests that can meet their TTFT
   targets, then the late ones. The unfinished prefill of a late one is preempted for one that can,
   its KV kept. Online prefills get what the decodes leave: a burst of prefills that slows all
   decodes beyond their targets wins first tokens and misses as many TPOT targets. Decodes that can
   catch up wait for first tokens (`OnlineOrder.borrows`). While one of the decodes can keep its
   TPOT target, no iteration beside them lasts longer than `GAPS` targets: with a mean gap that is
   kept a reader would still see a stall. An iteration with offline work lasts at most
   `Budgets.idle_share` of the TTFT target: a request that arrives waits for it.
3. Which offline work fills the rest (`candidates`): of the pool's candidates (Echo §4.1) the one
   with the most expected output tokens per prompt token to compute, after those that continue a
   shared prefix. A job ends when its last reply ends. Prompts are computed one after the other and
   replies beside each other: a machine with delivery times, where the longest delivery goes first
   (Jackson 1955), and of equal deliveries the shortest work (Smith 1956).
4. With speculative decoding, whether decodes run alone or with prefills (`turns`).

Tiers of online requests (`cosched.schedule.tier_order`): a higher one comes before a lower one.
Where one of its requests would miss a target, lower tiers are set aside for the iteration: they are
served as offline requests are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from cosched.core.estimates import LengthEstimate
from cosched.core.group import NO_OTHERS, RankNeeds
from cosched.core.plan import EMPTY_PLAN, Plan, SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.core.view import OfflineOrder, View
from cosched.memory.kv_forecast import KvForecast
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.candidates import (
    Candidate,
    admit_best,
    least_urgent_first,
    punishments,
)
from cosched.schedule.chat_pace import Course, paced_s
from cosched.schedule.deadlines import Deadlines, PrefillSlacks, online_prefills
from cosched.schedule.following import LEAST_SHARED
from cosched.schedule.online_order import (
    LATE_TURN,
    OnlineOrder,
    by_tier,
    merged,
    tiers_by_feasibility,
)
from cosched.schedule.phases import (
    Steps,
    shortest_first,
    two_phases,
    victims_for,
)
from cosched.schedule.tier_order import first_late, next_credits, tiers_in_order
from cosched.schedule.time_budget import OfflinePart, TimeBudget
from cosched.schedule.tolerated import Spent, tolerated
from cosched.schedule.turns import Turn, next_turn

GAPS = 3.0
"""Most time between two tokens of an online request [TPOT targets]."""


class LateTurn(msgspec.Struct, frozen=True):
    """When a late request comes before those that are due.

    num_due  online requests admitted in time since the last late one
    rid      the late request that comes first until it has its first token; "": none
    """

    num_due: int = 0
    rid: str = ""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """State from one plan to the next.

    turns    of each tier
    credits  of each tier (`cosched.schedule.tier_order`)
    course   of the offline work
    spent    of a tolerance
    idle_s   what offline prefills' waiting for company has cost (`Turn`) [s]
    """

    turns: tuple[LateTurn, ...] = (LateTurn(),)
    credits: tuple[float, ...] = (0.0,)
    course: Course = Course()
    spent: Spent = Spent()
    idle_s: float = 0.0


class Look(NamedTuple):
    """What a plan begins with, and what a rank needs of an iteration.

    served     tiers, in order
    orders     of online requests without a first token: of each tier
    order      of all
    prefills   their slack
    offline_s  most time of an iteration with offline work [s]
    """

    builder: PlanBuilder
    deadlines: Deadlines
    served: Sequence[int]
    orders: Sequence[OnlineOrder]
    order: OnlineOrder
    prefills: PrefillSlacks
    offline_s: float


class _TierOrder(NamedTuple):
    """Requests of a tier without a first token. rid: the late one that comes first, "" for none."""

    order: OnlineOrder
    rid: str

    def requests(self) -> list[Request]:
        first = [r for r in self.order.late if r.rid == self.rid]
        return [*first, *self.order.due, *self.behind()]

    def behind(self) -> list[Request]:
        return [r for r in self.order.late if r.rid != self.rid]

    def turn_after(self, turn: LateTurn, prefill: Collection[str], begun: Set[str]) -> LateTurn:
        """prefill: of the plan. begun: requests that it admits."""
        num_due = turn.num_due + sum(request.rid in begun for request in self.order.due)
        if not self.order.late or any(request.rid in prefill for request in self.order.late):
            num_due = 0
        return LateTurn(min(num_due, LATE_TURN), self.rid)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoschedOptions:
    """The ablations.

    feasible  online requests that can meet their targets first; False: in the order of arrival
    gap_cap   no iteration beside online decodes is longer than `GAPS` allow
    longest_first  offline requests by their expected replies; False: in the pool's order
    timeline  memory is set aside by the expected lengths of outputs, not by the engine's ratio
    agrees    with ranks that step together, what they need of an iteration counts on all of them
    paced     iterations are no longer than the batch needs; False: as long as the targets allow
    turns     with drafts offline prefills wait for company; False: they mix with every decode
    """

    feasible: bool = True
    gap_cap: bool = True
    longest_first: bool = True
    timeline: bool = True
    agrees: bool = True
    paced: bool = True
    turns: bool = True


_ALL = CoschedOptions()


class CoschedPolicy:
    """See the module's docstring."""

    initial = Past()

    def __init__(self, settings: PolicySettings, options: CoschedOptions = _ALL) -> None:
        self._settings = settings
        self._options = options
        if settings.tiers:
            num = len(settings.tiers)
            self.initial = Past(turns=(LateTurn(),) * num, credits=(0.0,) * num)
        self._steps = _steps(options)

    def plan(self, view: View, state: Past) -> tuple[Plan, Past]:
        if self._is_settled(view):
            return EMPTY_PLAN, state
        ranks = tiers_in_order(self._settings.tiers, state.credits)
        look = self._look(view, ranks)
        builder, order = look.builder, look.order
        tiers = [
            _TierOrder(one, self._late_first(one, state.turns[rank], view, look.deadlines))
            for rank, one in zip(look.served, look.orders, strict=True)
        ]
        _make_way(builder, tiers)
        budget = self._time_budget(look)
        if self._options.paced and self._may_pace(view):
            cost = self._settings.budgets.chat_pace
            budget.paced = partial(_paced, builder, state.course, cost)
        elif (headroom := view.tolerance_headroom) is not None and headroom.tpot is not None:
            budget.paced = partial(tolerated, builder, state.spent, headroom.tpot)
        turn = Turn(alone=False)
        if self._options.turns:
            offline_s, idle_s = look.offline_s, state.idle_s
            turn = next_turn(builder, look.deadlines, order, offline_s=offline_s, idle_s=idle_s)
        unfinished = {request.rid for request in view.unfinished}
        left_out = [r for r in online_prefills(view) if builder.is_aside(r)]
        two_phases(
            builder,
            budget,
            self._steps,
            waiting=[r for one in tiers for r in one.requests() if r.rid not in unfinished],
            decodes_alone=turn.alone,
            fills=not left_out,
        )
        for request in left_out:
            builder.skip(request, SkipReason.HIGHER_TIER)
        plan = builder.build(limits=budget.limits(), late=order.newly_late)
        begun = plan.prefill.keys() - unfinished
        turns = [*state.turns]
        for rank, one in zip(look.served, tiers, strict=True):
            turns[rank] = one.turn_after(state.turns[rank], plan.prefill, begun)
        return plan, Past(
            turns=tuple(turns),
            credits=next_credits(self._settings.tiers, state.credits, ranks, builder),
            course=state.course.after(builder),
            spent=state.spent.after(builder, budget.alone_s),
            idle_s=0.0 if plan.prefill else turn.idle_s,
        )

    def _is_settled(self, view: View) -> bool:
        """Only online decodes, and room for the next token of each: there is nothing to decide, and
        chat alone pays for no more than that."""
        if view.num_offline or view.unfinished or view.running_of(RequestClass.OFFLINE).requests:
            return False
        if self._settings.tiers or view.tolerance_headroom is not None or view.others != NO_OTHERS:
            return False
        if any(True for _ in view.online) or view.kv.next_step > view.kv.free:
            return False
        return all(memory.can_decode() for memory in view.memories)

    def needs(self, view: View) -> RankNeeds:
        if not self._options.agrees:
            return RankNeeds()
        look = self._look_at(
            PlanBuilder(view), tiers_in_order(self._settings.tiers, self.initial.credits)
        )
        return look.deadlines.needs(self._time_budget(look))

    def _look(self, view: View, served: Sequence[int]) -> Look:
        """Where a request of a tier would miss a target, again without lower tiers. served: all
        tiers, in order."""
        while True:
            builder = PlanBuilder(
                view,
                forecast=KvForecast(view)
                if self._options.timeline and view.caps.promises
                else None,
                tiers=served if self._settings.tiers else None,
            )
            look = self._look_at(builder, served)
            late = first_late(builder, look.deadlines, look.orders, served)
            if late is None:
                return look
            served = served[: late + 1]

    def _look_at(self, builder: PlanBuilder, served: Sequence[int]) -> Look:
        """served: tiers, in order; others are set aside."""
        options, view = self._options, builder.view
        deadlines = Deadlines(builder, self._settings, give_up=options.feasible)
        deadlines.keep_pace(partial(victims_for, steps=self._steps, tier=max(served)))
        if options.feasible:
            orders = tiers_by_feasibility(builder, deadlines, served)
        else:
            orders = [OnlineOrder(group, [], {}) for group in by_tier(view, served)]
        order = merged(orders)
        prefills = deadlines.prefill_slacks(order.due)
        # After decodes alone there is slack for long prefills, which pay the cost of mixing once.
        burst = GAPS if options.turns and view.tokens_per_decode > 1 else None
        offline_s = min(deadlines.offline_s(prefills, burst=burst), deadlines.idle_s(prefills))
        return Look(builder, deadlines, served, orders, order, prefills, offline_s)

    def _may_pace(self, view: View) -> bool:
        """Not where the operator, a promised tolerance or other ranks say how long it lasts, nor
        with drafts, where turns are about it."""
        others = view.others
        is_alone = not others.alone_s and not others.fills and others.taken_s <= 0
        if not is_alone or view.tokens_per_decode > 1 or view.tolerance_headroom is not None:
            return False
        return self._settings.latency_budget_s is None

    def _time_budget(self, look: Look) -> TimeBudget:
        """What chat needs of the iteration, and what offline work may take of it."""
        deadlines, prefills, order = look.deadlines, look.prefills, look.order
        slacks, headroom = deadlines.slacks, look.builder.view.tolerance_headroom
        is_whole = headroom is not None and headroom.wait_s is not None and not order.late
        if is_whole:
            online_s = math.inf  # prompts are not cut for the sake of decodes
        elif self._options.feasible and not order.borrows:
            online_s = deadlines.decodes_first_s()
        else:
            online_s = deadlines.online_s(prefills)
        most_s = math.inf
        if self._options.gap_cap and not is_whole and slacks.least_s < math.inf:
            most_s = GAPS * slacks.tpot_s
        return deadlines.budget(
            prefills,
            online_s=online_s,
            offline_s=look.offline_s,
            most_s=most_s,
            headroom=headroom,
            in_pieces=deadlines.are_pieces_enough(prefills),
        )

    def _late_first(
        self, order: OnlineOrder, turn: LateTurn, view: View, deadlines: Deadlines
    ) -> str:
        """The late request that comes before the due ones, "" for none."""
        if any(request.rid == turn.rid for request in order.late):
            return turn.rid
        if not order.late:
            return ""
        oldest = order.late[0]
        bound_s = self._settings.budgets.late_bound * deadlines.ttft_s(oldest)
        left = max(1 - (view.start_s - oldest.arrival_s) / bound_s, 0.0)
        return oldest.rid if turn.num_due >= (LATE_TURN - 1) * left else ""


def _paced(builder: PlanBuilder, course: Course, cost: float, most_s: float) -> OfflinePart:
    return OfflinePart(paced_s(builder, course, most_s, cost=cost))


def _make_way(builder: PlanBuilder, tiers: Sequence[_TierOrder]) -> None:
    """Preempt unfinished prefills of requests that come behind others: these need their place."""
    for request in [*builder.unfinished()]:
        if request.request_class is RequestClass.OFFLINE or not request.traits.can_preempt:
            continue
        for one in tiers:
            line = one.requests()
            if request not in line:
                if not line:
                    continue
                builder.preempt(request)  # a tier before its own has requests
            elif (behind := one.behind()) != line and request in behind:
                builder.preempt(request)
            break


def _longest_reply_first(
    builder: PlanBuilder,
    order: OfflineOrder,
    fitting: Sequence[Candidate],
    benefit: int,
    seconds: float,
) -> Candidate:
    """The most expected output tokens per prompt token to compute; evicted prefixes that others
    would have reused count as tokens to compute. Of equals the first, in prefix order."""
    view = builder.view
    first = fitting[0]
    if max(first.match.cached, order.num_shared(first.request)) >= LEAST_SHARED:
        return first
    lost = punishments(builder, fitting)

    def output_per_token(place: int) -> float:
        request, match = fitting[place].request, fitting[place].match
        num_computed = num_tokens_of(request) - match.cached + lost[place]
        return _expected_output(view.length(request)) / max(num_computed, 1)

    return fitting[max(range(len(fitting)), key=output_per_token)]


def _expected_output(length: LengthEstimate) -> float:
    """Mean of the output tokens to come: a job ends with replies far above the median."""
    return sum(length.ends) / len(length.ends) if length.ends else float(length.median)


def _steps(options: CoschedOptions) -> Steps:
    if not options.longest_first:
        return Steps()
    return Steps(
        admit=partial(admit_best, choose=_longest_reply_first),
        victims=least_urgent_first,
        decode_order=shortest_first,
    )
