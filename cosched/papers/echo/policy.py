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

Deviations from the paper, with reasons: docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cosched.core.request import Request
from cosched.core.view import OfflineOrder
from cosched.papers.hygen.policy import HygenPolicy
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.candidates import Candidate, admit_best, punishments
from cosched.schedule.phases import Steps, shortest_first, youngest_first


def best_batch(
    builder: PlanBuilder,
    order: OfflineOrder,
    fitting: Sequence[Candidate],
    benefit: int,
    seconds: float,
) -> Candidate:
    """By the score of the batch (Eq. 4). Of equals the first: prefix order, the bucket that is next
    in rotation before the others."""
    lost = punishments(builder, fitting)

    def score(place: int) -> float:
        candidate = fitting[place]
        gain = benefit + candidate.benefit - lost[place]
        return gain / (seconds + candidate.seconds)

    return fitting[max(range(len(fitting)), key=score)]


def _least_loss_first(builder: PlanBuilder) -> list[Request]:
    """Of the `_VICTIMS` youngest first the one that loses least by recomputing."""
    victims = [*youngest_first(builder)]
    num_unfinished = sum(1 for victim in victims if victim in builder.view.unfinished)
    end = num_unfinished + _VICTIMS
    few = victims[num_unfinished:end]
    few.sort(key=builder.view.preemption_gain)  # of equals the youngest
    return [*victims[:num_unfinished], *few, *victims[end:]]


_VICTIMS = 8
"""Running requests among which the one to stop is chosen."""


class EchoPolicy(HygenPolicy):
    """HyGen's two phases with offline admissions by score. See the module's docstring."""

    steps = Steps(
        admit=partial(admit_best, choose=best_batch),
        victims=_least_loss_first,
        decode_order=shortest_first,
    )
