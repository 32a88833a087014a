"""How long an iteration with offline work should be in tolerance mode: chat's pace has a price.

The TPOT of online requests may rise in the mean, by a share that the operator promises. So a second
by which an iteration gets longer costs as much as online requests decode in it, and what it brings
is worth as much as in any batch (`cosched.schedule.chat_pace`):

    price = usual / (saved - pending) * online decodes / online decodes in the mean
    gain  = worth of the offline decodes + price of a prompt token * prompt tokens
            - price * time by which they make the iteration longer

The choice with the largest gain is made: how many offline requests decode, and beside them how many
prompt tokens. The first prompt tokens ride nearly free on iterations that read weights and KV;
offline decodes cost as much time as they are worth, so they come together, when few chats run.

What is spent shows in the TPOT of requests that end later. Until then it is `pending`. The less is
left of what was saved, the higher is the price: so the mean settles below what was promised.

No iteration makes a request slower than those that may be (p99) unless it is short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from cosched.core.batch import BatchTotals, Prefill
from cosched.core.request import RequestClass, num_tokens_of
from cosched.core.view import TpotHeadroom
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.candidates import first_candidate
from cosched.schedule.chat_pace import (
    LARGE,
    ROUNDED_UP,
    next_prompt,
    price_s,
    sizes_up_to,
    worth_s,
)
from cosched.schedule.time_budget import OfflinePart

_ENOUGH = 64
"""Offline requests that decode together about as efficiently as more would: with so many running no
prompt is begun, which would hold KV and wait."""

_ANY_PROMPT = Prefill(LARGE, 0)
"""Where none waits: its tokens would cost what decodes' tokens are worth."""

_RECENT = 1 / 2000
"""Weight of a plan in the mean number of online decodes."""


class Spent(NamedTuple):
    """What offline work has taken of the tolerance, from one plan to the next.

    num_plans   with online decodes
    num_chats   online decodes of a plan, in the mean; newer plans count more
    pending_s   by which requests that run will have a higher TPOT, their sum [s]
    """

    num_plans: int = 0
    num_chats: float = 0.0
    pending_s: float = 0.0

    def after(self, builder: PlanBuilder, alone_s: float) -> Spent:
        """With this plan. alone_s: time of its iteration without offline work [s]."""
        headroom = builder.view.tolerance_headroom
        num = len(builder.online.requests)
        if headroom is None or headroom.tpot is None or not num:
            return self
        added_s = max(builder.ledger.seconds() - alone_s, 0.0)
        # A request ends after so many tokens, and what it was delayed by with it.
        pending_s = self.pending_s
        pending_s += (added_s * num - pending_s) / max(headroom.tpot.num_tokens, 1.0)
        num_plans = self.num_plans + 1
        num_chats = self.num_chats + (num - self.num_chats) * max(_RECENT, 1 / num_plans)
        return Spent(num_plans, num_chats, pending_s)

    def price(self, headroom: TpotHeadroom, num_online: int) -> float:
        """Of a second, in seconds of offline work."""
        room = 1.0
        if headroom.usual_s:
            room = (headroom.saved_s - self.pending_s) / headroom.usual_s
        return num_online / max(self.num_chats, 1.0) / room if room > 0 else math.inf


def tolerated(
    builder: PlanBuilder, spent: Spent, headroom: TpotHeadroom, most_s: float
) -> OfflinePart:
    """What offline work may take of an iteration, beside what the builder's ledger has.

    most_s  what targets and a tolerance for TTFT allow [s]
    """
    num_online = len(builder.online.requests)
    if not num_online:
        return OfflinePart(most_s)
    alone_s = builder.ledger.seconds()
    price = spent.price(headroom, num_online)
    slack_s = _slack_s(builder, headroom.most_s)
    most_s = min(most_s, max(slack_s, (1 + headroom.share) * alone_s))
    best, best_gain = OfflinePart(0.0, 0), 0.0
    for part, worth in _choices(builder, most_s):
        gain = worth - price * (part.seconds - alone_s) if part.seconds > alone_s else worth
        if part.seconds <= most_s and gain > best_gain:
            best, best_gain = part, gain
    return best._replace(seconds=best.seconds * ROUNDED_UP)


def _choices(builder: PlanBuilder, most_s: float) -> Iterator[tuple[OfflinePart, float]]:
    """Numbers of decodes and of prompt tokens; with what they are worth [s]."""
    view, totals = builder.view, builder.ledger.totals
    predictor = view.predictor
    decodes = builder.running_of(RequestClass.OFFLINE)
    num_running = len(decodes.requests)
    context = int(builder.reads_of(decodes).sum()) // num_running if num_running else 0
    prompt = next_prompt(builder)
    token_s = price_s(predictor, prompt or _ANY_PROMPT)
    if prompt is not None and not _may_go_on(builder, num_running):
        prompt = None
    # None of them decodes, or all, half, a quarter, and so on.
    for num in (0, *(num_running >> halved for halved in range(num_running.bit_length()))):
        beside, alone = totals.copy(), BatchTotals()
        for one in (beside, alone):
            one.add_equal_decodes(num, context)
        worth = worth_s(predictor, alone, token_s) if num else 0.0
        yield OfflinePart(predictor.predict_s(beside), num), worth
        if prompt is not None:
            for num_new, seconds in sizes_up_to(predictor, beside, prompt, most_s):
                if seconds > most_s:  # the smallest size
                    num_new = predictor.max_prefill(beside, prompt.num_cached, most_s, num_new)
                    seconds = most_s if num_new else math.inf
                yield OfflinePart(seconds, num, admits=True), worth + token_s * num_new


def _may_go_on(builder: PlanBuilder, num_running: int) -> bool:
    """A prompt is under way, or there is memory for one and few replies wait to be decoded."""
    if any(r.request_class is RequestClass.OFFLINE for r in builder.unfinished()):
        return True
    if num_running >= _ENOUGH:
        return False
    view = builder.view
    first = first_candidate(view.offline_order())
    if first is None:
        return False
    return builder.ledger.refusal(first, view.match(first), at_most=num_tokens_of(first)) is None


def _slack_s(builder: PlanBuilder, most_tpot_s: float) -> float:
    """Time until the first online decode would have a higher TPOT than this [s]."""
    if most_tpot_s == math.inf:
        return math.inf
    start_s = builder.view.start_s
    return min(
        (
            most_tpot_s * (context - request.num_prompt_tokens) - (start_s - request.first_token_s)
            for request, context in zip(*builder.online[:2], strict=True)
            if request.first_token_s is not None
        ),
        default=math.inf,
    )
