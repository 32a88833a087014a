"""Offline admissions one by one: each the best of a few candidates of the pool (Echo §4.1).

Candidates are the first few of each length bucket of the pool, so that a plan costs what it looks
at. What is best is the policy's to say (`Choose`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.core.request import Request, num_encoded
from cosched.core.view import OfflineOrder
from cosched.pool.freshness import due_time_s
from cosched.schedule.base import Pace
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.following import follow
from cosched.schedule.phases import (
    admission_tokens,
    enough_victims,
    has_time,
    must_wait,
    offline_admissions_left,
    youngest_first,
)

CANDIDATES_PER_BUCKET = 2

_MOST_PASSED = 4
"""Requests without memory, or time for an image, behind which a plan looks at others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A waiting request and what admitting it would do.

    bucket    of the pool, by its place
    num_new   prompt tokens it would compute
    seconds   by which the iteration would take longer [s]
    """

    request: Request
    bucket: int
    match: Match
    num_new: int
    seconds: float

    @property
    def benefit(self) -> int:
        return self.num_new + self.match.cached


Choose = Callable[[PlanBuilder, OfflineOrder, Sequence[Candidate], int, float], Candidate]
"""Which of the candidates that fit is admitted next; beside them benefit and predicted seconds of
what is in the batch."""


def admit_best(
    builder: PlanBuilder,
    pace: Pace,
    order: OfflineOrder,
    *,
    choose: Choose,
) -> None:
    """Admit offline requests one by one, each time the best of the candidates that fit.

    With a forecast of memory (own) an urgent request takes the place of others, and those behind
    one that lacks memory may be admitted before it: a forecast that is wrong makes a few wait, not
    all."""
    if builder.ledger.kv.has_forecast:
        _make_way_for_urgent(builder, pace, order)
    search = _Search(builder, pace, order)
    benefit = _benefit(builder)
    num_left = offline_admissions_left(builder)
    while num_left != 0 and builder.ledger.slots > 0 and has_time(builder, pace):
        seconds = builder.ledger.seconds()
        fitting = search.fitting(seconds)
        if not fitting:
            return
        best = choose(builder, order, fitting, benefit, seconds)
        request, match = best.request, best.match
        # What was admitted since it was looked at may leave it less.
        at_most = admission_tokens(builder, pace, request, match, order)
        if not builder.admit(request, match, at_most):
            search.refuse(request)
            continue
        benefit += builder.prefill[request.rid] + match.cached
        order.take(request)
        follow(order, request, match.cached)
        num_left = None if num_left is None else num_left - 1


def least_urgent_first(builder: PlanBuilder) -> Iterator[Request]:
    """As `youngest_first`, but the urgent ones come last."""
    until_s = builder.view.offline_order().urgent_until_s
    urgent: list[Request] = []
    for victim in youngest_first(builder):
        if _is_urgent(victim, until_s):
            urgent.append(victim)
        else:
            yield victim
    yield from urgent


def _is_urgent(request: Request, until_s: float) -> bool:
    due_s = due_time_s(request)
    return due_s is not None and due_s <= until_s


def first_candidate(order: OfflineOrder) -> Request | None:
    """The request that comes first; None: none waits."""
    return next((request for requests in order.candidates(1) for request in requests), None)


def _make_way_for_urgent(builder: PlanBuilder, pace: Pace, order: OfflineOrder) -> None:
    """Preempt offline requests that are not urgent for an urgent one that lacks memory or a slot,
    if that is enough."""
    until_s = order.urgent_until_s
    first = first_candidate(order)
    if first is None or not _is_urgent(first, until_s) or not has_time(builder, pace):
        return
    match = builder.view.match(first)
    at_most = admission_tokens(builder, pace, first, match, order)
    victims = [
        victim
        for victim in youngest_first(builder)
        if victim.rid not in builder.prefill and not _is_urgent(victim, until_s)
    ]
    if at_most > 0 and victims and not must_wait(builder, first):
        for victim in enough_victims(builder, victims, first, match, at_most):
            builder.preempt(victim)


def _benefit(builder: PlanBuilder) -> int:
    """Of what is in already: running requests that decode, and prefills."""
    num_idle = len(builder.paused) + builder.num_preempted
    return len(builder.view.running) - num_idle + sum(builder.prefill.values())


class _Search:
    """The candidates of one plan. Each is looked at once."""

    def __init__(self, builder: PlanBuilder, pace: Pace, order: OfflineOrder) -> None:
        self._builder = builder
        self._pace = pace
        self._order = order
        self._num_left = _MOST_PASSED if builder.ledger.kv.has_forecast else 0
        self._known: dict[str, Candidate | None] = {}  # None: refused

    def refuse(self, request: Request) -> None:
        self._known[request.rid] = None

    def fitting(self, seconds: float) -> list[Candidate]:
        """Those that may be admitted, of one tenant; seconds: of the iteration without them."""
        fitting: list[Candidate] = []
        known = self._known
        goes_on = True
        while not fitting and (goes_on or self._order.ask_next()):
            goes_on = False
            candidates = self._order.candidates(CANDIDATES_PER_BUCKET)
            refused: list[Request] = []
            for bucket, requests in enumerate(candidates):
                for request in requests:
                    if request.rid not in known:
                        if must_wait(self._builder, request):
                            self._order.pass_over(request)
                            goes_on = True
                            continue
                        known[request.rid] = self._look_at(request, bucket, seconds)
                    candidate = known[request.rid]
                    if candidate is not None:
                        fitting.append(candidate)
                    else:
                        refused.append(request)
            if not fitting and self._pass_over(refused):
                goes_on = True
        return fitting

    def _pass_over(self, refused: Sequence[Request]) -> bool:
        """Leave out those that lack memory, or time for an image, so that others behind them are
        looked at. These must fit beside one that lacks memory and is the only candidate: it is
        urgent, or due. False: none is left out."""
        builder, view, skipped = self._builder, self._builder.view, self._builder.skipped
        lacking = [r for r in refused if skipped.get(r.rid) is SkipReason.MEMORY_BUDGET]
        lacking = lacking[: self._num_left]
        if lacking and len(refused) == 1 and (view.running or view.unfinished):
            builder.ledger.kv.set_aside(refused[0], view.match(refused[0]))
        lacking += [
            r for r in refused if r.traits.media and skipped.get(r.rid) is SkipReason.LATENCY_BUDGET
        ]
        lacking = lacking[: self._num_left]
        self._num_left -= len(lacking)
        for request in lacking:
            self._order.pass_over(request)
        return bool(lacking)

    def _look_at(self, request: Request, bucket: int, seconds: float) -> Candidate | None:
        builder, ledger = self._builder, self._builder.ledger
        match = builder.view.match(request)
        at_most = admission_tokens(builder, self._pace, request, match, self._order)
        reason = (
            SkipReason.LATENCY_BUDGET
            if at_most <= 0
            else ledger.refusal(request, match, at_most=at_most)
        )
        if reason is not None:
            builder.skip(request, reason)
            return None
        num_new = ledger.chunk(request, match, at_most=at_most)
        return Candidate(
            request=request,
            bucket=bucket,
            match=match,
            num_new=num_new,
            seconds=ledger.seconds_with(
                num_new, match.cached, encoded=num_encoded(request, match.cached, num_new)
            )
            - seconds,
        )


def punishments(builder: PlanBuilder, fitting: Sequence[Candidate]) -> list[int]:
    """For each of the candidates: cached tokens that are evicted for it although another one would
    reuse them."""
    reusable_of: dict[int, int] = {}
    for candidate in fitting:
        bucket = candidate.bucket
        reusable_of[bucket] = max(reusable_of.get(bucket, 0), candidate.match.evictable)
    reusable = sum(reusable_of.values())
    lost = []
    for candidate in fitting:
        request, match, ledger = candidate.request, candidate.match, builder.ledger
        num_lost = 0
        of_others = reusable - reusable_of[candidate.bucket]
        if of_others and not ledger.kv.fits(request, match, spare=of_others):
            num_lost = min(of_others + ledger.kv.shortfall(request, match), of_others)
        lost.append(num_lost)
    return lost
