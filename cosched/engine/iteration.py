"""One iteration from its plan to its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from cosched.core.batch import BatchShape
from cosched.core.plan import EMPTY_PLAN, Plan

__all__ = ["Iteration"]


@dataclass(slots=True, eq=False)
class Iteration:
    """The same object goes from the plan to the launch to the result, and to all that watch: under
    the overlap scheduler two are under way at once.

    plan         what it was to run; the engine's own decision where nothing of cosched's plans
    planning_s   host time of the view, the plan and its check [s]; None: nothing was planned
    shape        what runs
    predicted_s  time predicted for it when it was launched [s]; None: nobody predicts
    launched_s   when it was launched [s]
    came_late    the scheduler had waited for too long before it: the device had nothing to do
    follows      nobody was idle before it
    start_s      when the one before it ended, or when it was launched after idle time [s]
    duration_s   from then until its result was there [s]; None: it is under way
    is_exact     nobody did anything else while it ended: that is how long it took
    """

    plan: Plan = field(default_factory=lambda: EMPTY_PLAN)
    planning_s: float | None = None
    shape: BatchShape = field(default_factory=BatchShape)
    predicted_s: float | None = None
    launched_s: float = 0.0
    came_late: bool = False
    follows: bool = False
    start_s: float = 0.0
    duration_s: float | None = None
    is_exact: bool = True

    @property
    def seconds(self) -> float:
        """`duration_s` of one that is over."""
        assert self.duration_s is not None, "it is under way"
        return self.duration_s

    @property
    def end_s(self) -> float:
        """When its result was there [s]."""
        return self.start_s + self.seconds
