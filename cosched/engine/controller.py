"""The loop: one step for each iteration of a scheduler.

step      what waits and runs → view → policy.plan → validate → apply → SGLang builds the batch
launched  the batch is about to run
finished  its tokens are known: observe, learn
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cosched.config import Config
from cosched.core.batch import BatchTotals
from cosched.core.caps import EngineCaps
from cosched.core.group import NO_OTHERS
from cosched.core.plan import Plan, PreemptMode, SkipReason
from cosched.core.request import LateReason, Request
from cosched.engine import port
from cosched.engine.clock import EngineClock
from cosched.engine.feature import Feature
from cosched.engine.group import Group, Microbatches
from cosched.engine.guard import Guard
from cosched.engine.iteration import Before, Iteration, Moment, give
from cosched.engine.kv import KvManager
from cosched.engine.last_moment import Arrivals, LastMoment
from cosched.engine.lengths import Lengths
from cosched.engine.observe import IterationObserver
from cosched.engine.port.building import PrefillPlan, build_prefill
from cosched.engine.port.partial import split
from cosched.engine.port.penalties import count_resumed
from cosched.engine.port.prefixes import RunningPrefixes
from cosched.engine.ranks import Ranks, Shared
from cosched.engine.running_table import RunningTable
from cosched.engine.service import ServiceRecord
from cosched.engine.state import PLANNING_WINDOW, Counters
from cosched.engine.timekeeper import Timekeeper
from cosched.engine.tracked import TrackedRequest
from cosched.engine.view_of import SchedulerView
from cosched.engine.waiting import WaitingQueue
from cosched.memory.eviction import Eviction
from cosched.memory.recompute import RecomputeBudget
from cosched.pool.tenants import TenantPool
from cosched.predict.calibration import Calibrator, error_factor
from cosched.schedule.base import Policy
from cosched.wire import LATE_KEY

MAX_BACKOFF_PLANS = 64
"""Plans for which a request backs off that the engine refuses again and again."""

_Look = tuple[SchedulerView, Before]
"""What a plan is made from."""


@dataclass(kw_only=True, eq=False)
class Controller:
    """Plans the iterations of one scheduler, observes them and learns from them.

    waiting      stands in for SGLang's waiting queue
    timekeeper   None: another tensor-parallel rank plans, and this one applies its plans
    ranks        None: there is one rank
    group        None: no other ranks step together with this one, and there is no pipeline
    last_moment  None: an iteration is planned as soon as the one before it runs, or has ended
    kv           None: SGLang's own eviction order holds
    prefixes     None: the engine reads the KV of a shared prefix for each request
    is_timed     plans depend on predicted times
    features     hear of each step
    """

    scheduler: Any
    config: Config
    caps: EngineCaps
    policy: Policy[Any]
    is_timed: bool
    clock: EngineClock
    guard: Guard
    observer: IterationObserver
    predictor: Calibrator
    lengths: Lengths
    waiting: WaitingQueue
    table: RunningTable
    arrivals: Arrivals
    service: ServiceRecord
    recompute: RecomputeBudget
    timekeeper: Timekeeper | None
    ranks: Ranks | None
    group: Group | Microbatches | None
    last_moment: LastMoment | None
    kv: KvManager | None
    prefixes: RunningPrefixes | None

    counters: Counters = field(default_factory=Counters)
    planning_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=PLANNING_WINDOW))
    due: Iteration | None = None
    """Planned, while SGLang builds its batch."""
    must_decode: set[int] = field(default_factory=set)
    """Microbatches of which `BatchRules.must_decode` holds."""
    latest: Iteration = field(default_factory=Iteration)
    """Planned last."""

    def __post_init__(self) -> None:
        self._state = self.policy.initial
        self.features = self.waiting.features

    # --- The loop ---

    def wait_for_requests(self) -> None:
        """Requests are about to be received, for the next iteration."""
        if self.last_moment is not None:
            with self.guard.watching("timing"):
                self.last_moment.wait()

    def step(
        self, build: Callable[..., tuple[Any, Any]], running_batch: Any, **options: Any
    ) -> tuple[Any, Any]:
        """Plan one iteration and have SGLang build its prefill batch.

        build: SGLang's own `Scheduler._get_new_batch_prefill_raw`; options: its other arguments.
        Returns ``(batch or None, running_batch)`` as that does; with None the scheduler decodes the
        running batch.
        """
        scheduler = self.scheduler
        port.admit_ready_grammars(scheduler)
        nothing_runs = scheduler.chunked_req is None and running_batch.is_empty()
        is_idle = nothing_runs and not self.waiting.may_admit
        look: _Look | None = None
        if self.group is not None:
            if not is_idle and self.timekeeper is not None:
                look = self._look(running_batch)
            view = None if look is None else look[0]
            self.group.agree(self.policy, view, self.observer.newest)
        if is_idle:
            self.idle()
            return None, running_batch
        iteration = self.plan(running_batch, look)
        # To preempt a request all its tokens must be known: this iteration does not overlap.
        if iteration.plan.preempt and port.drain_results(scheduler):
            iteration = self._after_draining(iteration, running_batch)
        self.due, plan = iteration, iteration.plan
        taken = self.table.promise(plan, self.waiting.get, running_batch, scheduler.chunked_req)
        self._preempt(plan, running_batch)
        due = port.microbatch(scheduler)
        self.must_decode.discard(due)
        if plan.paused:
            iteration.split = split(running_batch, plan.paused)
            running_batch = iteration.split.active
        if not plan.prefill:
            return None, running_batch
        candidates = [t.req for rid in plan.prefill if (t := self.waiting.get(rid)) is not None]
        prefills = PrefillPlan(
            num_tokens=plan.prefill,
            total=sum(map(self.caps.ceil_to_page, plan.prefill.values())),
            taken=taken,
        )
        batch, running_batch, left = build_prefill(
            partial(build, **options), scheduler, prefills, candidates, running_batch
        )
        self._admit(candidates, left)
        if batch is not None:
            self.counters.count_prefills(batch)
            if not port.decodes_of(batch) and not running_batch.is_empty():
                self.must_decode.add(due)
            count_resumed(batch)
        return batch, running_batch

    def launched(self, batch: Any | None, running_batch: Any) -> Any:
        """An iteration's batch is ready to run, if there is one. Returns the running batch, with
        the requests whose decode is paused in this iteration."""
        iteration, self.due = self.due, None
        if iteration is not None and iteration.split is not None:
            running_batch = iteration.split.rejoin(batch)
            iteration.split = None
        if batch is not None and not port.runs_model(batch):  # other ranks step
            batch = None
        if batch is not None:
            give(batch, iteration)
            if self.last_moment is not None:
                with self.guard.watching("timing"):
                    came_late = self.last_moment.launching()
                    if iteration is not None:
                        iteration.came_late = came_late
        if iteration is not None:
            self.features.tell(Feature.on_launched, iteration, batch)
        return running_batch

    def finished(self, iteration: Iteration | None, batch: Any) -> None:
        """The tokens of an iteration are known. iteration: None if its launch was not observed."""
        if iteration is not None:
            self.features.tell(Feature.on_result, iteration, batch)
            self.waiting.computed(batch.reqs[: len(iteration.shape.prefills)])
        self.table.came(batch)
        self.on_result(iteration, batch.reqs)
        self._report(is_idle=False)

    def _report(self, *, is_idle: bool) -> None:
        """What people are told: no plan waits for it."""
        if self.kv is not None:
            with self.guard.watching("metrics"):
                self.kv.count_uses()
        self.features.tell(Feature.on_report, is_idle=is_idle)

    def on_result(self, iteration: Iteration | None, reqs: Sequence[Any]) -> None:
        """These requests have new tokens, or have ended."""
        requests = [t for req in reqs if (t := TrackedRequest.of(req)) is not None]
        if self.timekeeper is not None:
            with self.guard.watching("timekeeper"):
                for tracked in self.timekeeper.on_result(iteration, requests):
                    self._on_finished(tracked)
        with self.guard.watching("metrics"):
            self.service.on_result(requests, self.clock.now_s())

    def _on_finished(self, tracked: TrackedRequest) -> None:
        """A request has its whole reply, or was aborted."""
        self.lengths.ended(tracked)
        self.table.forget(tracked)
        if self.prefixes is not None:
            self.prefixes.forget(tracked.req)
        self.waiting.ended(tracked)
        self.features.tell(Feature.on_finished, tracked)
        if self.kv is not None:
            self.kv.ended(tracked)

    def idle(self) -> None:
        """The scheduler has looked for requests, and has nothing to do."""
        self.arrivals.looked(self.clock.now_s())
        if not self.observer.is_busy:
            self._report(is_idle=True)

    # --- The plan ---

    def plan(
        self,
        running_batch: Any,
        look: _Look | None = None,
        *,
        instead: Iteration | None = None,
    ) -> Iteration:
        """The next iteration, validated; the same plan on every rank.

        look: what its plan sees; None: as of now. instead: in place of this one, with the state
        that the policy had before it.
        """
        iteration, given = None, dict[str, Any]()
        if self.timekeeper is not None:
            with port.pinning_chunk(self.scheduler):
                iteration = self._plan(running_batch, look, instead)
            if self.features.sharing:
                given = self.features.to_share()
        if self.ranks is not None:
            own = None
            if iteration is not None:
                evictions = self._evicted(iteration.plan, running_batch)
                own = Shared(iteration.plan_json, evictions, given)
            shared = self.ranks.share(own)
            given = shared.features
            if iteration is None:
                iteration = Iteration(plan=Plan.from_json(shared.plan))
            if self.kv is not None:
                self.kv.give(shared.evictions)
        if self.features.sharing:
            self.features.shared(given)
        assert iteration is not None, "this rank plans, or another sends its plan"
        return iteration

    def _plan(self, running_batch: Any, look: _Look | None, instead: Iteration | None) -> Iteration:
        started_s = time.perf_counter()
        view, before = look or self._look(running_batch, instead)
        made = self.guard.plan(self.policy, self.config.policy, view, self._state)
        if made is not None:
            plan, self._state = made
        else:
            if self.guard.has_given_up and isinstance(self.waiting.offline, TenantPool):
                self.waiting.use_arrival_order()
            plan = self.guard.safe_plan(view)
            self.counters.num_safe_plans += 1
        planning_s = time.perf_counter() - started_s
        iteration = Iteration(plan=plan, before=before, planning_s=planning_s)
        self._record(iteration, view)
        return iteration

    def _look(self, running_batch: Any, instead: Iteration | None = None) -> _Look:
        """Say to all that depends on time what time it is, and look."""
        now_s = self.clock.now_s()
        moment = Moment(now_s, now_s)
        with self.guard.watching("timekeeper"):
            assert self.timekeeper is not None, "this rank plans"
            moment = self.timekeeper.moment()
        if instead is not None and instead.before is not None:
            self._state = instead.before.state
            moment = moment._replace(ended=instead.before.moment.ended + moment.ended)
        before = Before(self._state, moment)
        self.arrivals.looked(moment.now_s)
        self.waiting.advance(moment.now_s)
        self.features.tell(Feature.on_look, moment.now_s)
        view = self.view(running_batch, moment)
        if self.kv is not None:
            with self.guard.watching("kv"):
                self.kv.advance(moment.now_s, self.predictor, own=view.own)
        self.predictor.error = error_factor(self.config.predictor_error, self.counters.num_plans)
        return view, before

    def view(self, running_batch: Any, moment: Moment) -> SchedulerView:
        """What a plan made now would see."""
        return SchedulerView(
            self,
            running_batch,
            moment,
            must_decode=port.microbatch(self.scheduler) in self.must_decode,
            others=NO_OTHERS if self.group is None else self.group.others,
        )

    def _record(self, iteration: Iteration, view: SchedulerView) -> None:
        self.latest, planning_s = iteration, iteration.planning_s or 0.0
        self.counters.num_plans += 1
        self.counters.planning_s += planning_s
        self.planning_times_s.append(planning_s)
        self.features.tell(Feature.on_plan, iteration, view)
        for rid, reason in iteration.plan.late.items():
            self._judged_late(rid, reason)

    def _after_draining(self, iteration: Iteration, running_batch: Any) -> Iteration:
        """The iteration, now that all results are known, without requests that have ended. It fits:
        they leave memory. It is planned again where that may spare a running request. The decision
        log has the plan as it was made."""
        plan = iteration.plan
        num_running = len(running_batch.reqs)
        running_batch.filter_batch()
        if len(running_batch.reqs) == num_running:
            return iteration
        unfinished = self.scheduler.chunked_req
        stops_running = any(unfinished is None or p.rid != unfinished.rid for p in plan.preempt)
        if stops_running or not plan.prefill:
            self.counters.num_replans += 1
            return self.plan(running_batch, instead=iteration)
        still = plan.paused.intersection([req.rid for req in running_batch.reqs])
        iteration.plan = msgspec.structs.replace(plan, paused=still)
        return iteration

    def _evicted(self, plan: Plan, running_batch: Any) -> Sequence[Eviction] | None:
        """What is evicted for a plan on all ranks; None: the engine's order holds."""
        if self.kv is None:
            return None
        page = self.caps.page_size
        need = sum(self.caps.ceil_to_page(n) + page for n in plan.prefill.values())
        evictions: Sequence[Eviction] | None = None
        with self.guard.watching("kv"):
            evictions = self.kv.next_to_go(need + page * len(running_batch.reqs))
        return evictions

    def _judged_late(self, rid: str, reason: LateReason) -> None:
        tracked = self.waiting.get(rid)
        unfinished = self.scheduler.chunked_req
        if tracked is None and unfinished is not None and unfinished.rid == rid:
            tracked = TrackedRequest.of(unfinished)
        if tracked is not None:
            self.service.judged_late(tracked, reason)
            port.tell_client(tracked.req, LATE_KEY, reason.value)

    def _preempt(self, plan: Plan, running_batch: Any) -> None:
        if not plan.preempt:
            return
        modes = {preemption.rid: preemption.mode for preemption in plan.preempt}
        unfinished = self.scheduler.chunked_req
        if unfinished is not None and unfinished.rid in modes:
            self.scheduler.chunked_req = None
            self._put_back(unfinished, modes[unfinished.rid])
        stopped = [req for req in running_batch.reqs if req.rid in modes]
        for req in stopped:
            self._put_back(req, modes[req.rid])
        if stopped:
            keep = [i for i, req in enumerate(running_batch.reqs) if req.rid not in modes]
            running_batch.filter_batch(keep_indices=keep)

    def _put_back(self, req: Any, mode: PreemptMode) -> None:
        """Release the memory of a preempted request and queue it again."""
        self.counters.num_preemptions += 1
        tracked = TrackedRequest.of(req)
        if tracked is not None:
            tracked.num_preempted_at = tracked.num_computed_tokens
            self.table.forget(tracked)
        port.release(self.scheduler.tree_cache, req, keep=mode is not PreemptMode.RECOMPUTE)
        if mode is PreemptMode.CHECKPOINT and self.kv is not None:
            self.kv.checkpoint(req.cosched)
        port.put_back(self.scheduler, req)

    def _admit(self, candidates: Sequence[Any], left: Sequence[Any]) -> None:
        """SGLang has built a batch of `candidates`. left: what its waiting queue holds now."""
        refused = {req.rid for req in left}
        for req in candidates:
            if req.rid not in refused:
                self.waiting.remove_rid(req.rid)
                self.admitted(req.cosched)
        for req in left:
            if req in self.waiting:
                self._back_off(req.cosched)
            else:
                self.waiting.append(req)

    def admitted(self, tracked: TrackedRequest) -> None:
        """A waiting request is in the batch that is being built."""
        tracked.num_refusals = 0
        self.table.forget(tracked)
        num_cached = tracked.num_prefix_tokens
        num_recomputed = tracked.num_preempted_at - num_cached
        tracked.num_preempted_at = 0
        if num_recomputed > 0:
            self.counters.recomputed_tokens += num_recomputed
            totals = BatchTotals()
            totals.add_prefill(num_recomputed, num_cached)
            if self.is_timed:
                self.recompute.pay(self.predictor.predict_s(totals), self.clock.now_s())

    def _back_off(self, tracked: TrackedRequest) -> None:
        """The engine refused a request that the plan admits: it backs off, longer each time."""
        self.counters.num_engine_refusals += 1
        tracked.num_refusals += 1
        num_plans = min(2**tracked.num_refusals, MAX_BACKOFF_PLANS)
        tracked.backoff_until = self.counters.num_plans + num_plans

    def why_blocked(self, request: Request) -> SkipReason | None:
        """As `View.why_blocked`."""
        assert isinstance(request, TrackedRequest), f"{type(request)=}"
        if self.kv is not None and self.kv.is_restoring(request):
            return SkipReason.RESTORING
        if request.backoff_until > self.counters.num_plans:
            return SkipReason.ENGINE_REFUSED
        return None

    def abandon(self, requests: Sequence[TrackedRequest]) -> None:
        """The iteration was taken back: these requests have released their memory and wait."""
        self.due = None
        self.must_decode.clear()
        for tracked in requests:
            self.table.forget(tracked)
        self.features.tell(Feature.on_abandoned)

    @property
    def paused_adapters(self) -> frozenset[str | None]:
        """LoRA adapters of the requests whose decode is paused in the iteration being built."""
        part = None if self.due is None else self.due.split
        return frozenset() if part is None else frozenset(part.adapters)

    def use_transfer(self, transfer_s: float) -> None:
        """A token of KV takes `transfer_s` from host memory or to it [s]."""
        self.predictor.load_s_per_token = transfer_s
        if self.kv is not None:
            self.kv.use_transfer(transfer_s)

    def use_policy(self, policy: Policy[Any]) -> Policy[Any]:
        """Plan by another policy from now on; returns the one before."""
        before, self.policy = self.policy, policy
        self._state = policy.initial
        return before
