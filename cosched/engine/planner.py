"""Makes the plans of the rank that plans."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

from cosched.config import Config
from cosched.engine import port
from cosched.engine.feature import Feature, Features
from cosched.engine.guard import Guard
from cosched.engine.iteration import Before, Iteration, Moment
from cosched.engine.state import Counters
from cosched.engine.timekeeper import Timekeeper
from cosched.engine.view_of import SchedulerView
from cosched.engine.waiting import WaitingQueue
from cosched.pool.tenants import TenantPool
from cosched.predict.calibration import Calibrator, error_factor
from cosched.schedule.base import Policy


class Sight(NamedTuple):
    """What a plan is made from."""

    view: SchedulerView
    before: Before


class Viewed(Protocol):
    """What is planned; a `cosched.engine.controller.Controller` is."""

    scheduler: Any
    config: Config
    predictor: Calibrator
    waiting: WaitingQueue
    features: Features
    counters: Counters

    @property
    def guard(self) -> Guard: ...

    def view(self, running_batch: Any, moment: Moment) -> SchedulerView: ...


class Planner:
    """policy: may be replaced (`use_policy`); its state goes from plan to plan."""

    def __init__(self, viewed: Viewed, policy: Policy[Any], timekeeper: Timekeeper) -> None:
        self._viewed = viewed
        self.policy = policy
        self.timekeeper = timekeeper
        self._state = policy.initial

    def use_policy(self, policy: Policy[Any]) -> Policy[Any]:
        """Plan by another policy from now on; returns the one before."""
        before, self.policy = self.policy, policy
        self._state = policy.initial
        return before

    def look(self, running_batch: Any, *, instead: Iteration | None = None) -> Sight:
        """Say to all that depends on time what time it is, and look. instead: as for `plan`."""
        viewed = self._viewed
        now_s = viewed.waiting.clock.now_s()
        moment = Moment(now_s, now_s)
        with viewed.guard.watching("timekeeper"):
            moment = self.timekeeper.moment()
        if instead is not None and instead.before is not None:
            self._state = instead.before.state
            moment = moment._replace(ended=instead.before.moment.ended + moment.ended)
        viewed.waiting.advance(moment.now_s)
        view = viewed.view(running_batch, moment)
        viewed.features.tell(Feature.on_look, view)
        error = viewed.config.predictor_error
        viewed.predictor.error = error_factor(error, viewed.counters.num_plans)
        return Sight(view, Before(self._state, moment))

    def plan(
        self, running_batch: Any, look: Sight | None, *, instead: Iteration | None = None
    ) -> Iteration:
        """The next iteration, validated, by the policy or else by the safe rule. look: None: as of
        now. instead: in place of this one, with the state that the policy had before it."""
        viewed, guard = self._viewed, self._viewed.guard
        started_s = time.perf_counter()
        with port.pinning_chunk(viewed.scheduler):
            view, before = look or self.look(running_batch, instead=instead)
            made = guard.plan(self.policy, viewed.config.policy, view, self._state)
            if made is not None:
                plan, self._state = made
            else:
                if guard.has_given_up and isinstance(viewed.waiting.offline, TenantPool):
                    viewed.waiting.use_arrival_order()
                plan = guard.safe_plan(view)
                viewed.counters.num_safe_plans += 1
            planning_s = time.perf_counter() - started_s
            iteration = Iteration(plan=plan, before=before, planning_s=planning_s)
            viewed.counters.count_plan(iteration)
            viewed.features.tell(Feature.on_plan, iteration, view)
        return iteration
