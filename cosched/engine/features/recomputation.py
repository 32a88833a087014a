"""What preemptions cost: tokens that are computed again."""

from __future__ import annotations

from typing import Any

from cosched.core.batch import BatchTotals
from cosched.core.plan import PreemptMode
from cosched.core.request import Request
from cosched.engine.clock import Clock
from cosched.engine.feature import Feature
from cosched.engine.state import Counters
from cosched.memory.recompute import RecomputeBudget
from cosched.predict.calibration import Calibrator

WINDOW_S = 60.0
"""What may be recomputed at once is the share of this time."""


class Recomputation(Feature):
    """budget: pays for what is computed again, where times are predicted."""

    place = "recompute"

    def __init__(
        self, share: float, *, predictor: Calibrator | None, clock: Clock, counters: Counters
    ) -> None:
        """share: of the time (`KvConfig.recompute_share`). predictor: None: plans do not depend on
        times."""
        self.budget = RecomputeBudget(share=share, most_s=share * WINDOW_S)
        self._predictor = predictor
        self._clock = clock
        self._counters = counters
        self._lost: dict[str, int] = {}
        """rid of a preempted request that waits -> tokens whose KV it had."""

    @classmethod
    def of(cls, controller: Any) -> Recomputation:
        return cls(
            controller.config.kv.recompute_share,
            predictor=controller.predictor if controller.is_timed else None,
            clock=controller.clock,
            counters=controller.counters,
        )

    def on_preempted(self, request: Request, mode: PreemptMode, *, num_computed: int) -> None:
        self._lost[request.rid] = num_computed

    def on_admitted(self, request: Any) -> None:
        num_cached = request.num_prefix_tokens
        num_again = self._lost.pop(request.rid, 0) - num_cached
        if num_again <= 0:
            return
        self._counters.recomputed_tokens += num_again
        if self._predictor is not None:
            totals = BatchTotals()
            totals.add_prefill(num_again, num_cached)
            self.budget.pay(self._predictor.predict_s(totals), self._clock.now_s())

    def on_aborted(self, request: Request) -> None:
        self._lost.pop(request.rid, None)
