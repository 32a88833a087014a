"""What the online requests of this scheduler would have alone, and what is left of what was
promised of it (`cosched.predict`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from cosched.core.batch import BatchTotals
from cosched.core.caps import EngineCaps
from cosched.core.request import RequestClass
from cosched.core.view import ToleranceHeadroom
from cosched.engine import port
from cosched.engine.tracked import TrackedRequest
from cosched.predict.calibration import Calibrator
from cosched.predict.isolated import MOST_FOLLOWED, IsolatedBaseline
from cosched.predict.tolerance import Promise, ToleranceConfig

_WAITS = 1.5
"""By how many times what offline work adds to an iteration a first token comes later, in the mean:
half of the iteration that is under way, and its own. Once more where another is planned already."""


class LatencyBeside(msgspec.Struct, frozen=True, kw_only=True):
    """One latency of the online requests that have ended, and what it would have been alone [s].

    share      tolerance: by how much mean and p99 may exceed those of the isolated baseline
    num        requests; p99 is of the latest 1,000 to 2,000 of them
    room       by what share of its mean alone offline work may lengthen that of the next ones
    """

    share: float
    num: int
    total_s: float
    total_alone_s: float
    p99_s: float | None
    p99_alone_s: float | None
    room: float


class IsolatedState(msgspec.Struct, frozen=True, kw_only=True):
    """ttft, tpot      None: nothing is promised of it
    num_forgotten   requests that were too many to be followed
    """

    ttft: LatencyBeside | None
    tpot: LatencyBeside | None
    num_forgotten: int


class IsolatedWatch:
    """Follows one scheduler. Predictions without their margin: what is careful elsewhere would be
    generous here."""

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
        )
        shares = {"ttft": config.ttft, "tpot": config.tpot}
        self._promises: Mapping[str, Promise] = {
            name: Promise(share) for name, share in shares.items() if share is not None
        }
        self._predictor = predictor
        self._num_cached = num_cached
        self._followed: set[str] = set()
        self._achieved: dict[str, tuple[float, float | None]] = {}
        """TTFT and TPOT of those that have ended here and not alone."""

    def arrived(self, tracked: TrackedRequest) -> None:
        """A request has come; offline ones are not followed."""
        if tracked.request_class is not RequestClass.ONLINE or not self._predictor.is_known:
            return
        if len(self._followed) >= MOST_FOLLOWED:
            self._followed.clear()
        self._followed.add(tracked.rid)
        self._baseline.arrived(
            tracked.rid,
            tracked.arrival_s,
            num_prompt=tracked.num_prompt_tokens,
            num_cached=self._num_cached(tracked),
        )

    def ended(self, tracked: TrackedRequest) -> None:
        """A request has ended."""
        if tracked.rid not in self._followed:
            return
        self._followed.remove(tracked.rid)
        first_s, last_s = tracked.first_token_s, tracked.last_token_s
        num_output = tracked.num_output_tokens
        if port.is_aborted(tracked.req) or first_s is None or last_s is None:
            self._baseline.ended(tracked.rid, 0)
            return
        tpot_s = (last_s - first_s) / (num_output - 1) if num_output > 1 else None
        if len(self._achieved) >= MOST_FOLLOWED:
            self._achieved.clear()
        self._achieved[tracked.rid] = first_s - tracked.arrival_s, tpot_s
        self._baseline.ended(tracked.rid, num_output)

    def advance(self, now_s: float) -> None:
        """Before a plan is made."""
        self._baseline.advance(now_s, self._predict_s)
        for served in self._baseline.pop_served():
            achieved = self._achieved.pop(served.rid, None)
            if achieved is None:
                continue
            ttft_s, tpot_s = achieved
            ttft, tpot = self._promises.get("ttft"), self._promises.get("tpot")
            if ttft is not None:
                ttft.judge(baseline_s=served.ttft_s, achieved_s=ttft_s)
            if tpot is not None and tpot_s is not None and served.tpot_s is not None:
                tpot.judge(baseline_s=served.tpot_s, achieved_s=tpot_s)

    def _predict_s(self, totals: BatchTotals) -> float:
        return self._predictor.estimate_s(totals) * self._predictor.error

    @property
    def headroom(self) -> ToleranceHeadroom:
        ttft, tpot = self._promises.get("ttft"), self._promises.get("tpot")
        return ToleranceHeadroom(
            wait_s=None if ttft is None else ttft.headroom * ttft.mean_baseline_s / self._waits,
            share=None if tpot is None else tpot.headroom,
        )

    def state(self) -> IsolatedState:
        """For people and metrics."""
        latencies = {name: _latency(promise) for name, promise in self._promises.items()}
        return IsolatedState(
            ttft=latencies.get("ttft"),
            tpot=latencies.get("tpot"),
            num_forgotten=self._baseline.num_forgotten,
        )


def _latency(promise: Promise) -> LatencyBeside:
    alone_s, achieved_s = promise.tails_s
    return LatencyBeside(
        share=promise.share,
        num=promise.num,
        total_s=promise.total_achieved_s,
        total_alone_s=promise.total_baseline_s,
        p99_s=achieved_s,
        p99_alone_s=alone_s,
        room=promise.headroom,
    )
