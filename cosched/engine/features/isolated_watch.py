"""What the online requests of this scheduler would have alone, to tell what a batch costs them, and
for tolerance mode (`cosched.predict`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from cosched.core.batch import BatchTotals
from cosched.core.caps import EngineCaps
from cosched.core.request import RequestClass
from cosched.core.view import ToleranceHeadroom, TpotHeadroom, View
from cosched.engine import port
from cosched.engine.feature import Feature
from cosched.engine.features import plan_timing
from cosched.engine.tracked import TrackedRequest, num_cached
from cosched.predict.calibration import Calibrator
from cosched.predict.isolated import MOST_FOLLOWED, IsolatedBaseline
from cosched.predict.tolerance import LatencyComparison, Promise, ToleranceConfig

_WAITS = 1.5
"""By how many times what offline work adds to an iteration a first token comes later, in the mean:
half of the iteration that is under way, and its own. Once more where another is planned already."""


_RECENT = 1 / 200
"""Weight of a reply in the mean of their tokens."""


class LatencyBeside(msgspec.Struct, frozen=True, kw_only=True):
    """One latency of the online requests that have ended, and what it would have been alone [s].

    share      tolerance: by how much mean and p99 may exceed those of the isolated baseline; None:
               nothing is promised of it
    num        requests; p99 is of the latest 1,000 to 2,000 of them
    room       by what share of its mean alone offline work may lengthen that of the next ones;
               None: nothing is promised of it
    """

    share: float | None
    num: int
    total_s: float
    total_alone_s: float
    p99_s: float | None
    p99_alone_s: float | None
    room: float | None


class IsolatedState(msgspec.Struct, frozen=True, kw_only=True):
    """num_forgotten: requests that were too many to be followed."""

    ttft: LatencyBeside
    tpot: LatencyBeside
    num_forgotten: int


class IsolatedWatch(Feature):
    """Follows one scheduler. Predictions without their margin: what is careful elsewhere would be
    generous here."""

    place = "isolated"

    @classmethod
    def of(cls, controller: Any) -> IsolatedWatch | None:
        caps, config, scheduler = controller.caps, controller.config, controller.scheduler
        if controller.planner is None or not controller.is_timed:
            return None
        if config.tolerance is None and not _has_baseline(caps):
            return None
        overlaps = port.overlaps(scheduler)
        return cls(
            config.tolerance or ToleranceConfig(),
            caps=caps,
            overlaps=overlaps,
            plans_ahead=overlaps and not plan_timing.waits(controller),
            predictor=controller.predictor,
            num_cached=partial(num_cached, scheduler.tree_cache),
        )

    def __init__(
        self,
        config: ToleranceConfig,
        *,
        caps: EngineCaps,
        overlaps: bool,
        plans_ahead: bool,
        predictor: Calibrator,
        num_cached: Callable[[TrackedRequest], int],
    ) -> None:
        """plans_ahead: an iteration is planned as soon as the one before it runs. num_cached:
        prompt tokens of a waiting request that are in the prefix cache."""
        self._waits = _WAITS + plans_ahead
        self._baseline = IsolatedBaseline(
            max_chunk_tokens=caps.max_chunk_tokens,
            max_prefill_tokens=caps.max_prefill_tokens,
            max_running_requests=caps.max_running_requests,
            page_size=caps.page_size,
            overlaps=overlaps,
            num_output=lambda rid: self._followed[rid].num_output_tokens,
        )
        self._ttft, self._tpot = map(_comparison, (config.ttft, config.tpot))
        self.promises = isinstance(self._ttft, Promise) or isinstance(self._tpot, Promise)
        """Plans keep a tolerance; else this is for people and metrics only."""
        self._predictor = predictor
        self._num_cached = num_cached
        self._num_tokens = 200.0
        """Of a reply, in the mean; newer ones count more."""
        self._now_s = 0.0
        """When the latest plan was made."""
        self._followed: dict[str, TrackedRequest] = {}
        self._achieved: dict[str, tuple[float, float | None]] = {}
        """TTFT and TPOT of those that have ended here and not alone."""

    def on_arrival(self, request: Any) -> None:
        """Offline requests are not followed."""
        tracked: TrackedRequest = request
        if tracked.request_class is not RequestClass.ONLINE or not self._can_predict:
            return
        if len(self._followed) >= MOST_FOLLOWED:
            self._followed.clear()
        self._followed[tracked.rid] = tracked
        self._baseline.arrived(
            tracked.rid,
            tracked.arrival_s,
            num_prompt=tracked.num_prompt_tokens,
            num_cached=self._num_cached(tracked),
        )

    def on_finished(self, request: Any) -> None:
        tracked: TrackedRequest = request
        if tracked.rid not in self._followed:
            return
        del self._followed[tracked.rid]
        first_s, last_s = tracked.first_token_s, tracked.last_token_s
        num_output = tracked.num_output_tokens
        if port.is_aborted(tracked.req) or first_s is None or last_s is None:
            self._baseline.ended(tracked.rid, 0)
            return
        tpot_s = (last_s - first_s) / (num_output - 1) if num_output > 1 else None
        self._num_tokens += (num_output - self._num_tokens) * _RECENT
        if len(self._achieved) >= MOST_FOLLOWED:
            self._achieved.clear()
        self._achieved[tracked.rid] = first_s - tracked.arrival_s, tpot_s
        self._baseline.ended(tracked.rid, num_output)

    def on_look(self, view: View) -> None:
        """A promise is kept by the plan that is due; else plans do not wait for this."""
        self._now_s = view.now_s
        if self.promises:
            self.advance(view.now_s)

    def on_report(self, *, is_idle: bool) -> None:
        if not self.promises:
            self.advance(self._now_s)

    def advance(self, now_s: float) -> None:
        """All requests that came by then have arrived."""
        self._baseline.advance(now_s, self._predict_s)
        for served in self._baseline.pop_served():
            achieved = self._achieved.pop(served.rid, None)
            if achieved is None:
                continue
            ttft_s, tpot_s = achieved
            self._ttft.judge(baseline_s=served.ttft_s, achieved_s=ttft_s)
            if tpot_s is not None and served.tpot_s is not None:
                self._tpot.judge(baseline_s=served.tpot_s, achieved_s=tpot_s)

    @property
    def _can_predict(self) -> bool:
        """A promise waits until decodes without a prefill have been measured too; beside a batch
        there may be none for long, and then people see what is estimated of them."""
        return self._predictor.is_known if self.promises else self._predictor.knows_prefills

    def _predict_s(self, totals: BatchTotals) -> float:
        return self._predictor.estimate_s(totals) * self._predictor.error

    @property
    def headroom(self) -> ToleranceHeadroom | None:
        """None: nothing is promised."""
        if not self.promises:
            return None
        ttft, tpot = (one if isinstance(one, Promise) else None for one in (self._ttft, self._tpot))
        return ToleranceHeadroom(
            wait_s=None if ttft is None else ttft.headroom * ttft.mean_baseline_s / self._waits,
            tpot=None if tpot is None else self._tpot_headroom(tpot),
        )

    def _tpot_headroom(self, promise: Promise) -> TpotHeadroom:
        return TpotHeadroom(
            share=promise.share,
            saved_s=promise.saved_s,
            usual_s=promise.usual_s,
            num_tokens=self._num_tokens,
            most_s=promise.most_s,
        )

    def state(self) -> IsolatedState:
        """For people and metrics."""
        return IsolatedState(
            ttft=_latency(self._ttft),
            tpot=_latency(self._tpot),
            num_forgotten=self._baseline.num_forgotten,
        )


def _comparison(share: float | None) -> LatencyComparison:
    return LatencyComparison() if share is None else Promise(share)


def _latency(compared: LatencyComparison) -> LatencyBeside:
    alone_s, achieved_s = compared.tails_s
    promise = compared if isinstance(compared, Promise) else None
    return LatencyBeside(
        share=None if promise is None else promise.share,
        num=compared.num,
        total_s=compared.total_achieved_s,
        total_alone_s=compared.total_baseline_s,
        p99_s=achieved_s,
        p99_alone_s=alone_s,
        room=None if promise is None else promise.headroom,
    )


def _has_baseline(caps: EngineCaps) -> bool:
    """Whether `cosched.predict.isolated` has the rules by which stock SGLang would serve online
    requests here: not where ranks or servers share the work, or a decode gives several tokens."""
    parallel = port.parallel()
    is_shared = parallel.group_size > 1 or parallel.num_stages > 1 or port.shares_work()
    return not is_shared and caps.decode_reserve == 1
