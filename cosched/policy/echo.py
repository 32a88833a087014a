"""Echo's scheduler: offline requests by benefit per predicted second (Echo §3.1, §4.1).

Idea         the last batch is the starting point: running requests stay, online ones come first. In
             what the deadlines leave of the iteration's time, offline requests are admitted one by
             one, each the best of a few candidates: the first of each length bucket of the pool.
Assumptions  the predictor knows how long a batch takes before it runs; waiting requests that share
             a head also stand beside each other in the pool.
Good         what is cached is used while it is: a cached head is worth its tokens and costs no
             time. Of several heads in the cache all are used, not only that of the last admission.
Bad          looks one iteration ahead; what is short and shares nothing waits until its age or
             its deadline makes the pool name it as the only candidate (own addition).
Parameters   `Budgets`, as HyGen; `CANDIDATES_PER_BUCKET`; the number of buckets is the pool's.

Of an iteration (Eq. 1, 2, 4)

    benefit      tokens it processes, those of cached heads that its prefills reuse among them
    punishment   cached tokens that are evicted for it although a waiting request would reuse them
    score        (benefit - punishment) / predicted seconds [tokens/s]

Each admission is the candidate with which the score is highest. Admissions end where a limit is
reached, not where the score falls: beside a cached head every other request lowers it, and an
iteration that ends early spends the slack of the deadlines for nothing.

What is evicted for whom is the cache's to decide. A plan knows which heads its candidates would
reuse and how much room is left: evictions count as punishment once everything else is gone.

Deviations from the paper
* Candidates are the first few of each bucket instead of the whole pool, so that a plan costs what
  it looks at.
* A running offline request that does not fit the time sits out with its KV kept instead of being
  evicted. Which one is stopped for an online request follows the punishment alone.
* The budget is the one that `hygen` has (`cosched.policy.deadlines`).
* The time of a candidate is predicted beside what is in the batch when it is first looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from cosched.core.plan import Plan, SkipReason
from cosched.core.request import Request
from cosched.core.view import BucketedOrder, Match, View
from cosched.policy.base import PolicySettings
from cosched.policy.deadlines import DeadlineLedger, deadline_ledger
from cosched.policy.two_phase import TwoPhaseDraft

__all__ = ["CANDIDATES_PER_BUCKET", "EchoPolicy"]

CANDIDATES_PER_BUCKET = 2


class EchoPolicy:
    """Two phases over a budget of predicted time, offline admissions by score. See the module's
    docstring and `two_phase`."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def plan(self, view: View) -> Plan:
        ledger = deadline_ledger(view, self._settings)
        return replace(_EchoDraft(view, ledger).build(), limits=ledger.limits())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A waiting request and what admitting it would do.

    num_new   prompt tokens it would compute
    need      KV tokens it would take in all
    seconds   by which the iteration would take longer [s]
    """

    request: Request
    bucket: int
    match: Match
    num_new: int
    need: int
    seconds: float

    @property
    def benefit(self) -> int:
        return self.num_new + self.match.cached


class _EchoDraft(TwoPhaseDraft):
    # A token is a token: those with the shortest contexts give most of them per second.
    _decode_order = attrgetter("num_computed_tokens", "arrival_seq")

    def __init__(self, view: View, ledger: DeadlineLedger) -> None:
        super().__init__(view, ledger)
        self._ledger = ledger

    def _admit_offline(self, order: Iterator[Request]) -> None:
        assert isinstance(order, BucketedOrder), "the pool is kept in buckets"
        known: dict[str, _Candidate | None] = {}
        benefit = self._benefit()
        room = self._offline_room()
        while room != 0 and self._budget.slots > 0 and self._has_time():
            seconds = self._ledger.seconds()
            fitting = self._fitting(order, known, seconds)
            if not fitting:
                return
            best = self._best(fitting, benefit, seconds)
            rid = best.request.rid
            # What was admitted since it was looked at may leave it less.
            at_most = self._admission_tokens(best.request, best.match.cached)
            if not self._admit(best.request, best.match, at_most):
                known[rid] = None
                continue
            benefit += self._prefill[rid] + best.match.cached
            order.take(best.request)
            self._follow(best.request, best.match.cached)
            room = None if room is None else room - 1

    def _benefit(self) -> int:
        """Of what is in already: running requests that decode, and prefills."""
        num_idle = len(self._held) + len(self._preempted)
        return len(self._view.running) - num_idle + sum(self._prefill.values())

    def _fitting(
        self, order: BucketedOrder, known: dict[str, _Candidate | None], seconds: float
    ) -> list[_Candidate]:
        """The candidates that may be admitted. known: rid -> those looked at, None: refused;
        seconds: of the iteration without them."""
        fitting: list[_Candidate] = []
        goes_on = True
        while goes_on and not fitting:
            goes_on = False
            for bucket, requests in enumerate(order.candidates(CANDIDATES_PER_BUCKET)):
                for request in requests:
                    if request.rid not in known:
                        if self._must_wait(request):
                            order.take(request)  # those behind it have the turn
                            goes_on = True
                            continue
                        known[request.rid] = self._look_at(request, bucket, seconds)
                    candidate = known[request.rid]
                    if candidate is not None:
                        fitting.append(candidate)
        return fitting

    def _look_at(self, request: Request, bucket: int, seconds: float) -> _Candidate | None:
        match = self._view.match(request)
        at_most = self._admission_tokens(request, match.cached)
        reason = (
            SkipReason.LATENCY_BUDGET
            if at_most <= 0
            else self._budget.refusal(request, match, at_most=at_most)
        )
        if reason is not None:
            self._skipped[request.rid] = reason
            return None
        num_new = self._budget.chunk(request, match.cached, at_most=at_most, num_loaded=match.host)
        return _Candidate(
            request=request,
            bucket=bucket,
            match=match,
            num_new=num_new,
            need=self._budget.headroom + self._budget.shortfall(request, match),
            seconds=self._ledger.seconds_with(num_new, match.cached) - seconds,
        )

    def _best(self, fitting: list[_Candidate], benefit: int, seconds: float) -> _Candidate:
        """Of equals the first: prefix order, the bucket that has the turn before the others."""
        heads: dict[int, int] = {}
        for candidate in fitting:
            bucket = candidate.bucket
            heads[bucket] = max(heads.get(bucket, 0), candidate.match.evictable)
        reusable = sum(heads.values())

        def score(candidate: _Candidate) -> float:
            of_others = reusable - heads[candidate.bucket]
            room = self._budget.headroom - candidate.need
            punishment = min(max(of_others - room, 0), of_others)
            return (benefit + candidate.benefit - punishment) / (seconds + candidate.seconds)

        return max(fitting, key=score)

    def _victims(self) -> list[Request]:
        """Of the youngest few first the one that loses least: what it would compute again."""
        victims = super()._victims()
        num_unfinished = sum(1 for victim in victims if victim in self._view.unfinished)
        end = num_unfinished + _VICTIMS
        few = victims[num_unfinished:end]
        few.sort(key=self._view.preemption_gain)  # of equals the youngest
        return [*victims[:num_unfinished], *few, *victims[end:]]


_VICTIMS = 8
"""Running requests among which the one to stop is chosen."""
