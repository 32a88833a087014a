"""Which decodes of online requests can meet their TPOT targets, and what time they leave.

    slack of a decode  first token + TPOT * (tokens it will have) - start of the iteration
    behind             its next token would be late: the slack is below the time of the iteration
    counts             it is in time, or can catch up before its reply ends (`_counts`)

A TPOT target below the time of the shortest iteration counts as none: the server's holds.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

from cosched.core.batch import BatchTotals
from cosched.core.estimates import Predictor
from cosched.core.request import Request
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder

_LEAST_BESIDE = 1.2
"""An iteration with online prefills may take this many times the time of the decodes alone where
decodes come first and meet their targets (`beside_s`)."""


def beside_s(alone_s: float, tpot_s: float) -> float:
    """Time of an iteration with online prefills where decodes are behind and come first [s]: at
    most half of what these leave of the TPOT target is for prefills, so that they catch up."""
    return min(_LEAST_BESIDE * alone_s, (alone_s + tpot_s) / 2)


def shortest_s(predictor: Predictor) -> float:
    """Predicted time of the shortest iteration that decodes anything [s]; without the predictor's
    margin no target below it can be met."""
    totals = BatchTotals()
    totals.add_decode(1)
    return predictor.predict_s(totals)


class DecodeSlacks(NamedTuple):
    """What the decodes leave of the next iteration. inf: there is none.

    least_s   how long the iteration may take for all their next tokens to be in time [s]
    aimed_s   the same for targets that are `aim` times theirs [s]
    tpot_s    the least TPOT target, the server's among them [s]
    """

    least_s: float
    aimed_s: float
    tpot_s: float


_Times = tuple[Request, float, float, float]
"""A request, its TPOT target, the time from its first to its next token by that target, and the
part of it that is over when the iteration starts [s]."""


class OnlineDecodes:
    """The running online requests of a plan that are not set aside."""

    def __init__(self, builder: PlanBuilder, settings: PolicySettings) -> None:
        assert settings.slo.tpot_s is not None, "the server's targets are always set"
        self._view = builder.view
        self._online = builder.online
        self._default_s = settings.slo.tpot_s
        self._aim = settings.budgets.aim

    def token_s(self, most_tier: float = math.inf) -> float:
        """Time of one token of each in iterations of decodes alone: their own, those of tiers up to
        `most_tier`, or other ranks' [s]."""
        view, totals = self._view, BatchTotals()
        online = self._online
        if most_tier < math.inf:
            online = online.where([request.tier <= most_tier for request in online.requests])
        totals.add_decodes(online.contexts)
        alone_s = max(view.predictor.predict_s(totals), view.others.alone_s)
        return alone_s / (1 + view.predictor.margin) / view.tokens_per_decode

    def slacks(self, *, token_s: float | None) -> DecodeSlacks:
        """token_s: requests that do not count at this pace are left out; None: all count."""
        least_s = aimed_s = math.inf
        least_tpot_s, aim = self._default_s, self._aim
        # Every plan does this for every running online request: no calls of min.
        for request, tpot_s, allowed_s, since_s in self._times:
            slack_s = allowed_s - since_s
            if (
                token_s is not None
                and (slack_s < 0 or token_s > tpot_s)
                and not self._counts(request, tpot_s, slack_s, token_s)
            ):
                continue
            if tpot_s < least_tpot_s:
                least_tpot_s = tpot_s
            if slack_s < least_s:
                least_s = slack_s
            one_aimed_s = aim * allowed_s - since_s
            if one_aimed_s < aimed_s:
                aimed_s = one_aimed_s
        return DecodeSlacks(least_s, aimed_s, least_tpot_s)

    def is_behind(self, tier: int, alone_s: float) -> bool:
        """True if a request of this tier is behind in an iteration of `alone_s`, and counts if no
        lower tier decodes."""
        token_s = self.token_s(tier)
        return any(
            request.tier == tier
            and self._aim * allowed_s - since_s < alone_s
            and self._counts(request, tpot_s, allowed_s - since_s, token_s)
            for request, tpot_s, allowed_s, since_s in self._times
        )

    def num_misses(self, delay_s: float, won_s: float) -> float:
        """How many more are expected to miss their targets if all wait for `delay_s`. Each wins
        `won_s` of it back with every token, unless its reply ends before; a share 2^(-n/median) of
        replies lasts n more tokens."""
        num = 0.0
        for request, _, allowed_s, since_s in self._times:
            behind_s = since_s - allowed_s
            before, after = (max(behind_s + s, 0.0) / won_s for s in (0.0, delay_s))
            median = max(self._view.length(request).median, 1)
            num += 2.0 ** (-before / median) - 2.0 ** (-after / median)
        return num

    def _counts(self, request: Request, tpot_s: float, slack_s: float, token_s: float) -> bool:
        """False: where a token of each decode takes `token_s`, it is expected to miss its target;
        or it is late and cannot catch up beside prefills."""
        if slack_s < 0:
            pace_s = min(beside_s(token_s, tpot_s), self._view.mean_iteration_s)
            if -slack_s > self._view.length(request).upper * (tpot_s - pace_s):
                return False
        if token_s <= tpot_s:
            return True
        return slack_s >= self._view.length(request).median * (token_s - tpot_s)

    @cached_property
    def _times(self) -> list[_Times]:
        start_s, default_s = self._view.start_s, self._default_s
        times: list[_Times] = []
        requests, contexts, _ = self._online
        for request, context in zip(requests, contexts.tolist(), strict=True):
            tpot_s, first_s = request.slo.tpot_s, request.first_token_s
            if tpot_s is None or (tpot_s < default_s and tpot_s < self._shortest_s):
                tpot_s = default_s
            allowed_s = tpot_s * (context - request.num_prompt_tokens)
            since_s = 0.0 if first_s is None else start_s - first_s
            times.append((request, tpot_s, allowed_s, since_s))
        return times

    @cached_property
    def _shortest_s(self) -> float:
        predictor = self._view.predictor
        return shortest_s(predictor) / (1 + predictor.margin)
