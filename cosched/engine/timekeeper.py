"""Everything about time that a decision may depend on: rank 0, which plans, keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cosched.core.batch import BatchShape
from cosched.engine.clock import Clock
from cosched.engine.observe import IterationObserver, StepResult
from cosched.engine.tracked import TrackedRequest
from cosched.latency.calibration import Calibrator
from cosched.latency.features import BatchTotals

__all__ = ["Moment", "Timekeeper"]


class Moment(NamedTuple):
    """now_s    when the plan is made [s]
    start_s  when the planned iteration is expected to begin [s]
    """

    now_s: float
    start_s: float


class Timekeeper:
    """Collects what happened between two plans: when first tokens came, and how long iterations
    took, which it teaches to the predictor."""

    def __init__(
        self, *, clock: Clock, observer: IterationObserver, predictor: Calibrator | None
    ) -> None:
        """predictor: None where no decision depends on it."""
        self.clock = clock
        self._observer = observer
        self._predictor = predictor
        self._steps: list[StepResult] = []
        self._first_tokens: list[tuple[TrackedRequest, int]] = []
        self.on_measured: Callable[[StepResult, float], None] | None = None
        """Gets every iteration that is done and the time predicted for it [s], not learnt from it
        yet."""
        observer.add_listener(self._steps.append)

    def on_result(self, batch: Any) -> None:
        """The tokens of the latest iteration that ended are known."""
        if not batch.forward_mode.is_extend():
            return
        for req in batch.reqs:
            tracked = TrackedRequest.of(req)
            if tracked is not None and tracked.first_token_s is None and req.output_ids:
                # Until the next plan its own clock will do: nobody decides before.
                tracked.first_token_s = self.clock.now_s()
                self._first_tokens.append((tracked, len(self._steps) - 1))

    def moment(self) -> Moment:
        """The time for a plan; called once per plan."""
        now_s = start_s = self.clock.now_s()
        steps = self._steps
        for tracked, index in self._first_tokens:
            if 0 <= index < len(steps):
                tracked.first_token_s = steps[index].start_s + steps[index].duration_s
        self._first_tokens.clear()
        if self._predictor is not None:
            try:
                self._learn(steps, self._predictor)
            finally:
                steps.clear()
            start_s = self._observer.expected_end_s(now_s, self._predict_s)
        steps.clear()
        return Moment(now_s, start_s)

    def _learn(self, steps: list[StepResult], predictor: Calibrator) -> None:
        for step in steps:
            if step.duration_s > 0:
                if self.on_measured is not None:
                    self.on_measured(step, self._predict_s(step.shape))
                predictor.observe(step.shape, step.duration_s)

    def _predict_s(self, shape: BatchShape) -> float:
        assert self._predictor is not None
        return self._predictor.predict_s(BatchTotals.of(shape))
