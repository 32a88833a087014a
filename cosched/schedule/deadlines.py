"""How long an iteration may take, from the deadlines of the online requests.

All times are predicted (Echo §5.2: the tightest online deadline bounds the iteration).

    slack of a decode     see `cosched.schedule.decode_slack`
    slack of a prefill    arrival + TTFT * `ttft_aim` - start of the iteration - the time that it
                          and the prefills before it still take
    with online prefills  most of the least slack of the decodes, or TPOT; longer where prefills
                          would miss their targets at that pace
    with offline work     the least slack of the decodes, for targets that are `aim` times theirs;
                          the least slack of the prefills; `burst` * TPOT
    KV memory crowded     with offline work at most TPOT * (1 - s) / (1 - `crowded_share`); s: share
                          of the KV memory that online requests hold or need
    no online request     `idle_share` * TTFT

TPOT counts from the first token that was sent, not from the TTFT target as in Echo: users are
promised a mean gap, and an early first token does not allow longer gaps. Decodes that are ahead of
their deadlines let large online chunks borrow their slack. Decodes that are behind stop offline
work, but not online prefills. `idle_share` is for a request that arrives while an iteration runs,
at worst when the next one is planned already.

With speculative decoding an iteration without prefills brings several tokens of each request
(`View.tokens_per_decode`), one with prefills a single one. Slack counts the tokens that came. So
accepted drafts give prefills more time, and under a target below the time of a mixed iteration
these alternate with decodes.

With DP attention (`View.others`) decodes are as fast as on the slowest rank. The bounds are
those of all ranks; time that another rank's online work takes anyway is free.

Whether a request meets its target is decided over many iterations. So the margin that the predictor
adds to each iteration for disturbances (`Predictor.margin`) is taken out of these estimates. Where
online requests fill the KV memory their decodes get a shorter iteration than their targets need: a
request that decodes slowly holds its KV for longer, and new requests wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from cosched.core.group import RankNeeds
from cosched.core.request import Request, RequestClass, Slo, num_encoded, num_tokens_of
from cosched.core.view import Decodes, ToleranceHeadroom, View
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.decode_slack import OnlineDecodes, beside_s, shortest_s
from cosched.schedule.following import LEAST_SHARED
from cosched.schedule.ledger import Ledger
from cosched.schedule.time_budget import TimeBudget, TimeLimits

_BORROWED = 0.8
"""Share of the slack of the decodes that one iteration may use: it may last longer than predicted,
and the next one needs some too."""

_LEAST_GROWTH = 1.5
"""An iteration with online prefills may take this many times the time of the decodes alone, even if
they miss their targets by it."""

_LEAST_IDLE = 1.25
"""Without online requests an iteration may take this many times the shortest one, whatever
tolerance mode says of TTFT."""

_RELAXED_SHARE = 0.5
"""Of the TTFT target: with less left than this, an online prompt is not cut for a tile's sake."""

_DOUBT = 0.1
"""Error of estimates: a prefill that is too long by this share of its time is tried all the same,
and an iteration in which a prompt ends may be longer by it if no decode misses its target."""

_MOST_LOOKED_AT = 16
"""Waiting online requests whose prompts are looked up in the cache to estimate their time."""


class Deadlines:
    """What the running online requests leave of the next iteration. Adds their decodes to the
    builder's ledger.

    slacks   of their next tokens
    alone_s  expected time of an iteration of these decodes alone, of other ranks' decodes, and of
             offline ones where those cannot pause [s]
    token_s  the same for one token of each [s]
    """

    def __init__(
        self, builder: PlanBuilder, settings: PolicySettings, *, give_up: bool = False
    ) -> None:
        """give_up: requests that cannot meet their targets any more do not bound the iteration."""
        self._builder = builder
        self._settings = settings
        self._prefill_s: dict[str, float] = {}
        self._prefills: list[Request] = []
        """Those that have been asked about."""
        view, ledger = builder.view, builder.ledger
        ledger.add_decodes(builder.online.contexts)
        self._margin = 1 + view.predictor.margin
        self._others_s = view.others.alone_s / self._margin
        self.decodes = OnlineDecodes(builder, settings)
        self._has_decodes = bool(builder.online.requests)
        self._online_token_s = self.decodes.token_s()
        self.slacks = self.decodes.slacks(token_s=self._online_token_s if give_up else None)
        builder.count_fixed_decodes()
        self._count()

    def _count(self) -> None:
        self._predicted_s = self._builder.ledger.seconds()
        self._own_s = self._predicted_s / self._margin
        self.alone_s = max(self._own_s, self._others_s)
        self.token_s = self.alone_s / self._builder.view.tokens_per_decode

    @property
    def gains(self) -> bool:
        """Decodes alone get ahead of the targets of online requests."""
        return not self._has_decodes or self.token_s < self._most_token_s

    @property
    def _most_token_s(self) -> float:
        return self._settings.budgets.aim * self.slacks.tpot_s

    def keep_pace(self, victims: Callable[[PlanBuilder], Iterable[Request]]) -> None:
        """Preempt offline requests whose decodes cannot pause and would make online ones late,
        until these get ahead."""
        builder = self._builder
        is_late = self.slacks.aimed_s < self.alone_s and not self.gains
        if (
            not builder.counts_all_decodes
            or not is_late
            or self._online_token_s > self._most_token_s
        ):
            return
        for victim in victims(builder):
            if victim not in builder.view.unfinished:
                builder.preempt(victim)
                self._count()
                if self.gains:
                    break

    def are_pieces_enough(self, prefills: PrefillSlacks) -> bool:
        """Online prompts may be computed in pieces that ride on decodes: decodes of other ranks
        would wait for a whole one, no offline work fills the time, and first tokens have time."""
        view = self._builder.view
        is_filled = view.num_offline > 0 or view.others.fills
        if is_filled or view.caps.takes_turns or not view.others.alone_s:
            return False
        return prefills.slack_s >= _RELAXED_SHARE * prefills.ttft_s

    @property
    def borrowed_s(self) -> float:
        """The part of the decodes' slack that one iteration may use [s]."""
        return _BORROWED * self.slacks.least_s

    def ttft_s(self, request: Request) -> float:
        """The TTFT target of a request [s]."""
        return _target(request.slo.ttft_s, self._settings.slo.ttft_s)

    def prefill_s(self, request: Request) -> float:
        """Time that the rest of a prefill adds to the iterations that compute it [s]; cached."""
        seconds = self._prefill_s.get(request.rid)
        if seconds is None:
            view, ledger = self._builder.view, self._builder.ledger
            num_cached = self._num_cached(request)
            seconds = _prefill_s(request, num_cached, view, ledger, self._predicted_s)
            seconds /= self._margin
            self._prefill_s[request.rid] = seconds
            self._prefills.append(request)
        return seconds

    def _num_cached(self, request: Request) -> int:
        """Tokens that it finds cached when its turn comes: one that has been asked about before may
        have computed a prefix of it."""
        view = self._builder.view
        num_cached = request.num_computed_tokens or view.match(request).cached
        least = num_cached + LEAST_SHARED
        if least >= num_tokens_of(request):
            return num_cached
        common = (view.num_common(request, other, least) for other in self._prefills)
        return max(common, default=0) or num_cached

    def prefill_time_s(self, within_s: float) -> float:
        """Time for prefills within the next `within_s` if no decode is to miss its target by them
        [s]: once their slack is used, decodes need one iteration for each token."""
        behind_s = within_s - max(self.borrowed_s, 0.0)
        if behind_s <= 0:
            return within_s
        return max(within_s - behind_s * self.token_s / self.slacks.tpot_s, 0.0)

    def sure_prefill_time_s(self, within_s: float) -> float:
        """The same if decodes that are behind also catch up, and the last iteration is theirs."""
        within_s -= self._builder.view.mean_iteration_s / 2
        behind_s = max(within_s - self.borrowed_s, 0.0)
        return within_s - behind_s * self.token_s / self.slacks.tpot_s - self.alone_s

    def most_prefill_time_s(self, within_s: float) -> float:
        """The same if decodes wait. A little more is allowed, since it is an estimate."""
        return (within_s - self.alone_s) / (1 - _DOUBT)

    def num_tpot_misses(self, prefills: Iterable[tuple[float, float]]) -> float:
        """Running online requests that are expected to miss their TPOT targets because they wait
        for prefills. A decode catches up in iterations that are shorter than its target.

        prefills  by deadline: time that each takes, and time until its deadline [s]
        """
        tpot_s, alone_s = self.slacks.tpot_s, self.token_s
        won_s = tpot_s - alone_s
        if won_s <= 0:
            return math.inf
        if not alone_s:
            return 0.0
        work_s = borrowed_s = 0.0
        for seconds, within_s in prefills:
            work_s += seconds
            needed_s = within_s - (within_s - work_s) * tpot_s / alone_s
            borrowed_s = max(borrowed_s, min(needed_s, work_s))
        return self.decodes.num_misses(borrowed_s, won_s)

    def _longer_s(self, headroom: ToleranceHeadroom, online_s: float) -> float:
        """Most time of an iteration that takes `online_s` without offline work [s]."""
        if not online_s:
            # A request that arrives finds it running; no iteration is shorter than the shortest.
            least_s = _LEAST_IDLE * shortest_s(self._builder.view.predictor)
            return math.inf if headroom.wait_s is None else max(headroom.wait_s, least_s)
        return math.inf if headroom.wait_s is None else online_s + headroom.wait_s

    def prefill_slacks(self, prefills: Iterable[Request]) -> PrefillSlacks:
        """prefills: online requests without a first token whose targets count, in the order in
        which they are computed."""
        view, settings = self._builder.view, self._settings
        least_s = slack_left_s = math.inf
        iteration_s = work_s = 0.0
        least_ttft_s = _target(None, settings.slo.ttft_s)
        for index, request in enumerate(prefills):
            ttft_s = self.ttft_s(request)
            least_ttft_s = min(least_ttft_s, ttft_s)
            slack_s = request.arrival_s + ttft_s - view.start_s
            if index < _MOST_LOOKED_AT:
                work_s += self.prefill_s(request)
            if slack_s <= 0:
                continue
            least_s = min(least_s, slack_s)
            left_s = slack_s - work_s
            if left_s <= -_DOUBT * work_s:
                # Late by an estimate, which may be wrong.
                slack_left_s = min(slack_left_s, slack_s)
                continue
            spent_s = max((1 - settings.budgets.ttft_aim) * ttft_s, view.mean_iteration_s / 2)
            left_s = max(left_s - spent_s, 0.0)
            slack_left_s = min(slack_left_s, left_s)
            # In iterations of L the share (L - alone) / L of the time is the prefill's.
            most_s = work_s + self._own_s
            paced_s = slack_s * self._own_s / left_s if left_s > 0 else most_s
            iteration_s = max(iteration_s, min(paced_s, most_s))
        return PrefillSlacks(least_s, slack_left_s, iteration_s, least_ttft_s)

    def online_s(self, prefills: PrefillSlacks | None) -> float:
        """Time of an iteration with online prefills: decodes spend their slack on it, and more
        where `prefills` would be late at that pace. Slow decodes alone do not keep a prefill from
        starting [s]."""
        slacks = self.slacks
        needed_s = 0.0 if prefills is None else prefills.iteration_s
        return max(self.borrowed_s, slacks.tpot_s, _LEAST_GROWTH * self.alone_s, needed_s)

    def decodes_first_s(self) -> float:
        """The same where no decode is to be late for a first token [s]."""
        return max(self.slacks.aimed_s, beside_s(self.alone_s, self.slacks.tpot_s))

    def offline_s(self, prefills: PrefillSlacks, *, burst: float | None = None) -> float:
        """Time of an iteration with offline work [s]. burst: in place of `Budgets.burst`."""
        slacks, budgets = self.slacks, self._settings.budgets
        if not self._has_decodes and math.isinf(prefills.least_s):
            return self.idle_s(prefills)
        burst_s = (budgets.burst if burst is None else burst) * slacks.tpot_s
        crowded_s = slacks.tpot_s * _kv_share(self._builder, budgets.crowded_share)
        return min(slacks.aimed_s, prefills.slack_s, burst_s, crowded_s)

    def idle_s(self, prefills: PrefillSlacks) -> float:
        """Time that a request which arrives in an iteration with offline work can wait for it, and
        for the next where that is planned already [s]."""
        return self._settings.budgets.idle_share * prefills.ttft_s

    def budget(
        self,
        prefills: PrefillSlacks,
        *,
        online_s: float,
        offline_s: float,
        most_s: float = math.inf,
        headroom: ToleranceHeadroom | None = None,
        in_pieces: bool = False,
    ) -> TimeBudget:
        """Of an iteration of `online_s` with online prefills, `offline_s` with offline work, and at
        most `most_s` beside online decodes [s]. headroom: of tolerance mode; where
        it bounds TTFT only, no offline work runs beside online prefills."""
        view, slacks, others = self._builder.view, self.slacks, self._builder.view.others
        media_s = min(prefills.slack_s, self.idle_s(prefills))
        # A disturbed iteration is made up for by those after it.
        online_s *= self._margin
        # No decode is late by that: where prompts end in every iteration, none makes up for it.
        spare_s = slacks.least_s * self._margin
        ends_s = max(online_s, min((1 + _DOUBT) * online_s, spare_s))
        fixed_s = self._settings.latency_budget_s
        if fixed_s is not None:
            online_s = ends_s = media_s = fixed_s
            if self._has_decodes or not math.isinf(prefills.least_s):
                offline_s = fixed_s
        if not self._has_decodes:
            most_s = math.inf
        beside = None
        if headroom is None and _may_cut_online(view, prefills.least_s, self._settings.slo):
            builder = self._builder
            decodes = view.running_of(RequestClass.OFFLINE)
            beside = builder.reads_of(Decodes() if builder.counts_all_decodes else decodes)
        limits = TimeLimits(
            online_s=others.bound_online(min(online_s, most_s), self._least_s),
            ends_s=others.bound_online(min(ends_s, most_s), self._least_s),
            offline_s=others.bound_offline(min(offline_s, most_s)),
            beside_online=beside,
            longer_s=None if headroom is None else partial(self._longer_s, headroom),
            rides=headroom is None or headroom.wait_s is None or headroom.tpot is not None,
            pieces_s=others.taken_s if in_pieces else None,
            media_s=others.bound_offline(media_s),
        )
        return TimeBudget(view.predictor, self._builder.ledger, limits)

    @property
    def _least_s(self) -> float:
        """`RankNeeds.least_s`."""
        return max(self._margin * beside_s(self.alone_s, self.slacks.tpot_s), self._predicted_s)

    def needs(self, budget: TimeBudget) -> RankNeeds:
        """What this rank needs, for the other ranks. budget: of its own needs alone."""
        view, totals = self._builder.view, self._builder.ledger.totals.copy()
        tokens_left = view.caps.max_chunk_tokens or view.caps.max_prefill_tokens
        for request in islice(online_prefills(view), _MOST_LOOKED_AT):
            num_cached = request.num_computed_tokens or view.match(request).cached
            if not totals.num_new:
                tokens_left = budget.piece(num_cached, tokens_left)
            num_new = min(num_tokens_of(request) - num_cached, tokens_left)
            if num_new > 0:
                totals.add_prefill(num_new, num_cached)
                totals.add_encoded(num_encoded(request, num_cached, num_new))
                tokens_left -= num_new
        needs = RankNeeds(
            alone_s=self._predicted_s,
            least_s=self._least_s,
            required_s=view.predictor.predict_s(totals),
            online_s=budget.online_s,
            offline_s=budget.offline_s,
            fills=float(view.num_offline > 0),
        )
        if not view.caps.takes_turns:
            return needs
        # The next tokens of these decodes come an iteration after the prefills of other ranks.
        aimed_s = self.slacks.aimed_s * self._margin
        return needs._replace(
            required_s=needs.required_s if totals.num_new else 0.0,
            online_s=min(needs.online_s, aimed_s) - self._predicted_s,
            offline_s=needs.offline_s - self._predicted_s,
        )


def _kv_share(builder: PlanBuilder, crowded_share: float) -> float:
    """KV memory that online requests leave, over what they leave at `crowded_share`: 1 there, 0
    when they fill it. inf: it is not crowded."""
    view = builder.view
    prompts = sum(request.num_prompt_tokens for request in online_prefills(view))
    held = int(np.add.reduce(builder.online.contexts))
    held_share = (held + prompts) / view.kv.total
    if held_share <= crowded_share:
        return math.inf
    return max(1 - held_share, 0.0) / (1 - crowded_share)


def _may_cut_online(view: View, prefill_slack_s: float, default: Slo) -> bool:
    """True if first tokens have enough time for their prompts to be cut where a tile ends, and
    offline requests wait for the time that this leaves."""
    if math.isinf(prefill_slack_s):
        return False
    if prefill_slack_s < _RELAXED_SHARE * _target(None, default.ttft_s):
        return False
    return view.num_offline > 0


class PrefillSlacks(NamedTuple):
    """Of the online requests without a first token that can still meet their targets. inf: there
    is none.

    least_s      the least time left to a first token [s]
    slack_s      the least of it that is left when they are computed one after the other, for
                 targets that are `ttft_aim` times theirs [s]
    iteration_s  how long iterations must be for all of them to be in time beside the decodes of the
                 online requests; 0: any length will do [s]
    ttft_s       the least TTFT target, the server's and those of late requests among them [s]
    """

    least_s: float
    slack_s: float
    iteration_s: float
    ttft_s: float


def _prefill_s(
    request: Request, num_cached: int, view: View, ledger: Ledger, alone_s: float
) -> float:
    """Time that the rest of a prefill adds to the iterations that compute it [s].

    It is computed in chunks; of larger prefills than it has seen the predictor is pessimistic. The
    time of a chunk grows linearly with its depth (attention), so the mean of the first and the last
    chunk stands for all.
    """
    num_new = num_tokens_of(request) - num_cached
    if num_new <= 0:
        return 0.0
    num_chunk = min(num_new, view.caps.max_chunk_tokens or num_new)
    first_s = last_s = ledger.seconds_with(num_chunk, num_cached) - alone_s
    if num_chunk < num_new:
        last_s = ledger.seconds_with(num_chunk, num_cached + num_new - num_chunk) - alone_s
    seconds = max((first_s + last_s) / 2 * num_new / num_chunk, 0.0)
    if encoded := num_encoded(request, num_cached, num_new):
        seconds += ledger.seconds_with(1, num_cached, encoded=encoded)
        seconds -= ledger.seconds_with(1, num_cached)
    return seconds


def online_prefills(view: View) -> Iterable[Request]:
    for request in view.unfinished:
        if request.request_class is RequestClass.ONLINE:
            yield request
    yield from view.online


def _target(own_s: float | None, default_s: float | None) -> float:
    """A request's own target, or the server's."""
    target_s = default_s if own_s is None else own_s
    assert target_s is not None, "the server's targets are always set"
    return target_s
