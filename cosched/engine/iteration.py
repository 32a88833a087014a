"""One iteration, from its plan to its result. Imports nothing of SGLang.

`Controller.plan` makes it. SGLang calls back for each part of its loop, so an iteration goes on
with what SGLang passes: while its batch is built it is `Controller.due`, then it is on the batch
(`give`, `taken`), and results come in the order of launches (`IterationObserver.finish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.plan import EMPTY_PLAN, Plan
from cosched.core.view import Ended


class Moment(NamedTuple):
    """now_s             when the plan is made [s]
    start_s           when the planned iteration is expected to begin [s]
    mean_iteration_s  moving average of measured times [s]
    ended             requests that have ended since the moment before
    """

    now_s: float
    start_s: float
    mean_iteration_s: float = 0.0
    ended: tuple[Ended, ...] = ()


class Before(NamedTuple):
    """What a plan was made with. state: the policy's."""

    state: Any
    moment: Moment


@dataclass(eq=False)
class Iteration:
    """One iteration from its plan to its result; the observer's listeners get the same object.
    Under the overlap scheduler two are under way at once.

    plan         what it was to run; the engine's own decision where nothing of cosched's plans
    before       what it was planned with, on the rank that plans
    planning_s   host time of the view, the plan and its check [s]; None: nothing was planned here
    split        the running batch while it is built, where the decode of some requests pauses
                 (`cosched.engine.port.partial`)
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
    before: Before | None = None
    planning_s: float | None = None
    split: Any = None
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

    @cached_property
    def plan_json(self) -> msgspec.Raw:
        """`Plan.to_json`, encoded once for all uses."""
        return self.plan.to_json()

    @property
    def seconds(self) -> float:
        """`duration_s` of an iteration that has ended."""
        assert self.duration_s is not None, "it is under way"
        return self.duration_s

    @property
    def end_s(self) -> float:
        """When its result was there [s]."""
        return self.start_s + self.seconds


def give(batch: Any, iteration: Iteration | None) -> None:
    """The batch is the next to be launched, and runs this; None: it was not planned."""
    batch.cosched = iteration


def taken(batch: Any) -> Iteration:
    """What a batch runs that is launched now. The running batch is that of the next iteration
    too."""
    iteration: Iteration | None = getattr(batch, "cosched", None)
    batch.cosched = None
    return iteration or Iteration()
