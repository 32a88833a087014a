"""Measures iterations: the shape of each batch and its time.

The time of an iteration is what it adds to the token gap of a running request: from the end of the
iteration before it, or from its launch if the scheduler was idle in between, until its result is
available. That is device time plus host time that does not overlap with it. If the scheduler has
waited too long (`PlanTiming`), the time counts from the launch, or until the end of the wait: if
the wait counted as iteration time, the next wait would be longer still. With the overlap scheduler
the host sees a result only after it has launched the next iteration; the device's event says when
it was ready.

In a pipeline iterations overlap: each of `num_stages` computes a part of one. The time of one is
that from its launch until its result, or `num_stages` times what it adds to those before it,
whichever is less: what follows a longer one waits for that, and what is longer than the one before
it leaves stages idle. In that time the other microbatches have an iteration each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from cosched.core.batch import BatchShape
from cosched.engine import port
from cosched.engine.clock import Clock, EngineClock
from cosched.engine.guard import Guard
from cosched.engine.iteration import Iteration, taken
from cosched.engine.port.prefixes import RunningPrefixes, with_repeated
from cosched.engine.port.read_once import reads_once
from cosched.predict.cost_account import Account


class IterationObserver:
    """Watches a scheduler run batches and notifies its listeners.

    `launch` and `finish` stand around SGLang's `run_batch` and before `process_batch_result`.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        clock: EngineClock,
        guard: Guard,
        num_stages: int = 1,
        prefills_wait: bool = False,
    ) -> None:
        """guard: what fails here is left out; the batch runs all the same. num_stages: of the
        pipeline. prefills_wait: launches of prefills wait until the device is idle"""
        self._scheduler = scheduler
        self.guard = guard
        self.clock = clock
        self._num_stages = num_stages
        self._is_synchronous = port.runs_on_cpu(scheduler) and num_stages == 1
        self._prefills_wait = prefills_wait
        self._prefixes: RunningPrefixes | None = None
        if reads_once():
            self._prefixes = RunningPrefixes.of(scheduler)
        self._listeners: list[Callable[[Iteration], None]] = []
        self._in_flight: deque[Iteration] = deque()
        self._latest: Any = None
        """The result of what was launched last, while it is under way."""
        self.newest: Iteration | None = None
        """What was launched last."""
        self.predict_s: Callable[[BatchShape], float] | None = None
        """Time of an iteration as predicted when it is launched."""
        self.account: Account | None = None
        """Charges requests for their iterations; None: another rank does."""
        self.note_launched: Callable[..., bool] | None = None
        """`PlanTiming.launched`; None: nothing waits."""
        self._was_idle = False
        """The latest batch of this rank had no requests, other ranks' batches had."""
        self._last_done_s = 0.0
        self.busy_s = 0.0
        """Time that the device has spent on iterations [s]."""
        self.num_iterations = 0
        """Iterations whose result is there."""

    def use_virtual_clock(self, clock: Clock, *, prefills_wait: bool = False) -> None:
        """Time is virtual from now on, here and for all that hold the same clock: an iteration is
        done when the clock says so, not when the call ends. prefills_wait: launches of the modelled
        attention backend wait for the device."""
        self._prefills_wait = prefills_wait
        self.clock.follow(clock)
        self._is_synchronous = False

    def add_listener(self, listener: Callable[[Iteration], None]) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[Iteration], None]) -> None:
        self._listeners.remove(listener)

    def launch(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run the batch through `run` and remember when it was launched."""
        if not port.runs_model(batch):
            self._was_idle = True  # other ranks of the group compute
            return run()
        iteration = taken(batch)
        iteration.reqs = list(batch.reqs)
        with self.guard.watching("timing"):
            iteration.shape = port.shape_of(batch)
            if self._prefixes is not None:
                iteration.shape = with_repeated(iteration.shape, batch, self._prefixes)
            if self.predict_s is not None:
                iteration.predicted_s = self.predict_s(iteration.shape)
        is_idle = iteration.came_late or port.is_idle(self._scheduler)
        if self._was_idle:
            is_idle, self._was_idle = True, False
            iteration.is_exact = False  # the iteration before it may still run
        self.newest = iteration
        iteration.follows = not is_idle and self.num_iterations > 0
        iteration.launched_s = self.clock.now_s()
        before = self._latest
        try:
            result = run()
        except Exception:
            self._end(iteration, self.clock.now_s())
            self._charge(iteration)
            raise
        if self._is_synchronous:  # on a GPU the forward pass has only been queued
            self._end(iteration, self.clock.now_s())
        if self.note_launched is not None:
            with self.guard.watching("timing"):
                self._look_again(iteration, before)
        self._in_flight.append(iteration)
        self._latest = result
        return result

    def _look_again(self, iteration: Iteration, before: Any) -> None:
        """An iteration is launched; `before` is the result of the one before it. If the device was
        done with that when the first kernel came, nothing says how long either took."""
        assert self.note_launched is not None
        # A launch that waits for the device finds it idle in any case.
        looks = not iteration.came_late and not (self._prefills_wait and iteration.shape.prefills)
        ran_dry = looks and before is not None and port.is_done(before)
        if not self.note_launched(is_dry=iteration.came_late or ran_dry):
            return
        # Its measured time includes the launch, if that took any.
        iteration.is_exact = self.clock.now_s() == iteration.launched_s
        if ran_dry and self._in_flight and self._in_flight[-1].duration_s is None:
            self._in_flight[-1].is_exact = False

    def expected_end_s(self, now_s: float) -> float:
        """When what has been launched will be done, as predicted; `now_s` when nothing is under
        way [s]."""
        end_s = now_s
        begun_s = self._last_done_s
        for iteration in self._in_flight:
            if iteration.duration_s is not None:
                continue
            if self._num_stages > 1:
                own_s = iteration.predicted_s or 0.0
                begun_s = max(iteration.launched_s + own_s, begun_s + own_s / self._num_stages)
                end_s = max(now_s, begun_s)
                continue
            if not iteration.follows:  # else host time before its launch is in the prediction
                begun_s = max(begun_s, iteration.launched_s)
            begun_s += iteration.predicted_s or 0.0
            end_s = max(now_s, begun_s)
        return end_s

    def expected_start_s(self, now_s: float, mean_s: float) -> float:
        """When an iteration that is launched now begins [s]. mean_s: of iterations; in a pipeline
        such a one would begin as long before the end of those under way as stages are free."""
        end_s = self.expected_end_s(now_s)
        return max(now_s, end_s - (1 - 1 / self._num_stages) * mean_s)

    @property
    def latest_shape(self) -> BatchShape:
        """Of what was launched last; empty where its result is there."""
        return self._in_flight[-1].shape if self._in_flight else BatchShape()

    @property
    def is_busy(self) -> bool:
        """A batch is under way: perhaps another microbatch of a pipeline."""
        return bool(self._in_flight)

    def has_run_dry(self) -> bool:
        """The device has finished the last launch, and its result was not taken yet."""
        return self._latest is not None and port.is_done(self._latest)

    def ran_dry(self, *, just_now: bool) -> None:
        """`has_run_dry` was found true, just now or some time ago."""
        (*before, latest) = self._in_flight
        if just_now and not before and latest.duration_s is None:
            self._end(latest, self.clock.now_s())
        latest.is_exact = latest.duration_s is not None

    def abandon(self) -> None:
        """What was launched is taken back: its results will not come."""
        for iteration in self._in_flight:
            if iteration.duration_s is None:
                self._end(iteration, self.clock.now_s())
            self._charge(iteration)
        self._in_flight.clear()
        self._latest = None

    @property
    def last_done_s(self) -> float:
        """When the latest iteration whose result is there was done [s]."""
        return self._last_done_s

    def finishing(self, batch: Any) -> Iteration | None:
        """The iteration of the next result, that of this batch; None as for `finish`."""
        return self._in_flight[0] if self._in_flight and port.runs_model(batch) else None

    def finish(self, batch: Any, result: Any) -> Iteration | None:
        """The iteration of a result, once it is there; waits for it. Results come in the order of
        launches. None: its launch was not seen, or it was idle."""
        iteration = self.finishing(batch)
        if iteration is None:
            return None
        self._in_flight.popleft()
        if result is self._latest:
            self._latest = None
        if iteration.duration_s is None:
            if self._num_stages == 1:  # else the loop has waited
                port.wait_for(self._scheduler, result)
            self._end(iteration, self.clock.now_s())
        self._charge(iteration)
        self.num_iterations += 1
        for listener in self._listeners:
            with self.guard.watching("timing"):
                listener(iteration)
        return iteration

    def _end(self, iteration: Iteration, done_s: float) -> None:
        on_device_s = max(iteration.launched_s, self._last_done_s)
        iteration.start_s = self._last_done_s if iteration.follows else on_device_s
        iteration.duration_s = done_s - iteration.start_s
        if self._num_stages > 1 and on_device_s > iteration.launched_s:  # one was before it
            added_s = done_s - on_device_s
            iteration.duration_s = min(done_s - iteration.launched_s, self._num_stages * added_s)
            iteration.start_s = done_s - iteration.duration_s
        iteration.device_s = done_s - on_device_s
        self.busy_s += iteration.device_s
        self._last_done_s = done_s

    def _charge(self, iteration: Iteration) -> None:
        """Before the result is processed: the last reply of a request says what it has cost."""
        reqs, iteration.reqs = iteration.reqs, ()
        if self.account is not None:
            with self.guard.watching("account"):
                requests = [req.cosched for req in reqs]
                self.account.charge(requests, iteration.shape, iteration.device_s)
