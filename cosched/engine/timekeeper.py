"""Everything about time that a decision may depend on, equal on every rank.

With tensor parallelism each rank runs a scheduler of its own and all must decide alike, so what
clocks say comes from rank 0: once per plan it sends the time, the durations of the iterations that
ended since the last plan and the arrivals of new requests. Which iterations and which requests
those are is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

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
    """Collects what happened between two plans and teaches it to the predictor.

    `ranks` is the process group to share it with, None where there is one rank or where decisions
    do not depend on time.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        observer: IterationObserver,
        predictor: Calibrator,
        ranks: Any | None,
    ) -> None:
        self.clock = clock
        self._observer = observer
        self._predictor = predictor
        self._ranks = ranks
        self._is_source = ranks is None or torch.distributed.get_rank(ranks) == 0
        self._steps: list[StepResult] = []
        self._arrivals: list[TrackedRequest] = []
        self._first_tokens: list[tuple[TrackedRequest, int]] = []
        self.on_measured: Callable[[StepResult, float], None] | None = None
        """Gets every iteration that is done and the time predicted for it [s], not learnt from it
        yet."""
        observer.add_listener(self._steps.append)

    def on_arrival(self, tracked: TrackedRequest) -> None:
        """A request has come for the first time; its `arrival_s` is this rank's."""
        self._arrivals.append(tracked)

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
        """The time for a plan; called once per plan, on every rank."""
        now_s = self.clock.now_s()
        start_s = now_s
        steps = self._steps
        if self._is_source:
            self._learn(steps)
            start_s = self._observer.expected_end_s(now_s, self._predict_s)
        if self._ranks is not None:
            now_s, start_s, steps = self._share(now_s, start_s, steps)
            if not self._is_source:
                self._learn(steps)
        for tracked, index in self._first_tokens:
            if index >= 0:
                tracked.first_token_s = steps[index].start_s + steps[index].duration_s
        self._steps.clear()
        self._arrivals.clear()
        self._first_tokens.clear()
        return Moment(now_s, start_s)

    def _share(
        self, now_s: float, start_s: float, steps: list[StepResult]
    ) -> tuple[float, float, list[StepResult]]:
        times = [now_s, start_s]
        times += [value for step in steps for value in (step.start_s, step.duration_s)]
        times += [tracked.arrival_s for tracked in self._arrivals]
        tensor = torch.tensor(times, dtype=torch.float64)
        torch.distributed.broadcast(
            tensor, src=torch.distributed.get_global_rank(self._ranks, 0), group=self._ranks
        )
        now_s, start_s, *rest = tensor.tolist()
        shared = [
            StepResult(step.shape, rest[2 * i], rest[2 * i + 1]) for i, step in enumerate(steps)
        ]
        for tracked, arrival_s in zip(self._arrivals, rest[2 * len(steps) :], strict=True):
            tracked.arrival_s = arrival_s
        return now_s, start_s, shared

    def _learn(self, steps: list[StepResult]) -> None:
        for step in steps:
            if step.duration_s > 0:
                if self.on_measured is not None:
                    self.on_measured(step, self._predict_s(step.shape))
                self._predictor.observe(step.shape, step.duration_s)

    def _predict_s(self, shape: BatchShape) -> float:
        return self._predictor.predict_s(BatchTotals.of(shape))
