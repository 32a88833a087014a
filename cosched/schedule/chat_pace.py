"""How long an iteration with offline work should be: the pace of chat beside it.

A target is a ceiling. Below it an iteration is as long as the batch needs:

    price of a prompt token   its time in an iteration of `LARGE` prompt tokens alone
    worth of the decodes      time of reading their KV, and that price for each of them
    efficiency of a size      (worth of the decodes + price * prompt tokens) / predicted time

Reading the weights and the KV hides the first hundreds of prompt tokens, so efficiency rises with
the size of an iteration, in steps where kernels fill their tiles, and levels off: on a fast GPU far
below the TPOT target. Of the sizes whose efficiency is within `cost` of the best one, the smallest
is chosen. So chat decodes as fast as the batch can afford, and KV is held for a shorter time. Where
batches do not mix, the time of a size is that of its prefills and of the decodes that follow.

A job needs as many iterations as its longest reply has tokens. Where these are more than its
prompts fill (`Course.is_pressed`), iterations are needed anyway: `_PRESSED` of the time of the
decodes alone is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cosched.core.batch import BatchTotals, Prefill
from cosched.core.estimates import Predictor
from cosched.core.request import RequestClass, num_tokens_of
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.candidates import first_candidate

LARGE = 2048
"""Prompt tokens of an iteration in which they cost what they cost in any larger one."""

_SIZES = (*range(64, 513, 64), 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 8192)
"""Tokens of an iteration, decodes among them: where kernels fill a tile."""

_LEAST = 32
"""Fewer prompt tokens are no size of their own."""

_NOTICED = 0.9
"""Of the longest iteration: one that is not shorter than this makes no pace that chat notices."""

ROUNDED_UP = 1 + 1e-3

_PRESSED = 1 / 3
"""Share of the time of the decodes alone that an iteration saves at the end of a job that a long
reply ends. Not all of it, since requests that begin later may have replies as long."""

_SEEN = 6
"""Replies seen for each that runs: with fewer, one may become as long as it is allowed."""

_LOOK_EVERY = 16
"""Plans of which one looks for the longest reply."""

_PROBE_EVERY = 64
"""Plans of which one tries another size, so that the predictor learns where the steps are."""

_PROBE_STEP = 5

_RECENT = 1 / 256
"""Weight of a plan in `Course.per_plan`."""


class Course(NamedTuple):
    """How the offline work goes, from one plan to the next.

    num_plans     with offline work
    num_admitted  offline requests that they have admitted
    per_plan      how many a plan admits, newer ones counting more
    weight        plans that this is the mean of, at most 1 / `_RECENT`
    is_pressed    a running reply may take more iterations than the prompts that wait
    """

    num_plans: int = 0
    num_admitted: int = 0
    per_plan: float = 0.0
    weight: float = 0.0
    is_pressed: bool = False

    def after(self, builder: PlanBuilder) -> Course:
        """With this plan."""
        view = builder.view
        if not (view.num_offline or view.running_of(RequestClass.OFFLINE).requests):
            return self
        num = builder.num_offline_admitted()
        before = (1 - _RECENT) * self.weight
        is_pressed = self.is_pressed
        if self.num_plans % _LOOK_EVERY == 0:
            waiting = view.num_offline + view.num_behind
            is_pressed = waiting < self._longest_reply(builder) * self.per_plan
        return Course(
            num_plans=self.num_plans + 1,
            num_admitted=self.num_admitted + num,
            per_plan=(before * self.per_plan + num) / (before + 1),
            weight=before + 1,
            is_pressed=is_pressed,
        )

    def _longest_reply(self, builder: PlanBuilder) -> int:
        """Tokens that a running offline request may still generate, the most of all."""
        view = builder.view
        running = builder.running_of(RequestClass.OFFLINE).requests
        if self.num_admitted < _SEEN * len(running):
            return max((r.max_new_tokens - r.num_output_tokens for r in running), default=0)
        return view.longest_left(RequestClass.OFFLINE)


def paced_s(builder: PlanBuilder, course: Course, most_s: float, *, cost: float) -> float:
    """How long an iteration with offline work should be, beside what the builder's ledger has and
    the decodes of all running offline requests [s].

    most_s  what the targets allow; it is the answer where no chat is served, no offline prompt
            waits, or iterations that long have not been seen
    cost    share of the best efficiency that may be lost
    """
    totals = builder.ledger.totals.copy()
    if not builder.online.requests and not totals.num_new:
        return most_s
    if not builder.counts_all_decodes:
        totals.add_decodes(builder.reads_of(builder.running_of(RequestClass.OFFLINE)))
    predictor = builder.view.predictor
    if not totals.num_decodes or predictor.predict_s(totals) >= most_s:
        return most_s
    prompt = next_prompt(builder)
    if prompt is None:
        return most_s
    sizes = sizes_up_to(predictor, totals, prompt, most_s)
    if not predictor.knows(_beside(BatchTotals(), sizes[-1][0], prompt)):
        return most_s
    num_probes, is_none = divmod(course.num_plans, _PROBE_EVERY)
    if not is_none:
        return min(most_s, sizes[num_probes * _PROBE_STEP % len(sizes)][1] * ROUNDED_UP)
    # What chat gets of each second is the same at any pace: faster decodes are fewer at once.
    chat_per_s = len(builder.online.requests) / totals.num_decodes
    chat_per_s /= builder.view.mean_iteration_s or most_s
    cycles = _cycles(builder, totals, sizes, _PRESSED if course.is_pressed else 0.0)
    gains = efficiencies(
        predictor, totals, prompt, cycles, chat_per_s, encoder_s=_encoder_s(builder)
    )
    chosen_s = sizes[smallest(gains, cost)][1]
    return chosen_s * ROUNDED_UP if chosen_s < _NOTICED * most_s else most_s


def efficiencies(
    predictor: Predictor,
    totals: BatchTotals,
    prompt: Prefill,
    sizes: Sequence[tuple[int, float]],
    chat_per_s: float = 0.0,
    *,
    encoder_s: float = 0.0,
) -> list[float]:
    """Of iterations with so many tokens of such prompts beside `totals`, that take so long [s]: the
    worth of what they compute over their time, less that of chat.

    chat_per_s  share of the decodes that is chat's, in each second
    encoder_s   time of the encoder for each token of the prompts, in the mean: it is worth what it
                takes, and makes small sizes less of a gain [s]
    """
    token_s = price_s(predictor, prompt)
    worth = token_s * totals.num_new + worth_s(predictor, totals, token_s)
    chat = worth * chat_per_s
    token_s += encoder_s
    return [
        (worth + token_s * num_new) / (seconds + encoder_s * num_new) - chat
        for num_new, seconds in sizes
    ]


def _encoder_s(builder: PlanBuilder) -> float:
    """Time of the encoder for each token of the next offline prompt, in the mean [s]."""
    unfinished = [r for r in builder.unfinished() if r.request_class is RequestClass.OFFLINE]
    request = unfinished[0] if unfinished else first_candidate(builder.view.offline_order())
    if request is None or not request.traits.media:
        return 0.0
    num_encoded = sum(media.num_tokens for media in request.traits.media)
    added_s = builder.ledger.seconds_with(1, 0, encoded=num_encoded)
    added_s -= builder.ledger.seconds_with(1, 0)
    return added_s / request.num_prompt_tokens


def _cycles(
    builder: PlanBuilder,
    totals: BatchTotals,
    sizes: Sequence[tuple[int, float]],
    saved: float,
) -> Sequence[tuple[int, float]]:
    """Sizes with the time until the next such iteration, less what it saves at the end of the job:
    where batches do not mix, decodes have one of their own in between.

    saved  share of the time of the decodes alone
    """
    view = builder.view
    between = -saved if view.rules.mixed else 1 - saved
    if not between:
        return sizes
    alone_s = view.predictor.predict_s(totals.decodes_only())
    return [(num_new, seconds + between * alone_s) for num_new, seconds in sizes]


def smallest(gains: Sequence[float], cost: float) -> int:
    """The place of the first that loses at most this share of the best."""
    best = max(gains)
    least = best - abs(best) * cost
    return next(place for place, gain in enumerate(gains) if gain >= least)


def next_prompt(builder: PlanBuilder) -> Prefill | None:
    """What an offline request computes next; None: none waits. The last tokens of a prompt say
    nothing of those that follow them."""
    view = builder.view
    unfinished = [r for r in builder.unfinished() if r.request_class is RequestClass.OFFLINE]
    for request in unfinished:
        num_cached = request.num_computed_tokens
        num_new = num_tokens_of(request) - num_cached
        if num_new >= _SIZES[0]:
            return Prefill(num_new, num_cached)
    first = first_candidate(view.offline_order()) if view.num_offline else None
    if first is not None:
        num_cached = view.match(first).cached
        return Prefill(max(num_tokens_of(first) - num_cached, 1), num_cached)
    return Prefill(num_tokens_of(unfinished[0]), 0) if unfinished else None


def sizes_up_to(
    predictor: Predictor, totals: BatchTotals, prompt: Prefill, most_s: float
) -> Sequence[tuple[int, float]]:
    """Prompt tokens and predicted time of each size up to `most_s`, one at least."""
    in_batch = totals.num_new + totals.num_decodes
    sizes: list[tuple[int, float]] = []
    for size in _SIZES:
        num_new = size - in_batch
        if num_new < _LEAST:
            continue
        seconds = predictor.predict_s(_beside(totals, num_new, prompt))
        if seconds > most_s and sizes:
            break
        sizes.append((num_new, seconds))
    return sizes or [(_LEAST, predictor.predict_s(_beside(totals, _LEAST, prompt)))]


def price_s(predictor: Predictor, prompt: Prefill) -> float:
    """Time of a prompt token in the largest iteration known, up to `LARGE` of them [s]."""
    num_new = LARGE
    alone = _beside(BatchTotals(), num_new, prompt)
    while num_new > _LEAST and not predictor.knows(alone):
        num_new //= 2
        alone = _beside(BatchTotals(), num_new, prompt)
    return predictor.predict_s(alone) / num_new


def worth_s(predictor: Predictor, totals: BatchTotals, token_s: float) -> float:
    """Of the decodes: reading their KV, and a token of each through the layers [s]. token_s: price
    of a prompt token."""
    decodes = totals.decodes_only()
    empty = BatchTotals()
    empty.add_equal_decodes(decodes.num_decodes, 1)
    reading_s = predictor.predict_s(decodes) - predictor.predict_s(empty)
    return max(reading_s, 0.0) + decodes.num_decodes * token_s


def _beside(totals: BatchTotals, num_new: int, prompt: Prefill) -> BatchTotals:
    """`totals` and `num_new` tokens of prompts that are like this one. O(1)."""
    totals = totals.copy()
    num_whole, rest = divmod(num_new, prompt.num_new)
    totals.add_prefills(num_whole, prompt.num_new, prompt.num_cached)
    if rest:
        totals.add_prefill(rest, prompt.num_cached)
    return totals
