"""The controller: one per scheduler. Waiting requests in, plan out, results observed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from cosched.config import Config
from cosched.core.batch import BatchShape
from cosched.core.plan import Plan
from cosched.core.request import RequestClass
from cosched.core.validate import validate
from cosched.core.view import View
from cosched.engine.clock import Clock
from cosched.engine.decisions import DecisionLog
from cosched.engine.observe import IterationObserver, StepResult
from cosched.engine.partial import SplitBatch
from cosched.engine.tracked import TrackedRequest
from cosched.engine.view_of import SchedulerView, caps_of
from cosched.engine.waiting import WaitingQueue, WaitingSummary
from cosched.latency.calibration import Calibrator
from cosched.latency.features import BatchTotals
from cosched.offline.pool import ArrivalQueue
from cosched.policy.base import Policy, PolicySettings
from cosched.policy.registry import PolicyEntry

__all__ = ["Controller", "Counters"]


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    planning_s  host time spent in views and policies [s]
    """

    num_plans: int = 0
    num_replans: int = 0
    planning_s: float = 0.0
    num_preemptions: int = 0
    num_engine_refusals: int = 0
    online_prefill_tokens: int = 0
    offline_prefill_tokens: int = 0


class Controller:
    """Owns the waiting requests of a scheduler and asks the policy what to run next.

    `waiting` takes the place of SGLang's own waiting queue for as long as the scheduler lives.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        entry: PolicyEntry,
        config: Config,
        clock: Clock,
        observer: IterationObserver,
    ) -> None:
        self.scheduler = scheduler
        self.config = config
        self.clock = clock
        self.observer = observer
        self.caps = caps_of(scheduler)
        self.predictor = Calibrator()
        assert entry.make is not None, f"{entry.name} plans nothing"
        self.policy: Policy = entry.make(
            PolicySettings(
                caps=self.caps,
                slo=config.slo.targets(),
                predictor=self.predictor,
                latency_budget_s=config.latency_budget_s,
            )
        )
        self._predicts = entry.predicts
        if entry.predicts:
            observer.add_listener(self._learn)
        self.decisions: DecisionLog | None = None
        self.counters = Counters()
        self.split: SplitBatch | None = None
        """Of the iteration that is being made ready, when some running requests sit it out."""
        self.waiting = WaitingQueue(pool=ArrivalQueue(), clock=clock)
        for req in scheduler.waiting_queue:
            self.waiting.append(req)
        scheduler.waiting_queue = self.waiting
        summary = WaitingSummary(self.waiting)
        # The inquirer is a frozen dataclass of callables that the scheduler itself builds.
        object.__setattr__(scheduler.load_inquirer, "get_waiting_queue", lambda: summary)

    def use_clock(self, clock: Clock) -> None:
        """Take time from another clock; before the first request comes."""
        self.clock = clock
        self.waiting.clock = clock

    def plan(self, running_batch: Any) -> Plan:
        """The next iteration, checked against the engine's limits."""
        started_s = time.perf_counter()
        now_s = self.clock.now_s()
        view: View = SchedulerView(
            self.scheduler,
            running_batch=running_batch,
            waiting=self.waiting,
            caps=self.caps,
            now_s=now_s,
            start_s=self._start_s(now_s),
        )
        if self.decisions is not None:
            view = self.decisions.watch(view)
        plan = self.policy.plan(view)
        validate(plan, view)
        planning_s = time.perf_counter() - started_s
        self.counters.num_plans += 1
        self.counters.planning_s += planning_s
        if self.decisions is not None:
            self.decisions.planned(plan, planning_s)
        return plan

    def _start_s(self, now_s: float) -> float:
        """When the planned iteration can begin: when what is on the device ends, as predicted."""
        if not self._predicts:
            return now_s
        return self.observer.expected_end_s(now_s, self._predict_s)

    def _predict_s(self, shape: BatchShape) -> float:
        return self.predictor.predict_s(BatchTotals.of(shape))

    def _learn(self, step: StepResult) -> None:
        self.predictor.observe(step.shape, step.duration_s)

    def on_result(self, batch: Any) -> None:
        """The tokens of an iteration have come out."""
        if self.decisions is not None:
            self.decisions.finished(batch)
        if not batch.forward_mode.is_extend():
            return
        now_s = self.clock.now_s()
        for req in batch.reqs:
            tracked = TrackedRequest.of(req)
            if tracked is not None and tracked.first_token_s is None and req.output_ids:
                tracked.first_token_s = now_s

    def count_prefill(self, req: Any, num_tokens: int) -> None:
        """Count prompt tokens that the engine admitted."""
        tracked = TrackedRequest.of(req)
        if tracked is not None and tracked.request_class is RequestClass.OFFLINE:
            self.counters.offline_prefill_tokens += num_tokens
        else:
            self.counters.online_prefill_tokens += num_tokens

    def state(self) -> dict[str, Any]:
        """What ``/get_server_info`` shows."""
        running = [TrackedRequest.of(req) for req in self.scheduler.running_batch.reqs]
        num_offline = sum(
            1 for r in running if r is not None and r.request_class is RequestClass.OFFLINE
        )
        counters = self.counters
        return {
            "policy": self.config.policy,
            "num_waiting_online": len(self.waiting.online),
            "num_waiting_offline": len(self.waiting.offline),
            "num_waiting_tokens": self.waiting.num_tokens,
            "num_running_online": len(running) - num_offline,
            "num_running_offline": num_offline,
            "num_preemptions": counters.num_preemptions,
            "num_engine_refusals": counters.num_engine_refusals,
            "num_iterations": self.observer.num_iterations,
            "busy_s": round(self.observer.busy_s, 6),
            "num_plans": counters.num_plans,
            "num_replans": counters.num_replans,
            "mean_planning_us": round(counters.planning_s / max(counters.num_plans, 1) * 1e6, 1),
            "online_prefill_tokens": counters.online_prefill_tokens,
            "offline_prefill_tokens": counters.offline_prefill_tokens,
        }
