"""The time on which decisions depend, kept by the rank that plans."""

from __future__ import annotations

from collections.abc import Sequence

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.view import Ended
from cosched.engine.clock import Clock
from cosched.engine.iteration import Iteration, Moment
from cosched.engine.observe import IterationObserver
from cosched.engine.tracked import TrackedRequest
from cosched.predict.calibration import Calibrator

_MEAN_SHARE = 0.1
"""Of the newest iteration in the moving average of their times."""


class Timekeeper:
    """Collects what happened between two plans: times of tokens, requests that have ended, and
    times of iterations, from which the predictor learns."""

    def __init__(
        self,
        *,
        clock: Clock,
        observer: IterationObserver,
        predictor: Calibrator | None,
        in_step: bool = False,
    ) -> None:
        """predictor: None where no decision depends on it. in_step: other ranks step together with
        this one."""
        self.clock = clock
        self._observer = observer
        self._predictor = predictor
        self._in_step = in_step
        self._done: list[Iteration] = []
        self._mean_s = 0.0
        self._ended: list[Ended] = []
        observer.add_listener(self._done.append)
        if predictor is not None:
            observer.predict_s = self._predict_s

    def on_result(self, iteration: Iteration | None, requests: Sequence[TrackedRequest]) -> None:
        """The tokens of an iteration are known, of these requests; None: it was not observed."""
        end_s = self.clock.now_s() if iteration is None else iteration.end_s
        for tracked in requests:
            req = tracked.req
            if req.output_ids:
                tracked.last_token_s = end_s
                if tracked.first_token_s is None:
                    tracked.first_token_s = end_s
            if req.finished_reason is not None:
                num_tokens = len(req.output_ids)
                self._ended.append(Ended(tracked.rid, tracked.request_class, num_tokens))

    def learn(self) -> None:
        """From the iterations that have ended since the last call. A fit of the predictor takes
        milliseconds (`PlanTiming`)."""
        done = tuple(self._done)
        self._done.clear()
        newest = self._observer.newest
        if self._in_step and newest is not None and newest in done and newest.longest is None:
            # The other ranks have not said yet whose batch was the longest.
            done = tuple(iteration for iteration in done if iteration is not newest)
            self._done.append(newest)
        for iteration in done:
            share = _MEAN_SHARE if self._mean_s else 1.0
            self._mean_s += share * (iteration.seconds - self._mean_s)
            if self._predictor is not None and iteration.seconds > 0 and iteration.is_exact:
                self._predictor.observe(iteration.longest or iteration.shape, iteration.seconds)

    def moment(self) -> Moment:
        """The time for a plan; called once per plan."""
        now_s = start_s = self.clock.now_s()
        ended = tuple(self._ended)
        self._ended.clear()
        self.learn()
        if self._predictor is not None:
            start_s = self._observer.expected_start_s(now_s, self._mean_s)
        return Moment(now_s, start_s, self._mean_s, ended)

    def _predict_s(self, shape: BatchShape) -> float:
        assert self._predictor is not None
        return self._predictor.predict_s(BatchTotals.of(shape))
