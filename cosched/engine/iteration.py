"""One iteration, from its plan to its result. Imports nothing of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.plan import EMPTY_PLAN, Plan


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration from its plan to its result; the observer's listeners get the same object.
    Under the overlap scheduler two are under way at once.

    plan         what it was to run; the engine's own decision where nothing of cosched's plans
    planning_s   host time of the view, the plan and its check [s]; None: nothing was planned
    reqs         SGLang's requests in the order of the shape, until they have been charged
    shape        what runs
    predicted_s  predicted time when it was launched [s]; None: there is no predictor
    longest      with DP attention, the longest batch of all ranks, once they have agreed on it
    launched_s   when it was launched [s]
    came_late    the device was idle before it because the scheduler waited too long
    follows      the device was not idle before it
    start_s      when the one before it ended, or when it was launched after idle time [s]
    duration_s   from then until its result was there [s]; None: it is under way
    device_s     the part of it in which the device was busy [s]
    is_exact     True if the measured duration excludes host time
    """

    plan: Plan = field(default_factory=lambda: EMPTY_PLAN)
    planning_s: float | None = None
    reqs: Sequence[Any] = ()
    shape: BatchShape = field(default_factory=BatchShape)
    predicted_s: float | None = None
    longest: BatchTotals | None = None
    launched_s: float = 0.0
    came_late: bool = False
    follows: bool = False
    start_s: float = 0.0
    duration_s: float | None = None
    device_s: float = 0.0
    is_exact: bool = True
    _plan_json: msgspec.Raw | None = None

    @property
    def plan_json(self) -> msgspec.Raw:
        """`Plan.to_json`, encoded once for all who ask."""
        if self._plan_json is None:
            self._plan_json = self.plan.to_json()
        return self._plan_json

    @property
    def seconds(self) -> float:
        """`duration_s` of an iteration that has ended."""
        assert self.duration_s is not None, "it is under way"
        return self.duration_s

    @property
    def end_s(self) -> float:
        """When its result was there [s]."""
        return self.start_s + self.seconds
