"""When the next iteration is planned: as late as the device allows.

Under the overlap scheduler SGLang plans an iteration as soon as the previous one has begun. A
request that arrives during an iteration is planned for the one after the next: it waits 1.5
iterations on average, and beside offline work an iteration is as long as the targets allow.
Planning and launching take a small part of an iteration. If the scheduler receives requests that
long before the iteration ends, the wait is half an iteration and that part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cosched.core.batch import BatchShape, BatchTotals
from cosched.engine import port
from cosched.engine.clock import EngineClock
from cosched.engine.feature import Feature
from cosched.engine.iteration import Iteration
from cosched.engine.observe import IterationObserver
from cosched.policies import policy_entry

_FIRST_LEAD_S = 0.02
"""Before anything was measured."""

_DRY_SHARE = 0.01
"""Share of launches for which the device may be idle."""

_STEP_S = 0.001
"""By which the lead grows when it was idle."""

_LEAST_SHARE = 0.1
"""Least lead, as a share of the rest of the iteration: errors of predictions grow with length."""

_SHARE_STEP = 0.05
"""By which that share grows when an iteration ended much earlier than predicted."""

_HOST_PART = 0.5
"""A launch is late because of the host if planning and launching took at least this part of the
lead. So the lead is at most twice their time: wrong predictions alone do not raise it."""


class PlanTiming(Feature):
    """Waits before requests are received, until `lead_s` before the device is done.

    lead_s     time to plan, build and launch a batch, and small errors of the predicted end of an
               iteration [s]. It grows by a step if the device was done before the next launch, and
               shrinks by a hundredth of a step otherwise, so that one launch in a hundred is late
               (a quantile, by Robbins and Monro)
    share      of the rest of an iteration, the least lead. It grows and shrinks in the same way,
               where an iteration ended so early that the host had no part in it: such errors are
               of prefills of a size that was not seen before, and say nothing of short decodes
    num_waits  launches that came after a wait
    num_dry    of these, the device had to wait
    """

    place = "timing"

    @classmethod
    def of(cls, controller: Any) -> PlanTiming | None:
        if not waits(controller):
            return None
        observer, predictor = controller.observer, controller.predictor
        timing = cls(
            observer=observer,
            clock=observer.clock,
            is_known=lambda shape: predictor.knows(BatchTotals.of(shape)),
            meanwhile=controller.planner.timekeeper.learn,
        )
        observer.note_launched = timing.launched
        return timing

    def __init__(
        self,
        *,
        observer: IterationObserver,
        clock: EngineClock,
        is_known: Callable[[BatchShape], bool],
        meanwhile: Callable[[], None],
    ) -> None:
        """is_known: the time of such iterations is known; otherwise there is no wait. meanwhile:
        work that would hold up the plan, done in the time of the wait."""
        self._observer = observer
        self._is_known = is_known
        self._meanwhile = meanwhile
        self._clock = clock
        self._has_waited = self._has_run_dry = False
        self._wait_ended_s = 0.0
        self.lead_s = _FIRST_LEAD_S
        self.share = _LEAST_SHARE
        self.num_waits = 0
        self.num_dry = 0

    def on_receive(self) -> None:
        """Returns when it is time to look for requests."""
        now_s = self._clock.now_s()
        left_s = self._observer.expected_end_s(now_s) - now_s
        wait_s = left_s - max(self.lead_s, self.share * left_s)
        self._has_waited = wait_s > 0 and self._is_known(self._observer.latest_shape)
        if self._has_waited:
            observer = self._observer
            self._meanwhile()
            self._has_run_dry = self._clock.wait_until(now_s + wait_s, observer.has_run_dry)
            self._wait_ended_s = self._clock.now_s()
            if self._has_run_dry:
                observer.ran_dry(just_now=True)

    def on_launched(self, iteration: Iteration, batch: Any | None) -> None:
        """It comes late if the device has nothing to do already, because of the wait."""
        if batch is None:
            return
        iteration.came_late = self._has_waited and self._observer.has_run_dry()
        if iteration.came_late and not self._has_run_dry:
            self._observer.ran_dry(just_now=False)

    def launched(self, *, is_dry: bool) -> bool:
        """The batch is launched. is_dry: the device had nothing to do before its first kernel.
        Whether that is because of the wait.

        On a GPU a launch takes 1 to 2 ms before its first kernel. So a look before it finds a
        device busy that is idle a moment later."""
        is_late = self._has_waited and is_dry
        self.lead_s -= _DRY_SHARE * _STEP_S
        self.share -= _DRY_SHARE * _SHARE_STEP
        self.num_waits += self._has_waited
        if is_late:
            self.num_dry += 1
            host_s = self._clock.now_s() - self._wait_ended_s
            if self._has_run_dry or host_s < _HOST_PART * self.lead_s:
                self.share += _SHARE_STEP
            else:
                self.lead_s += _STEP_S
        self.lead_s = max(self.lead_s, 0.0)
        self.share = min(max(self.share, _LEAST_SHARE), 1.0)
        self._has_waited = False
        return is_late


def waits(controller: Any) -> bool:
    """Whether plans are made at the last moment. A `cosched.engine.controller.Controller`."""
    config, scheduler = controller.config, controller.scheduler
    entry = policy_entry(config.policy)
    if controller.planner is None or config.plan_early or entry.early or not entry.timed:
        return False
    return port.overlaps(scheduler) and port.waits_alone(scheduler)
