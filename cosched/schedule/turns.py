"""Speculative decoding: iterations of decodes alone, or prefills beside them.

An iteration of decodes alone verifies drafts and brings `View.tokens_per_decode` tokens of each
request, one with prefills a single token. So what mixing costs does not depend on how much is
prefilled:

    mixing cost = time of the decodes beside a prefill - time of one token in decodes alone

It is paid at once where an online prefill is due. Offline prefills wait for company. What waiting
costs is the time that decodes alone would take less per token if all requests that have a slot
decoded too; when it adds up to the mixing cost, prefills are mixed in (as one rents skis until the
rent has reached their price: at most twice the cost of the best choice in hindsight). They do not
wait where they fill the longest iteration that the targets allow, and the cost is small beside it.

Where decodes are behind their targets and can catch up, they run alone, also where an online
prefill waits that will be in time.
"""

from __future__ import annotations

from typing import NamedTuple

from cosched.core.request import RequestClass
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.deadlines import Deadlines
from cosched.schedule.online_order import OnlineOrder

_CHEAP = 4.0
"""Time of prefills over the mixing cost from which the cost is small."""


class Turn(NamedTuple):
    """alone: decodes run alone. idle_s: what waiting for company has cost since the last prefill
    [s]."""

    alone: bool
    idle_s: float = 0.0


def next_turn(
    builder: PlanBuilder,
    deadlines: Deadlines,
    order: OnlineOrder,
    *,
    offline_s: float,
    idle_s: float,
) -> Turn:
    """offline_s: most time of an iteration with offline work. idle_s: of the turn before."""
    view, ledger = builder.view, builder.ledger
    if view.tokens_per_decode <= 1 or not view.running or not view.rules.mixed:
        return Turn(False)
    beside_s = ledger.seconds_with(1, 0)
    mixing_s = max(beside_s - deadlines.token_s, 0.0)
    if order.due or order.late:
        behind = deadlines.slacks.aimed_s < beside_s + mixing_s
        return Turn(behind and not order.borrows and deadlines.gains, idle_s)
    unfinished = [r for r in view.unfinished if r.request_class is RequestClass.OFFLINE]
    num_more = max(min(ledger.slots, view.num_offline), 0) + len(unfinished)
    if not num_more:
        return Turn(True, idle_s)
    prefill_s = offline_s - beside_s
    if 2 * offline_s < deadlines.slacks.aimed_s and prefill_s >= _CHEAP * mixing_s:
        # Waiting gives no more time: it is for company, where what waits does not fill it.
        first = unfinished[0] if unfinished else next(view.offline_order(), None)
        if first is not None and deadlines.prefill_s(first) * num_more >= prefill_s:
            return Turn(False)
    num, context = ledger.totals.num_decodes, ledger.totals.decode_context
    totals = ledger.totals.copy()
    totals.add_equal_decodes(num_more, context // num)
    more_s = view.predictor.predict_s(totals)
    idle_s += max(deadlines.alone_s - more_s * num / (num + num_more), 0.0)
    return Turn(idle_s < mixing_s or prefill_s < mixing_s or not deadlines.gains, idle_s)
