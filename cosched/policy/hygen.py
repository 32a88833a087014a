"""HyGen: milliseconds instead of tokens (HyGen §4, Algorithm 1).

Idea         every iteration has a time budget. Online decodes are in it, online prefills take what
             they need, and offline work fills what the latency predictor says is left.
Assumptions  the predictor knows how long a batch takes before it runs; prefill and decode share an
             iteration; a running request can sit out an iteration with its KV kept.
Good         keeps the token gap whatever the batch is made of; needs no tuned chunk size; fills
             idle hours with large chunks.
Bad          only as good as the predictor; spends slack that a burst a moment later would want.
Parameters   TTFT and TPOT targets [s], per request or the server's; `Budgets` below. With
             `latency_budget_s` the budget of an iteration is fixed, as the SLO-aware profiler finds
             it (HyGen §4.2); without, it follows from the deadlines.

The budget of an iteration (Echo §5.2: the tightest online deadline in it)

    slack of a running request   first token + TPOT * (tokens it will have) - start of the iteration
    slack of a prefill           arrival + TTFT - start of the iteration
    online phase                 the least slack of the running online requests, at least TPOT
    offline phase                the least slack of all online requests, at most `burst` * TPOT
    nothing online               `idle_share` * TTFT

TPOT counts from the first token that came, not from the TTFT target as in Echo: what is promised to
a user is the mean gap, and a first token that came early does not allow longer gaps. A request that
ran ahead of its deadlines lends its slack to a large online chunk; one that is late does not stop
online prefills, only offline work. `idle_share` keeps room for an online request that arrives while
an iteration runs and another is already launched behind it.

Deviations from the paper
* Algorithm 1 subtracts a time per request; the predicted time of the whole batch is used instead,
  since times of requests in one batch do not add up.
* Offline requests are never preempted for time, only left out of an iteration (partial decode).
* The offline order is that of the pool.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cosched.core.plan import Plan
from cosched.core.request import Request, RequestClass, Slo
from cosched.core.view import View
from cosched.latency.features import BatchTotals
from cosched.latency.predictor import Predictor
from cosched.policy.base import PolicySettings
from cosched.policy.two_phase import two_phase_plan

__all__ = ["Budgets", "HygenPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How the time of an iteration follows from the targets.

    aim         share of the TPOT target that offline work may use up; the rest is for what the
                predictor gets wrong
    burst       most iteration time with offline work in it beside online requests [TPOT targets]
    idle_share  most iteration time without online requests [TTFT targets]
    """

    aim: float = 0.985
    burst: float = 1.5
    idle_share: float = 0.3


class HygenPolicy:
    """Two phases over a budget of predicted time. See the module's docstring and `two_phase`."""

    def __init__(self, settings: PolicySettings, budgets: Budgets | None = None) -> None:
        self._settings = settings
        self._budgets = budgets or Budgets()

    def plan(self, view: View) -> Plan:
        ledger = _ledger(view, self._settings, self._budgets)
        return replace(two_phase_plan(view, ledger), limits=ledger.limits())


class _Ledger:
    """The predicted time of a growing batch, held against a limit per phase [s]."""

    def __init__(
        self, predictor: Predictor, totals: BatchTotals, *, online_s: float, offline_s: float
    ) -> None:
        self._predictor = predictor
        self._totals = totals
        self._online_s = online_s
        self._offline_s = offline_s
        self._most_tokens: int | None = None

    def limits(self) -> Mapping[str, float]:
        limits = {"online": self._online_s, "offline": self._offline_s}
        return {phase: limit_s for phase, limit_s in limits.items() if limit_s < math.inf}

    def online_tokens(self, num_cached: int, limit: int) -> int:
        return self._predictor.max_prefill(self._totals, num_cached, self._online_s, limit)

    def offline_tokens(self, num_cached: int, limit: int) -> int:
        if self._most_tokens is None:
            self._most_tokens = self._worthwhile_tokens(num_cached)
        left = self._most_tokens - self._totals.num_new - self._totals.num_decodes
        if left <= 0:
            return 0
        limit = min(limit, left)
        return self._predictor.max_prefill(self._totals, num_cached, self._offline_s, limit)

    def _worthwhile_tokens(self, num_cached: int) -> int:
        """Tokens in all up to which the iteration is worth filling with offline prefill.

        Kernels work on tiles of tokens, so the first token beyond a full tile may cost as much as a
        whole one. Of the sizes that fit the one with the best surplus is taken: tokens at the price
        that many of them have, less the time of the iteration. What is not spent is slack, with
        which a later iteration affords the next full tile.
        """
        in_batch = self._totals.num_new + self._totals.num_decodes
        most = self._predictor.max_prefill(self._totals, num_cached, self._offline_s, _MANY)
        if most in (0, _MANY):
            return in_batch if most == 0 else sys.maxsize

        def seconds(num_tokens: int) -> float:
            trial = self._totals.copy()
            trial.add_prefill(num_tokens, num_cached)
            return self._predictor.predict_s(trial)

        token_s = (seconds(_MANY) - self._predictor.predict_s(self._totals)) / _MANY
        sizes = {most} | {(in_batch + most) // tile * tile - in_batch for tile in _TILES}
        fitting = [n for n in sizes if n > 0]
        return in_batch + max(fitting, key=lambda n: n * token_s - seconds(n))

    def offline_decodes(self, contexts: Sequence[int]) -> int:
        if self._predict_s(contexts) <= self._offline_s:
            return len(contexts)
        return bisect_right(
            range(1, len(contexts)), self._offline_s, key=lambda n: self._predict_s(contexts[:n])
        )

    def _predict_s(self, contexts: Sequence[int]) -> float:
        trial = self._totals.copy()
        trial.add_decodes(contexts)
        return self._predictor.predict_s(trial)

    def add_prefill(self, num_tokens: int, num_cached: int) -> None:
        self._totals.add_prefill(num_tokens, num_cached)

    def add_decodes(self, contexts: Sequence[int]) -> None:
        self._totals.add_decodes(contexts)


_MANY = 2048
"""Tokens over which the steps of tiles even out."""

_TILES = (64, 128, 256)
"""Tokens that GEMM kernels work on at a time."""


def _ledger(view: View, settings: PolicySettings, budgets: Budgets) -> _Ledger:
    slacks = _decode_slacks(view, settings.slo, budgets.aim)
    totals = BatchTotals()
    totals.add_decodes(slacks.contexts)
    prefill_slack_s = _prefill_slack_s(view, settings.slo)
    is_idle = not slacks.contexts and math.isinf(prefill_slack_s)
    idle_s = budgets.idle_share * _target(None, settings.slo.ttft_s)
    if settings.latency_budget_s is not None:
        online_s = settings.latency_budget_s
        offline_s = idle_s if is_idle else online_s
    else:
        # Slow decodes alone must not keep a prefill from starting.
        alone_s = settings.predictor.predict_s(totals)
        online_s = max(slacks.least_s, slacks.tpot_s, _LEAST_GROWTH * alone_s)
        burst_s = budgets.burst * slacks.tpot_s
        offline_s = idle_s if is_idle else min(slacks.aimed_s, prefill_slack_s, burst_s)
    return _Ledger(settings.predictor, totals, online_s=online_s, offline_s=offline_s)


_LEAST_GROWTH = 1.5


class _DecodeSlacks(NamedTuple):
    """Of the running online requests.

    contexts  tokens that each attends to in its next decode
    least_s   how long the iteration may take for all their next tokens to be in time [s]
    aimed_s   the same for targets that are `aim` times theirs [s]
    tpot_s    the least TPOT target, the server's among them [s]
    """

    contexts: list[int]
    least_s: float
    aimed_s: float
    tpot_s: float


def _decode_slacks(view: View, default: Slo, aim: float) -> _DecodeSlacks:
    start_s = view.start_s
    default_tpot_s = least_tpot_s = _target(default.tpot_s, None)
    least_s = aimed_s = math.inf
    contexts = []
    for request in view.running:
        if request.request_class is not RequestClass.ONLINE:
            continue
        num_computed = request.num_computed_tokens
        contexts.append(num_computed + 1)
        tpot_s = request.slo.tpot_s
        if tpot_s is None:
            tpot_s = default_tpot_s
        elif tpot_s < least_tpot_s:
            least_tpot_s = tpot_s
        first_s = request.first_token_s
        since_first_s = 0.0 if first_s is None else start_s - first_s
        allowed_s = tpot_s * (num_computed - request.num_prompt_tokens + 1)
        slack_s, aimed_slack_s = allowed_s - since_first_s, aim * allowed_s - since_first_s
        if slack_s < least_s:
            least_s = slack_s
        if aimed_slack_s < aimed_s:
            aimed_s = aimed_slack_s
    return _DecodeSlacks(contexts, least_s, aimed_s, least_tpot_s)


def _prefill_slack_s(view: View, default: Slo) -> float:
    """The least time left to the first token of an online request without one; of those that
    cannot make it any more, none counts. inf: there is none."""
    least_s = math.inf
    for request in _online_prefills(view):
        slack_s = request.arrival_s + _target(request.slo.ttft_s, default.ttft_s) - view.start_s
        if 0 < slack_s < least_s:
            least_s = slack_s
    return least_s


def _online_prefills(view: View) -> Iterable[Request]:
    for request in view.unfinished:
        if request.request_class is RequestClass.ONLINE:
            yield request
    yield from view.online


def _target(own_s: float | None, default_s: float | None) -> float:
    """A request's own target, or the server's."""
    target_s = default_s if own_s is None else own_s
    assert target_s is not None, "the server's targets are always set"
    return target_s
