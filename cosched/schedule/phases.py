"""Two phases over one ledger: online requests first, offline ones into what they leave (HyGen §4.1,
Algorithm 1). The steps from which such policies are composed.

Running requests decode. Online prefills take what they need, oldest first, and short prompts join a
long one. Where request slots or KV memory are missing, running offline requests are preempted,
youngest first, with their KV kept in the radix tree; an unfinished offline prefill is preempted if
an online one needs its place. Offline requests are admitted in the pool's order, running before
waiting. Of requests that share a prefix which is not cached, one computes it and the others follow.

A policy makes a `PlanBuilder` and a `Pace`, which says how much of the iteration's time each phase
may take, and calls `two_phases` with the steps in which it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np

from cosched.core.batch import IntArray
from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass, num_encoded, num_tokens_of
from cosched.core.view import Decodes, OfflineOrder
from cosched.schedule.base import Pace
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.following import LEAST_SHARED, UnderWay, follow, without_output
from cosched.schedule.media import must_encode, tokens_with_media
from cosched.schedule.preemption import has_checkpoints, should_finish

_BESIDE_PART = 4
"""One in this many tokens of an unfinished online prefill's chunk may go to waiting requests."""

_MOST_BESIDE = 16
"""Waiting online requests that are considered for it."""

_MOST_FOLLOWING = 64
"""Waiting online requests that may follow a prefix under way: those behind are not looked at."""

_LEAST_CHUNK = 16
"""Least prompt tokens of a chunk, unless the prompt ends in fewer."""

_LEAST_PROGRESS = 64
"""Prompt tokens that an iteration without other work computes, however long it takes."""


def youngest_first(builder: PlanBuilder) -> Iterator[Request]:
    """Offline requests that may be preempted: unfinished prefills, then the youngest. Those that
    had better finish (`should_finish`) come last. What is preempted meanwhile changes nothing."""
    unfinished = [r for r in builder.unfinished() if r.request_class is RequestClass.OFFLINE]
    running = builder.running_of(RequestClass.OFFLINE)
    youngest = oldest_first(running)[::-1].tolist()
    victims: Iterable[Request] = (running.requests[place] for place in youngest)
    if has_checkpoints(builder.view):
        victims = sorted(victims, key=partial(should_finish, builder.view))
    return (r for r in chain(unfinished, victims) if r.traits.can_preempt)


def admit_in_order(
    builder: PlanBuilder, pace: Pace, order: OfflineOrder, *, most: int | None = None
) -> None:
    """Admit offline requests in the pool's order until one does not fit. most: None: any number."""
    num_admitted = 0
    num_left = offline_admissions_left(builder)
    for request in order:
        if must_wait(builder, request):
            continue
        if num_admitted == num_left:
            builder.skip(request, SkipReason.OPERATOR_LIMIT)
            break
        if num_admitted == most:
            builder.skip(request, SkipReason.RATE_LIMIT)
            break
        if builder.ledger.slots <= 0:
            builder.skip(request, SkipReason.REQUEST_SLOTS)
            break
        if not has_time(builder, pace):
            builder.skip(request, SkipReason.LATENCY_BUDGET)
            break
        match = builder.view.match(request)
        at_most = admission_tokens(builder, pace, request, match, order)
        if not builder.admit(request, match, at_most):
            break
        num_admitted += 1
        follow(order, request, match.cached)


def oldest_first(decodes: Decodes) -> IntArray:
    return np.argsort(decodes.arrivals)


def shortest_first(decodes: Decodes) -> IntArray:
    """The shortest contexts generate the most tokens per second; of equals the oldest first."""
    return np.lexsort((decodes.arrivals, decodes.contexts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """In what policies of two phases differ.

    admit         admits waiting offline requests
    victims       offline requests to preempt for an online one, in order
    decode_order  places of the offline requests that decode first if not all fit
    """

    admit: Callable[[PlanBuilder, Pace, OfflineOrder], None] = admit_in_order
    victims: Callable[[PlanBuilder], Iterable[Request]] = youngest_first
    decode_order: Callable[[Decodes], IntArray] = oldest_first


_DEFAULT = Steps()


def victims_for(builder: PlanBuilder, *, steps: Steps, tier: int) -> Iterator[Request]:
    """Requests to preempt for an online one of this tier, in order: offline ones, then online ones
    of lower tiers. Few are looked at: hundreds may run."""
    return chain(steps.victims(builder), builder.below(tier))


def two_phases(
    builder: PlanBuilder,
    pace: Pace,
    steps: Steps = _DEFAULT,
    *,
    waiting: Iterable[Request] | None = None,
    decodes_alone: bool = False,
    fills: bool = True,
) -> None:
    """Fill a plan. The builder's ledger has the running online requests' decodes already. waiting:
    online requests in the order of admission; None: oldest first. decodes_alone: no prefills, if
    any request decodes. fills: offline prefills may take the rest."""
    preempt_beyond_limit(builder, steps)
    make_room_for_decodes(builder, steps)
    if must_decode(builder) or (decodes_alone and builder.decodes_any()):
        pace.begin_offline()
        _decode_offline(builder, pace, steps)
        return
    online = builder.view.online if waiting is None else waiting
    is_online_served = _serve_online(builder, pace, steps, online)
    pace.begin_offline()
    _decode_offline(builder, pace, steps)
    if is_online_served and fills:
        _prefill_offline(builder, pace, steps)
    _preempt_offline_left_out(builder)


def preempt_beyond_limit(builder: PlanBuilder, steps: Steps) -> None:
    """Preempt running offline requests beyond the operator's limit, if the operator says so."""
    limits = builder.view.offline_limits
    if limits.stop_running and limits.most_running is not None:
        num_beyond = num_offline_running(builder) - limits.most_running
        for victim in islice(steps.victims(builder), max(num_beyond, 0)):
            builder.preempt(victim)


def make_room_for_decodes(builder: PlanBuilder, steps: Steps) -> None:
    """Preempt offline requests until all others have memory for their next token; then an
    unfinished online prefill, which holds memory and generates nothing."""
    if builder.ledger.decodes_fit():
        return
    highest = min((request.tier for request in builder.online.requests), default=0)
    victims = [*victims_for(builder, steps=steps, tier=highest)]
    unfinished = [r for r in builder.unfinished() if r.traits.can_preempt and r not in victims]
    for victim in (*victims, *unfinished):
        builder.preempt(victim)
        if builder.ledger.decodes_fit():
            break


def must_decode(builder: PlanBuilder) -> bool:
    """True if prefill and decode cannot share a batch, alternate, and it is time to decode; or if
    it is for other ranks. An unfinished prefill stays as it is."""
    rules = builder.view.rules
    if builder.view.others.must_decode:
        return True
    return rules.must_decode and not rules.mixed and builder.decodes_any()


def _preempt_offline_left_out(builder: PlanBuilder) -> None:
    """An unfinished offline prefill that does not continue releases its memory; an online one keeps
    what it has computed."""
    for request in [*builder.unfinished()]:
        if (
            request.request_class is RequestClass.OFFLINE
            and request.rid not in builder.prefill
            and request.traits.can_preempt
        ):
            builder.preempt(request)


def _serve_online(
    builder: PlanBuilder, pace: Pace, steps: Steps, waiting: Iterable[Request]
) -> bool:
    """Online prefills. False: a request still waits, so no offline prefill may start. An unfinished
    prefill comes before waiting requests."""
    for request in builder.unfinished():
        if builder.is_aside(request) and request.traits.can_preempt:
            continue
        if request.request_class is RequestClass.ONLINE or not request.traits.can_preempt:
            _admit_beside(builder, pace, request, waiting)
            continue_online(builder, pace, steps, request)
    if builder.preempts_online_prefill():
        return False
    is_served = True
    num_following = 0
    under_way = UnderWay(builder)
    for request in waiting:
        if request.rid in builder.prefill:
            continue
        if under_way.has_prefix_of(request):
            num_following += 1
            if num_following == _MOST_FOLLOWING:
                break
            continue
        if admit_online(builder, pace, steps, request):
            continue
        is_served = False
        if builder.runs_anything():  # on an idle engine it does not keep others from running
            break
    return is_served


def _admit_beside(
    builder: PlanBuilder, pace: Pace, unfinished: Request, waiting: Iterable[Request]
) -> None:
    """Whole short prompts that wait behind a long one join its chunks, of which they get a part;
    beside an offline prompt nearly all."""
    view, ledger = builder.view, builder.ledger
    is_offline = unfinished.request_class is RequestClass.OFFLINE  # it cannot be preempted
    remaining = num_tokens_of(unfinished) - unfinished.num_computed_tokens
    most = _online_tokens(builder, pace, unfinished, unfinished.num_computed_tokens)
    chunk = ledger.continuation(unfinished, at_most=most, unreserved=True)
    if remaining <= (chunk if is_offline else most):
        return
    left = chunk // _BESIDE_PART
    if is_offline:
        left = max(left, chunk - max(_LEAST_PROGRESS, view.caps.page_size))
    for request in islice(waiting, _MOST_BESIDE):
        if left <= 0 or ledger.slots <= 1:
            return
        if must_wait(builder, request):
            continue
        match = view.match(request)
        num_new = num_tokens_of(request) - match.cached
        num_kv = view.caps.ceil_to_page(num_new) + match.evictable + match.to_load
        if (
            num_new <= left
            and num_kv + chunk + 2 * view.caps.page_size <= ledger.kv.available
            and pace.online_tokens(
                match.cached, num_new, encoded=num_encoded(request, match.cached, num_new)
            )
            >= num_new
            and ledger.chunk(request, match) == num_new
            and builder.admit(request, match, num_new)
        ):
            left -= num_new


def continue_online(builder: PlanBuilder, pace: Pace, steps: Steps, request: Request) -> None:
    """Continue an unfinished online prefill, preempting offline requests if that makes it fit."""
    at_most = _online_tokens(builder, pace, request, request.num_computed_tokens)
    if at_most > 0 and builder.ledger.continuation(request, at_most=at_most) <= 0:
        for victim in victims_for(builder, steps=steps, tier=request.tier):
            builder.preempt(victim)
            if builder.ledger.continuation(request, at_most=at_most) > 0:
                break
    # An online prefill does not wait for memory that its output may need later: it continues if
    # there is memory for the chunk itself.
    builder.continue_prefill(request, at_most, unreserved=True)


def admit_online(builder: PlanBuilder, pace: Pace, steps: Steps, request: Request) -> bool:
    """Admit a request, preempting offline ones if that makes it fit. False: it keeps its place, and
    no request is admitted before it."""
    if must_wait(builder, request):
        return True
    match = builder.view.match(request)
    at_most = _online_tokens(builder, pace, request, match.cached)
    if builder.admit(request, match, at_most):
        return True
    if at_most > 0:
        victims = victims_for(builder, steps=steps, tier=request.tier)
        for victim in enough_victims(builder, victims, request, match, at_most):
            builder.preempt(victim)
    return builder.admit(request, match, at_most)


def enough_victims(
    builder: PlanBuilder,
    victims: Iterable[Request],
    request: Request,
    match: Match,
    at_most: int,
) -> list[Request]:
    """The first of the victims whose preemption admits a request; none if preempting all of them
    is not enough."""
    trial = builder.ledger.fork()
    chosen: list[Request] = []
    for victim in victims:
        reason = trial.refusal(request, match, at_most=at_most)
        if reason is None:
            return chosen
        if has_checkpoints(builder.view) and should_finish(builder.view, victim):
            return []
        if reason is SkipReason.UNFINISHED_PREFILL or (
            reason is SkipReason.TOKEN_BUDGET and builder.prefill
        ):
            return []  # what is in the way is online
        trial.refund_preemption(victim)
        chosen.append(victim)
    return chosen if trial.refusal(request, match, at_most=at_most) is None else []


def _decode_offline(builder: PlanBuilder, pace: Pace, steps: Steps) -> None:
    """Running requests that are set aside, then offline ones, decode while they fit; the decode of
    the others pauses."""
    if builder.counts_all_decodes:
        return
    for decodes in (builder.aside(), builder.running_of(RequestClass.OFFLINE)):
        if decodes.requests:
            _decode_fitting(builder, pace, steps, decodes)


def _decode_fitting(builder: PlanBuilder, pace: Pace, steps: Steps, decodes: Decodes) -> None:
    reads = builder.reads_of(decodes)
    if builder.view.rules.partial and not pace.decodes_fit(reads):
        places = steps.decode_order(decodes)
        num_fitting = pace.offline_decodes(reads[places])
        unheld = builder.pause_all(decodes.at(places[num_fitting:]).requests)
        reads = reads[places[:num_fitting]]
        if unheld:
            reads = np.concatenate((reads, builder.reads_of(Decodes.of(unheld))))
    builder.ledger.add_decodes(reads)


def _prefill_offline(builder: PlanBuilder, pace: Pace, steps: Steps) -> None:
    for request in builder.unfinished():
        if request.request_class is RequestClass.OFFLINE and request.traits.can_preempt:
            builder.continue_prefill(
                request, offline_tokens(builder, pace, request, request.num_computed_tokens)
            )
    order = builder.view.offline_order()
    # Running requests come before waiting ones, which would only take their memory.
    reason = SkipReason.LATENCY_BUDGET if builder.paused and not pace.admits else None
    if owes_recomputing(builder):
        reason = SkipReason.RECOMPUTE_DEBT
    if reason is not None:
        front = next(order, None)
        if front is not None:
            builder.skip(front, reason)
        return
    if order.knows_prefixes:
        for request in without_output(builder.view):
            follow(order, request, request.num_prefix_tokens)
    steps.admit(builder, pace, order)


def owes_recomputing(builder: PlanBuilder) -> bool:
    """True if preemptions have caused too much recomputation: no offline request is admitted beside
    a running one."""
    return builder.view.recompute_debt_s > 0 and num_offline_running(builder) > 0


def must_wait(builder: PlanBuilder, request: Request) -> bool:
    """True if a waiting request cannot be admitted whatever the headroom; others may be."""
    view = builder.view
    if (reason := view.why_blocked(request)) is not None:
        builder.skip(request, reason)
        return True
    if (
        view.rules.must_decode
        and not request.traits.can_mix
        and view.caps.mixed_batches
        and builder.decodes_any()
    ):
        builder.skip(request, SkipReason.DECODES_DUE)
        return True
    return False


def offline_admissions_left(builder: PlanBuilder) -> int | None:
    """Offline requests that may be admitted by the operator's limit; None: any number."""
    most = builder.view.offline_limits.most_running
    return None if most is None else max(most - num_offline_running(builder), 0)


def num_offline_running(builder: PlanBuilder) -> int:
    """Offline requests under way that this plan does not preempt."""
    num_unfinished = sum(r.request_class is RequestClass.OFFLINE for r in builder.unfinished())
    return len(builder.running_of(RequestClass.OFFLINE).requests) + num_unfinished


def has_time(builder: PlanBuilder, pace: Pace) -> bool:
    """False: no offline prefill fits, so the cache need not be searched (the most expensive part of
    a plan)."""
    return pace.has_offline_time() or not builder.runs_anything()


def _online_tokens(builder: PlanBuilder, pace: Pace, request: Request, num_cached: int) -> int:
    """Prompt tokens of an online prefill that fit the time. On an idle device at least some do:
    with a fixed budget below the shortest iteration nothing would ever run."""
    remaining = num_tokens_of(request) - num_cached
    num_tokens = tokens_with_media(
        request,
        num_cached,
        remaining,
        lambda limit, encoded: pace.online_tokens(num_cached, limit, encoded=encoded),
    )
    if num_tokens and not request.traits.can_cut:
        return remaining
    if num_tokens:
        # If chunks have a minimum size, one that is too long is better than none.
        return max(num_tokens, min(remaining, builder.view.caps.chunk_unit))
    return 0 if builder.runs_anything() else _least(builder, request, remaining)


def offline_tokens(
    builder: PlanBuilder,
    pace: Pace,
    request: Request,
    num_cached: int,
    *,
    is_last: bool = False,
) -> int:
    """Prompt tokens of an offline prefill that fit the time; 0 for a very short chunk, which would
    cost a forward pass of its own."""
    remaining = num_tokens_of(request) - num_cached
    num_tokens = tokens_with_media(
        request,
        num_cached,
        remaining,
        lambda limit, encoded: pace.offline_tokens(
            num_cached, limit, encoded=encoded, is_last=is_last
        ),
    )
    caps = builder.view.caps
    least = max(_LEAST_CHUNK, caps.chunk_unit, *(m.least_chunk for m in builder.view.memories))
    if num_tokens >= (min(remaining, least) if request.traits.can_cut else remaining):
        return num_tokens
    # On an idle device it runs in any case, and corrects a prediction that is too long.
    num_least = _least(builder, request, remaining)
    if not builder.runs_anything() or must_encode(builder.view, request, num_cached, num_least):
        return num_least
    return 0


def admission_tokens(
    builder: PlanBuilder,
    pace: Pace,
    request: Request,
    match: Match,
    order: OfflineOrder | None = None,
) -> int:
    """Prompt tokens with which an offline request may be admitted; the last one for which there is
    a slot may stay unfinished. With checkpoints the first chunk ends where the prompt parts from
    those of others of `order`: they find a checkpoint there."""
    ledger = builder.ledger
    is_last = ledger.slots == 1 and ledger.unfinished > 0
    at_most = offline_tokens(builder, pace, request, match.cached, is_last=is_last)
    can_end = ledger.unfinished > 0 and request.traits.can_cut
    if order is not None and has_checkpoints(builder.view) and can_end:
        num_shared = order.num_shared(request) - match.cached
        if LEAST_SHARED <= num_shared < at_most:
            return num_shared
    return at_most


def _least(builder: PlanBuilder, request: Request, remaining: int) -> int:
    """Prompt tokens that an idle engine computes whatever the time limit."""
    if not request.traits.can_cut:
        return remaining
    return min(remaining, max(_LEAST_PROGRESS, builder.view.caps.chunk_unit))
