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

* Candidates are the first of each bucket, not all requests of the pool: a plan has some
  milliseconds. `RegularEchoPolicy` takes only the bucket that fits the lengths of the batch (§6).
* The regularity of a batch is not in the score by itself: it is in the predicted time, as far as
  the predictor has the longest context (§5.2, Eq. 7).
* The base is SGLang with mixed batches. A running request that does not fit pauses, it is not
  preempted; preempted ones keep their KV in the radix tree until the memory is needed.
* Punishment knows the prefixes of the candidates, and assumes that the cache gives up what no
  request waits for first.
* `echo-bs+e`, `+s` and `+m` predict with cosched's predictor, which learns while the server runs.
  `echo-literal` predicts with the paper's, fitted to a profile, with no correction and no margin.
* Deadlines count from the first token (`cosched.schedule.deadlines`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cosched.core.request import Request, num_tokens_of
from cosched.core.view import OfflineOrder
from cosched.papers.hygen.policy import HygenPolicy
from cosched.papers.hygen.victims import latest_by
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.candidates import Candidate, admit_best, punishments
from cosched.schedule.phases import Steps, shortest_first


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


def regular_batch(
    builder: PlanBuilder,
    order: OfflineOrder,
    fitting: Sequence[Candidate],
    benefit: int,
    seconds: float,
) -> Candidate:
    """`best_batch` of the bucket whose lengths are nearest to those in the batch, and of what is
    cached: "the scheduler selects requests from the tree corresponding to the appropriate bucket
    based on the current batch and the KV cache" (Echo §6). Near is a ratio: 2,000 tokens are as
    near to 1,000 as to 4,000."""
    totals = builder.ledger.totals
    num_requests = totals.num_decodes + totals.num_prefills
    if num_requests:
        mean = (totals.decode_context + totals.num_new + totals.num_cached) / num_requests
        nearest = min(fitting, key=lambda c: abs(math.log(num_tokens_of(c.request) / mean)))
        fitting = [c for c in fitting if c.bucket == nearest.bucket or c.match.cached]
    return best_batch(builder, order, fitting, benefit, seconds)


def _least_loss_first(builder: PlanBuilder) -> list[Request]:
    """Of the latest the one that loses least by recomputing."""
    return latest_by(builder, builder.view.preemption_gain)


class EstimatingPolicy(HygenPolicy):
    """BS+E: the base in a budget of predicted time."""

    steps = Steps()


class EchoPolicy(HygenPolicy):
    """HyGen's two phases with offline admissions by score. See the module's docstring."""

    steps = Steps(
        admit=partial(admit_best, choose=best_batch),
        victims=_least_loss_first,
        decode_order=shortest_first,
    )


class RegularEchoPolicy(EchoPolicy):
    """Echo with candidates of about the lengths of the current batch (§6)."""

    steps = replace(EchoPolicy.steps, admit=partial(admit_best, choose=regular_batch))
