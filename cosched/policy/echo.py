"""Echo's scheduler: offline requests by benefit per predicted second (Echo §3.1, §4.1).

Idea         the last batch is the starting point: running requests stay, online ones come first. In
             what the deadlines leave of the iteration's time, offline requests are admitted one by
             one, each the best of a few candidates: the first of each length bucket of the pool.
Assumptions  the predictor knows how long a batch takes before it runs; waiting requests that share
             a prefix also stand beside each other in the pool.
Good         what is cached is used while it is: a cached prefix is worth its tokens and costs no
             time. Of several prefixes in the cache all are used, not only the last admission's.
Bad          looks one iteration ahead; what is short and shares nothing waits until its age or
             its deadline makes the pool name it as the only candidate (own addition).
Parameters   `Budgets`, as HyGen; `CANDIDATES_PER_BUCKET`; the number of buckets is the pool's.

Of an iteration (Eq. 1, 2, 4)

    benefit      tokens it processes, those of cached prefixes that its prefills reuse among them
    punishment   cached tokens that are evicted for it although a waiting request would reuse them
    score        (benefit - punishment) / predicted seconds [tokens/s]

Each admission is the candidate with which the score is highest. Admissions end where a limit is
reached, not where the score falls: beside a cached prefix every other request lowers it, and an
iteration that ends early spends the slack of the deadlines for nothing.

Which KV goes first is the order of eviction's to decide (``echo-bs+e+s+m``: that of Echo §4.2). A
plan knows which prefixes its candidates would reuse and how much room is left: evictions count as
punishment once everything else is gone.

Deviations from the paper
* Candidates are the first few of each bucket instead of the whole pool, so that a plan costs what
  it looks at.
* A running offline request that does not fit the time sits out with its KV kept instead of being
  evicted. Which one is stopped for an online request follows the punishment alone.
* The budget is the one that `hygen` has (`cosched.policy.deadlines`).
* The time of a candidate is predicted beside what is in the batch when it is first looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cosched.core.plan import Plan, SkipReason
from cosched.core.request import Request
from cosched.core.view import Match, OfflineOrder, View
from cosched.planning.builder import PlanBuilder
from cosched.policy.base import PolicySettings
from cosched.policy.online_order import deadline_pace
from cosched.policy.phases import (
    Pace,
    Steps,
    admission_tokens,
    follow,
    has_time,
    is_worth_its_place,
    must_wait,
    offline_room,
    shortest_first,
    two_phases,
    youngest_first,
)

__all__ = [
    "CANDIDATES_PER_BUCKET",
    "Candidate",
    "EchoPolicy",
    "admit_by_score",
    "punishments",
]

CANDIDATES_PER_BUCKET = 2


class EchoPolicy:
    """Two phases over a budget of predicted time, offline admissions by score. See the module's
    docstring and `phases`."""

    initial = None

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def plan(self, view: View, carry: None) -> tuple[Plan, None]:
        builder = PlanBuilder(view)
        pace = deadline_pace(builder, self._settings)
        two_phases(builder, pace, _STEPS)
        return builder.build(limits=pace.limits()), None


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


def best_batch(
    builder: PlanBuilder,
    order: OfflineOrder,
    fitting: Sequence[Candidate],
    benefit: int,
    seconds: float,
) -> Candidate:
    """By the score of the batch (Eq. 4). Of equals the first: prefix order, the bucket that has the
    turn before the others."""
    lost = punishments(builder, fitting)

    def score(place: int) -> float:
        candidate = fitting[place]
        gain = benefit + candidate.benefit - lost[place]
        return gain / (seconds + candidate.seconds)

    return fitting[max(range(len(fitting)), key=score)]


def admit_by_score(
    builder: PlanBuilder,
    pace: Pace,
    order: OfflineOrder,
    *,
    choose: Choose = best_batch,
) -> None:
    """Offline requests one by one, each the best of the candidates that fit."""
    search = _Search(builder, pace, order)
    benefit = _benefit(builder)
    room = offline_room(builder)
    while room != 0 and builder.ledger.slots > 0 and has_time(builder, pace):
        seconds = builder.ledger.seconds()
        fitting = search.fitting(seconds)
        if not fitting:
            return
        best = choose(builder, order, fitting, benefit, seconds)
        request, match = best.request, best.match
        # What was admitted since it was looked at may leave it less.
        if not builder.admit(request, match, admission_tokens(builder, pace, request, match)):
            search.refuse(request)
            continue
        benefit += builder.prefill[request.rid] + match.cached
        order.take(request)
        follow(order, request, match.cached)
        room = None if room is None else room - 1


def _benefit(builder: PlanBuilder) -> int:
    """Of what is in already: running requests that decode, and prefills."""
    num_idle = len(builder.held) + builder.num_preempted
    return len(builder.view.running) - num_idle + sum(builder.prefill.values())


class _Search:
    """The candidates of one plan. Each is looked at once."""

    def __init__(self, builder: PlanBuilder, pace: Pace, order: OfflineOrder) -> None:
        self._builder = builder
        self._pace = pace
        self._order = order
        self._known: dict[str, Candidate | None] = {}  # None: refused

    def refuse(self, request: Request) -> None:
        self._known[request.rid] = None

    def fitting(self, seconds: float) -> list[Candidate]:
        """Those that may be admitted; seconds: of the iteration without them."""
        fitting: list[Candidate] = []
        known = self._known
        goes_on = True
        while goes_on and not fitting:
            goes_on = False
            for bucket, requests in enumerate(self._order.candidates(CANDIDATES_PER_BUCKET)):
                for request in requests:
                    if request.rid not in known:
                        if must_wait(self._builder, request):
                            self._order.take(request)  # those behind it have the turn
                            goes_on = True
                            continue
                        known[request.rid] = self._look_at(request, bucket, seconds)
                    candidate = known[request.rid]
                    if candidate is not None:
                        fitting.append(candidate)
        return fitting

    def _look_at(self, request: Request, bucket: int, seconds: float) -> Candidate | None:
        builder, ledger = self._builder, self._builder.ledger
        match = builder.view.match(request)
        at_most = admission_tokens(builder, self._pace, request, match)
        reason = (
            SkipReason.LATENCY_BUDGET
            if at_most <= 0
            else ledger.refusal(request, match, at_most=at_most)
        )
        if reason is None and not is_worth_its_place(builder, request, match):
            reason = SkipReason.EVICTION_LOSS
        if reason is not None:
            builder.skip(request, reason)
            return None
        num_new = ledger.chunk(request, match.cached, at_most=at_most, num_loaded=match.host)
        return Candidate(
            request=request,
            bucket=bucket,
            match=match,
            num_new=num_new,
            seconds=ledger.seconds_with(num_new, match.cached) - seconds,
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
        if of_others and not ledger.fits(request, match, spare=of_others):
            num_lost = min(of_others + ledger.shortfall(request, match), of_others)
        lost.append(num_lost)
    return lost


def _least_loss_first(builder: PlanBuilder) -> list[Request]:
    """Of the youngest few first the one that loses least: what it would compute again."""
    victims = youngest_first(builder)
    num_unfinished = sum(1 for victim in victims if victim in builder.view.unfinished)
    end = num_unfinished + _VICTIMS
    few = victims[num_unfinished:end]
    few.sort(key=builder.view.preemption_gain)  # of equals the youngest
    return [*victims[:num_unfinished], *few, *victims[end:]]


_VICTIMS = 8
"""Running requests among which the one to stop is chosen."""

_STEPS = Steps(
    admit=admit_by_score,
    victims=_least_loss_first,
    decode_order=shortest_first,
)
