"""How much predicted time an iteration may take, from the deadlines of its online requests.

The budget of an iteration (Echo §5.2: the tightest online deadline in it)

    slack of a running request   first token + TPOT * (tokens it will have) - start of the iteration
    slack of a prefill           arrival + TTFT - start of the iteration
    laxity of a prefill          its slack for a target that is `ttft_aim` times its own, less the
                                 time that it and those before it still take
    online phase                 most of the least slack of the running online requests, or TPOT;
                                 more where prefills would be late at that pace and need not be
    offline phase                the least slack of the running online requests, for targets that
                                 are `aim` times theirs, and the least laxity of the prefills; at
                                 most `burst` * TPOT
    online memory crowded        offline phase at most TPOT * (1 - s) / (1 - `crowded_share`); s:
                                 the share of the KV memory that online requests hold or want
    nothing online in time       `idle_share` * TTFT, the least of the server's and of those that
                                 wait

TPOT counts from the first token that came, not from the TTFT target as in Echo: what is promised to
a user is the mean gap, and a first token that came early does not allow longer gaps. A request that
ran ahead of its deadlines lends its slack to a large online chunk; one that is late does not stop
online prefills, only offline work. `idle_share` keeps room for an online request that arrives while
an iteration runs, at worst when another has just been planned behind it. A prefill that must do
without offline work and without the pace of the decodes to be in time gets both: a mean gap
recovers, a first token does not. Whether a request can be in time, and how fast online prefills go
beside decodes, is a matter of many iterations, so the margin that a predictor adds to each for
disturbances (`Predictor.margin`) is taken out of it. A TPOT target below the time of the shortest
iteration there is counts as none. Where online requests fill the memory their decodes are sped up
at the expense of offline work: a request that decodes slowly holds its KV for longer, and those
that come next wait for room.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from cosched.core.batch import BatchTotals
from cosched.core.estimates import Predictor
from cosched.core.request import Request, RequestClass, Slo, num_tokens_of
from cosched.core.view import Room, View
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.ledger import Ledger


class DeadlinePace:
    """Implements `cosched.schedule.phases.Pace`: the predicted time of what is in a ledger, held
    against a limit per phase [s].

    ends_s         of an iteration in which an online prompt ends, in place of `online_s`
    beside_online  KV tokens read for each of the offline requests that will decode beside them, if
                   they fit: then online prompts may be cut where a tile of tokens ends. None: they
                   may not
    longer_s       time of an iteration without offline work -> most time with it [s]; None: the
                   limit of the phase alone holds
    rides          offline work may be in an iteration with online prefills
    """

    def __init__(
        self,
        predictor: Predictor,
        ledger: Ledger,
        *,
        online_s: float,
        ends_s: float,
        offline_s: float,
        beside_online: Sequence[int] | None,
        longer_s: Callable[[float], float] | None = None,
        rides: bool = True,
    ) -> None:
        self._predictor = predictor
        self._ledger = ledger
        self._online_s = online_s
        self._ends_s = ends_s
        self._offline_s = offline_s
        self._beside_online = beside_online
        self._longer_s = longer_s
        self._rides = rides
        self._most_tokens: int | None = None

    def begin_offline(self) -> None:
        if not self._rides and self._ledger.totals.num_new:
            self._offline_s = 0.0
        if self._longer_s is not None:
            self._offline_s = min(self._offline_s, self._longer_s(self._ledger.seconds()))

    def limits(self) -> Mapping[str, float]:
        limits = {"online": self._online_s, "offline": self._offline_s}
        return {phase: limit_s for phase, limit_s in limits.items() if limit_s < math.inf}

    def online_tokens(self, num_cached: int, limit: int) -> int:
        most = self._predictor.max_prefill(self._ledger.totals, num_cached, self._online_s, limit)
        if most == 0:
            return 0
        if most < limit and self._seconds(self._ledger.totals, limit, num_cached) <= self._ends_s:
            return limit  # what is left would take an iteration of its own
        if self._beside_online is None:
            return most
        totals = self._ledger.totals.copy()
        totals.add_decodes(self._beside_online)
        in_batch = totals.num_new + totals.num_decodes
        tile = _TILES[-1]
        to_full = -(-(in_batch + most) // tile) * tile - in_batch
        if self._seconds(totals, to_full, num_cached) <= self._offline_s:
            return most  # offline work fills the tile
        cut = self._worthwhile(totals, most, num_cached)
        return cut if cut >= min(most, _LEAST_CUT) else most

    def offline_tokens(self, num_cached: int, limit: int, *, is_last: bool = False) -> int:
        totals = self._ledger.totals
        in_batch = totals.num_new + totals.num_decodes
        if self._most_tokens is None:
            most = self._predictor.max_prefill(totals, num_cached, self._offline_s, _MANY)
            if most == _MANY:
                self._most_tokens = sys.maxsize
            else:
                self._most_tokens = in_batch + self._worthwhile(totals, most, num_cached)
        left = self._most_tokens - in_batch
        if left <= 0:
            return 0
        limit = min(limit, left)
        most = self._predictor.max_prefill(totals, num_cached, self._offline_s, limit)
        return self._worthwhile(totals, most, num_cached) if is_last else most

    def has_offline_time(self) -> bool:
        if self._most_tokens is None:
            return self._ledger.seconds_with(1, 0) <= self._offline_s
        return self._ledger.totals.num_new + self._ledger.totals.num_decodes < self._most_tokens

    def _worthwhile(self, totals: BatchTotals, most: int, num_cached: int) -> int:
        """Of the sizes of a prefill up to `most` the one with the best surplus.

        Kernels work on tiles of tokens, so the first token beyond a full tile may cost as much as a
        whole one. The surplus is tokens at the price that many of them have, less the time of the
        iteration. What is not spent is slack, with which a later iteration affords the next full
        tile.
        """
        if most == 0:
            return 0
        in_batch = totals.num_new + totals.num_decodes
        alone_s = self._predictor.predict_s(totals)
        token_s = (self._seconds(totals, _MANY, num_cached) - alone_s) / _MANY
        sizes = {most} | {(in_batch + most) // tile * tile - in_batch for tile in _TILES}
        fitting = [n for n in sizes if n > 0]
        return max(fitting, key=lambda n: n * token_s - self._seconds(totals, n, num_cached))

    def _seconds(self, totals: BatchTotals, num_tokens: int, num_cached: int) -> float:
        trial = totals.copy()
        trial.add_prefill(num_tokens, num_cached)
        return self._predictor.predict_s(trial)

    def offline_decodes(self, contexts: Sequence[int]) -> int:
        seconds = self._ledger.seconds_with_decodes
        if seconds(contexts) <= self._offline_s:
            return len(contexts)
        return bisect_right(
            range(1, len(contexts)), self._offline_s, key=lambda n: seconds(contexts[:n])
        )


_MANY = 2048
"""Tokens over which the steps of tiles even out."""

_LEAST_CUT = 64
"""Where less than this fits below the end of a tile, as beside many decodes, an online prompt is
not cut there: it would be computed in crumbs, each at the price of a mixed batch."""

_TILES = (64, 128, 256)
"""Tokens that GEMM kernels work on at a time."""


class Deadlines:
    """What the running online requests leave of the next iteration. Counts the time of their
    decodes.

    slacks   of their next tokens
    alone_s  expected time of an iteration with nothing but them [s]
    """

    def __init__(
        self, builder: PlanBuilder, settings: PolicySettings, *, give_up: bool = False
    ) -> None:
        """give_up: who cannot be in time any more, however fast it goes on, holds nobody up."""
        self._builder = builder
        self._settings = settings
        self._prefill_s: dict[str, float] = {}
        view, ledger = builder.view, builder.ledger
        _, contexts = view.running_of(RequestClass.ONLINE)
        ledger.add_decodes(contexts)
        self._margin = 1 + view.predictor.margin
        self._predicted_s = ledger.seconds()
        self.alone_s = self._predicted_s / self._margin
        self.slacks = _decode_slacks(
            view,
            settings.slo,
            settings.budgets.aim,
            view.predictor,
            alone_s=self.alone_s if give_up else None,
        )

    @property
    def lent_s(self) -> float:
        """Of the slack of the decodes, what one iteration may take [s]."""
        return _LENT * self.slacks.least_s

    def ttft_s(self, request: Request) -> float:
        """The TTFT target of a request [s]."""
        return _target(request.slo.ttft_s, self._settings.slo.ttft_s)

    def prefill_s(self, request: Request) -> float:
        """By how much all that is left of a prefill lengthens the iterations that compute it
        [s]. Worked out once for each."""
        seconds = self._prefill_s.get(request.rid)
        if seconds is None:
            view, ledger = self._builder.view, self._builder.ledger
            seconds = _prefill_s(request, view, ledger, self._predicted_s) / self._margin
            self._prefill_s[request.rid] = seconds
        return seconds

    def prefill_time_s(self, within_s: float) -> float:
        """How much of a time is left for prefills where no decode is late by it [s]: those decodes
        have a slack, and after it need one iteration for each of their tokens."""
        behind_s = within_s - max(self.lent_s, 0.0)
        if behind_s <= 0:
            return within_s
        return max(within_s - behind_s * self.alone_s / self.slacks.tpot_s, 0.0)

    def sure_prefill_time_s(self, within_s: float) -> float:
        """The same where decodes that are behind already catch up, and the last iteration has none
        but their tokens."""
        within_s -= self._builder.view.mean_iteration_s / 2
        behind_s = max(within_s - self.lent_s, 0.0)
        return within_s - behind_s * self.alone_s / self.slacks.tpot_s - self.alone_s

    def most_prefill_time_s(self, within_s: float) -> float:
        """The same where decodes wait; what takes a little longer is tried, since that is an
        estimate."""
        return (within_s - self.alone_s) / (1 - _DOUBT)

    def num_lost(self, prefills: Iterable[tuple[float, float]]) -> float:
        """How many of the running online requests are expected to be late because they wait for
        prefills: a decode wins back what an iteration without them takes less than its target, and
        may end before. As long as half of all replies last longer than the median, a share
        2^(-n/median) lasts n tokens. prefills: by deadline, what each takes and until when [s]."""
        tpot_s, alone_s = self.slacks.tpot_s, self.alone_s
        won_s = tpot_s - alone_s
        if won_s <= 0:
            return math.inf
        if not alone_s:
            return 0.0
        work_s = lent_s = 0.0
        for seconds, within_s in prefills:
            work_s += seconds
            needed_s = within_s - (within_s - work_s) * tpot_s / alone_s
            lent_s = max(lent_s, min(needed_s, work_s))
        view = self._builder.view
        requests, contexts = view.running_of(RequestClass.ONLINE)
        num_lost = 0.0
        for request, context in zip(requests, contexts, strict=True):
            own_s = _target(request.slo.tpot_s, self._settings.slo.tpot_s)
            first_s = request.first_token_s
            since_first_s = 0.0 if first_s is None else view.start_s - first_s
            behind_s = since_first_s - own_s * (context - request.num_prompt_tokens)
            before, after = (max(behind_s + s, 0.0) / won_s for s in (0.0, lent_s))
            median = max(view.length(request).median, 1)
            num_lost += 2.0 ** (-before / median) - 2.0 ** (-after / median)
        return num_lost

    def _longer_s(self, room: Room, online_s: float) -> float:
        """Most time of an iteration that takes `online_s` without offline work [s]."""
        if not online_s:
            # Whoever comes finds it under way; but an iteration takes what it takes.
            least_s = _LEAST_IDLE * _shortest_s(self._builder.view.predictor)
            return math.inf if room.wait_s is None else max(room.wait_s, least_s)
        added_s = math.inf if room.wait_s is None else room.wait_s
        if room.share is not None and self.slacks.contexts:
            added_s = min(added_s, room.share * online_s)
        return online_s + added_s

    def pace(
        self,
        prefills: Iterable[Request],
        *,
        decodes_first: bool = False,
        lends: bool = True,
        most_s: float = math.inf,
        spares_arrivals: bool = False,
        is_whole: bool = False,
        room: Room | None = None,
    ) -> DeadlinePace:
        """prefills: online requests without a first token whose targets count. decodes_first: they
        are not late for the sake of first tokens, but where nothing could start otherwise. lends:
        where they are not first, they wait for prefills that would be late at their pace. most_s:
        that an iteration beside online decodes takes [s]. spares_arrivals: `Budgets.idle_share`
        bounds iterations with offline work beside online decodes too. is_whole: prompts are not cut
        for the sake of decodes. room: by how much offline work may lengthen the iteration; where
        only of TTFT a share is promised, iterations with online prefills have none in them."""
        builder, settings, slacks = self._builder, self._settings, self.slacks
        view, budgets = builder.view, settings.budgets
        prefill = _prefill_slacks(
            prefills, view, settings.slo, budgets.ttft_aim, self.prefill_s, self.alone_s
        )
        if settings.latency_budget_s is not None:
            online_s = ends_s = offline_s = settings.latency_budget_s
        else:
            # Slow decodes alone must not keep a prefill from starting.
            if is_whole:
                online_s = math.inf
            elif decodes_first:
                online_s = max(slacks.aimed_s, _beside_s(self.alone_s, slacks.tpot_s))
            else:
                online_s = max(
                    self.lent_s,
                    slacks.tpot_s,
                    _LEAST_GROWTH * self.alone_s,
                    prefill.iteration_s if lends else 0.0,
                )
            # One that is disturbed is made up for by those after it.
            online_s *= self._margin
            # No decode is late by that: where prompts end in every iteration, none makes up for it.
            spare_s = slacks.least_s * self._margin
            ends_s = max(online_s, min((1 + _DOUBT) * online_s, spare_s))
            burst_s = budgets.burst * slacks.tpot_s
            uncrowded_s = slacks.tpot_s * _room(view, slacks.contexts, budgets.crowded_share)
            offline_s = min(slacks.aimed_s, prefill.laxity_s, burst_s, uncrowded_s)
            if spares_arrivals:
                # Who comes meanwhile waits for this iteration, and maybe for the next.
                offline_s = min(offline_s, budgets.idle_share * prefill.ttft_s)
        if not slacks.contexts and math.isinf(prefill.least_s):
            offline_s = budgets.idle_share * prefill.ttft_s
        if not slacks.contexts:
            most_s = math.inf
        cuts_online = room is None and _may_cut_online(view, prefill.least_s, settings.slo)
        return DeadlinePace(
            view.predictor,
            builder.ledger,
            online_s=min(online_s, most_s),
            ends_s=min(ends_s, most_s),
            offline_s=min(offline_s, most_s),
            beside_online=(
                builder.reads_of(view.running_of(RequestClass.OFFLINE)) if cuts_online else None
            ),
            longer_s=None if room is None else partial(self._longer_s, room),
            rides=room is None or room.wait_s is None or room.share is not None,
        )


def _room(view: View, online_contexts: Sequence[int], crowded_share: float) -> float:
    """How much of the KV memory online requests leave, by what they may hold before it is crowded:
    1 at `crowded_share`, 0 when they fill it. inf: it is not crowded."""
    prompts = sum(request.num_prompt_tokens for request in online_prefills(view))
    held_share = (sum(online_contexts) + prompts) / view.kv.total
    if held_share <= crowded_share:
        return math.inf
    return max(1 - held_share, 0.0) / (1 - crowded_share)


def _may_cut_online(view: View, prefill_slack_s: float, default: Slo) -> bool:
    """Whether first tokens have time enough for their prompts to be cut where a tile ends, and
    offline work waits for what that leaves."""
    if math.isinf(prefill_slack_s):
        return False
    if prefill_slack_s < _RELAXED_SHARE * _target(None, default.ttft_s):
        return False
    return view.num_offline > 0


_LENT = 0.8
"""Of the slack of the running online requests, that one iteration takes: it may last longer than
predicted, and what is left is lent to the next."""

_LEAST_GROWTH = 1.5
"""Iterations with online prefills may be so many times as long as the decodes alone, whether or not
these are late by it."""

_LEAST_BESIDE = 1.2
"""The same where decodes come first, as far as these keep their targets by it (`_beside_s`)."""


def _beside_s(alone_s: float, tpot_s: float) -> float:
    """Time of an iteration with online prefills where decodes are behind and come first [s]: at
    most half of what these leave of the TPOT target is for prefills, so that they catch up."""
    return min(_LEAST_BESIDE * alone_s, (alone_s + tpot_s) / 2)


_LEAST_IDLE = 1.25
"""Without online requests an iteration may be so many times as long as the shortest there is,
whatever was promised of TTFT."""

_RELAXED_SHARE = 0.5
"""Of the TTFT target: with less left than this, an online prompt is not cut for a tile's sake."""


class _DecodeSlacks(NamedTuple):
    """Of the running online requests.

    contexts  tokens that each attends to in its next decode
    least_s   how long the iteration may take for all their next tokens to be in time [s]
    aimed_s   the same for targets that are `aim` times theirs [s]
    tpot_s    the least TPOT target, the server's among them [s]
    """

    contexts: Sequence[int]
    least_s: float
    aimed_s: float
    tpot_s: float


def _decode_slacks(
    view: View, default: Slo, aim: float, predictor: Predictor, *, alone_s: float | None
) -> _DecodeSlacks:
    """alone_s: time of an iteration with nothing but these decodes [s]. A request that is expected
    to miss its target at that pace does not count, nor one that is behind and cannot catch up
    beside prefills. None: all requests count."""
    start_s = view.start_s
    shortest_s: float | None = None
    default_tpot_s = least_tpot_s = _target(default.tpot_s, None)
    least_s = aimed_s = math.inf
    requests, contexts = view.running_of(RequestClass.ONLINE)
    for request, context in zip(requests, contexts, strict=True):
        tpot_s = request.slo.tpot_s
        if tpot_s is None:
            tpot_s = default_tpot_s
        elif tpot_s < default_tpot_s:
            if shortest_s is None:
                shortest_s = _shortest_s(predictor) / (1 + predictor.margin)
            if tpot_s < shortest_s:
                tpot_s = default_tpot_s
        first_s = request.first_token_s
        since_first_s = 0.0 if first_s is None else start_s - first_s
        allowed_s = tpot_s * (context - request.num_prompt_tokens)
        slack_s, aimed_slack_s = allowed_s - since_first_s, aim * allowed_s - since_first_s
        if alone_s is not None:
            if slack_s < 0:
                catch_up_s = min(_beside_s(alone_s, tpot_s), view.mean_iteration_s)
                if -slack_s > view.length(request).upper * (tpot_s - catch_up_s):
                    continue
            if alone_s > tpot_s and slack_s < view.length(request).median * (alone_s - tpot_s):
                continue
        least_tpot_s = min(least_tpot_s, tpot_s)
        if slack_s < least_s:
            least_s = slack_s
        if aimed_slack_s < aimed_s:
            aimed_s = aimed_slack_s
    return _DecodeSlacks(contexts, least_s, aimed_s, least_tpot_s)


def _shortest_s(predictor: Predictor) -> float:
    """Predicted time of the shortest iteration that decodes anything [s]; without the predictor's
    margin no target below it can be met."""
    totals = BatchTotals()
    totals.add_decodes((1,))
    return predictor.predict_s(totals)


class _PrefillSlacks(NamedTuple):
    """Of the online requests without a first token; of those that cannot make it any more, none
    counts. inf: there is none.

    least_s      the least time left to a first token [s]
    laxity_s     the least of it that is left when they are computed one after the other [s]
    iteration_s  how long iterations must be for all of them to be in time beside the decodes of the
                 online requests; 0: any length will do [s]
    ttft_s       the least TTFT target, the server's and those of late requests among them [s]
    """

    least_s: float
    laxity_s: float
    iteration_s: float
    ttft_s: float


def _prefill_slacks(
    prefills: Iterable[Request],
    view: View,
    default: Slo,
    ttft_aim: float,
    prefill_s: Callable[[Request], float],
    alone_s: float,
) -> _PrefillSlacks:
    """prefill_s: time of what is left of a prefill [s]. alone_s: predicted time of what the ledger
    has, the decodes of running online requests [s]."""
    least_s = laxity_s = math.inf
    iteration_s = work_s = 0.0
    least_ttft_s = _target(None, default.ttft_s)
    for index, request in enumerate(prefills):
        ttft_s = _target(request.slo.ttft_s, default.ttft_s)
        least_ttft_s = min(least_ttft_s, ttft_s)
        slack_s = request.arrival_s + ttft_s - view.start_s
        if index < _MOST_LOOKED_AT:
            work_s += prefill_s(request)
        if slack_s <= 0:
            continue
        least_s = min(least_s, slack_s)
        left_s = slack_s - work_s
        if left_s <= -_DOUBT * work_s:
            # Late as far as one knows; but that estimate may be wrong.
            laxity_s = min(laxity_s, slack_s)
            continue
        left_s = max(left_s - max((1 - ttft_aim) * ttft_s, view.mean_iteration_s / 2), 0.0)
        laxity_s = min(laxity_s, left_s)
        # In iterations of L the share (L - alone) / L of the time is the prefill's.
        most_s = work_s + alone_s
        paced_s = slack_s * alone_s / left_s if left_s > 0 else most_s
        iteration_s = max(iteration_s, min(paced_s, most_s))
    return _PrefillSlacks(least_s, laxity_s, iteration_s, least_ttft_s)


_DOUBT = 0.1
"""Of its time a prefill may be too long to be in time, and is tried all the same; an iteration may
be so much too long where a prompt ends in it, if no decode is late by it."""

_MOST_LOOKED_AT = 16
"""Waiting online requests whose prompts are looked up in the cache for how long they take."""


def _prefill_s(request: Request, view: View, ledger: Ledger, alone_s: float) -> float:
    """By how much all that is left of a prefill lengthens the iterations that compute it [s].

    It is computed in chunks, of which a predictor knows how long they take; asked for more at once
    than was ever seen it is careful. A chunk takes longer the deeper it is, by the same for each
    token (attention), so the mean of the first and the last stands for all.
    """
    num_cached = request.num_computed_tokens or view.match(request).cached
    num_new = num_tokens_of(request) - num_cached
    if num_new <= 0:
        return 0.0
    num_chunk = min(num_new, view.caps.max_chunk_tokens or num_new)
    first_s = last_s = ledger.seconds_with(num_chunk, num_cached) - alone_s
    if num_chunk < num_new:
        last_s = ledger.seconds_with(num_chunk, num_cached + num_new - num_chunk) - alone_s
    return max((first_s + last_s) / 2 * num_new / num_chunk, 0.0)


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
