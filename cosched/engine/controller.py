"""The loop: one step for each iteration of a scheduler.

step      what waits and runs → view → plan → apply → SGLang builds the batch
launched  the batch is about to run
finished  its tokens are known: observe, learn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cosched.config import Config
from cosched.core.caps import EngineCaps
from cosched.core.group import NO_OTHERS
from cosched.core.plan import Plan, PreemptMode
from cosched.core.request import LateReason
from cosched.engine import port
from cosched.engine.clock import EngineClock
from cosched.engine.feature import Feature, Features
from cosched.engine.features.kv_manager import KvManager
from cosched.engine.guard import Guard
from cosched.engine.iteration import Iteration, Moment, give
from cosched.engine.observe import IterationObserver
from cosched.engine.planner import Planner, Sight
from cosched.engine.port.building import PrefillPlan, build_prefill
from cosched.engine.port.partial import split
from cosched.engine.port.penalties import count_resumed
from cosched.engine.rank_agreement import Group, Microbatches
from cosched.engine.ranks import Ranks, Shared
from cosched.engine.running_table import RunningTable
from cosched.engine.state import Counters
from cosched.engine.tracked import TrackedRequest
from cosched.engine.view_of import SchedulerView
from cosched.engine.waiting import WaitingQueue
from cosched.memory.eviction import Eviction
from cosched.policies import policy_entry
from cosched.predict.calibration import Calibrator
from cosched.wire import LATE_KEY


@dataclass(kw_only=True, eq=False)
class Controller:
    """Plans the iterations of one scheduler, observes them and learns from them.

    waiting   stands in for SGLang's waiting queue
    planner   None: another tensor-parallel rank plans, and this one applies its plans
    ranks     None: there is one rank
    group     None: no other ranks step together with this one, and there is no pipeline
    features  hear of each step
    """

    scheduler: Any
    config: Config
    caps: EngineCaps
    observer: IterationObserver
    predictor: Calibrator
    waiting: WaitingQueue
    table: RunningTable
    ranks: Ranks | None = None
    group: Group | Microbatches | None = None
    planner: Planner | None = None
    counters: Counters = field(default_factory=Counters)
    due: Iteration | None = None
    """Planned, while SGLang builds its batch."""
    must_decode: set[int] = field(default_factory=set)
    """Microbatches of which `BatchRules.must_decode` holds."""

    def __post_init__(self) -> None:
        self.features: Features = self.waiting.features

    @property
    def is_timed(self) -> bool:
        """Plans depend on predicted times."""
        return policy_entry(self.config.policy).timed

    @property
    def clock(self) -> EngineClock:
        return self.observer.clock

    @property
    def guard(self) -> Guard:
        return self.observer.guard

    @property
    def kv(self) -> KvManager | None:
        """None: SGLang's own eviction order holds."""
        return self.features.get(KvManager)

    # --- The loop ---

    def wait_for_requests(self) -> None:
        """Requests are about to be received, for the next iteration."""
        self.features.tell(Feature.on_receive)

    def step(
        self, build: Callable[..., tuple[Any, Any]], running_batch: Any, **options: Any
    ) -> tuple[Any, Any]:
        """Plan one iteration and have SGLang build its prefill batch.

        build: SGLang's own `Scheduler._get_new_batch_prefill_raw`; options: its other arguments.
        Returns ``(batch or None, running_batch)`` as that does; with None the scheduler decodes the
        running batch.
        """
        port.admit_ready_grammars(self.scheduler)
        nothing_runs = self.scheduler.chunked_req is None and running_batch.is_empty()
        is_idle = nothing_runs and not self.waiting.may_admit
        look = self._agree(running_batch, is_idle=is_idle)
        if is_idle:
            self.idle()
            return None, running_batch
        self.due = self._drained(self.plan(running_batch, look), running_batch)
        return self._apply(self.due, running_batch, partial(build, **options))

    def _agree(self, running_batch: Any, *, is_idle: bool) -> Sight | None:
        """With other ranks that step together, on what each may plan. None: there are none."""
        if self.group is None:
            return None
        if is_idle or self.planner is None:
            self.group.agree(None, None, self.observer.newest)
            return None
        look = self.planner.look(running_batch)
        self.group.agree(self.planner.policy, look.view, self.observer.newest)
        return look

    def plan(
        self,
        running_batch: Any,
        look: Sight | None = None,
        *,
        instead: Iteration | None = None,
    ) -> Iteration:
        """The next iteration, validated; the same plan on every rank. look, instead: as for
        `Planner.plan`."""
        iteration, given = None, dict[str, Any]()
        if self.planner is not None:
            iteration = self.planner.plan(running_batch, look, instead=instead)
            for rid, reason in iteration.plan.late.items():
                self._judged_late(rid, reason)
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

    def view(self, running_batch: Any, moment: Moment) -> SchedulerView:
        """What a plan made now would see."""
        return SchedulerView(
            self,
            running_batch,
            moment,
            must_decode=port.microbatch(self.scheduler) in self.must_decode,
            others=NO_OTHERS if self.group is None else self.group.others,
        )

    def _drained(self, iteration: Iteration, running_batch: Any) -> Iteration:
        """To preempt a request all its tokens must be known: such an iteration does not overlap.
        The iteration, now that all results are known, without requests that have ended. It fits:
        they leave memory. It is planned again where that may spare a running request. The decision
        log has the plan as it was made."""
        plan = iteration.plan
        if not (plan.preempt and port.drain_results(self.scheduler)):
            return iteration
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

    def _apply(
        self, iteration: Iteration, running_batch: Any, build: Callable[..., tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """As `step` returns it."""
        scheduler, plan = self.scheduler, iteration.plan
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
            build, scheduler, prefills, candidates, running_batch
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
        if iteration is None:
            if batch is None:
                return running_batch
            iteration = Iteration()  # not planned: requests are isolated (`RequestFaults`)
        if batch is not None:
            give(batch, iteration)
        self.features.tell(Feature.on_launched, iteration, batch)
        return running_batch

    def look_after(self, unfinished: Any | None) -> None:
        """The request that was in the middle of its prefill when SGLang began to build a batch. If
        it was aborted, SGLang has released it by now, and no result will say so."""
        if unfinished is not None and not port.is_under_way(unfinished):
            self.on_result(None, [unfinished])

    def finished(self, iteration: Iteration | None, batch: Any) -> None:
        """The tokens of an iteration are known. iteration: None if its launch was not observed."""
        if iteration is not None:
            self.counters.count_result(iteration)
            self.features.tell(Feature.on_result, iteration, batch)
        self.table.came(batch)
        self.on_result(iteration, batch.reqs)
        self.features.tell(Feature.on_report, is_idle=False)

    def on_result(self, iteration: Iteration | None, reqs: Sequence[Any]) -> None:
        """These requests have new tokens, or have ended. Under overlap one that has ended is part
        of one more iteration."""
        requests = [t for req in reqs if (t := TrackedRequest.of(req)) is not None]
        requests = [tracked for tracked in requests if not tracked.is_ended]
        if self.planner is not None:
            with self.guard.watching("timekeeper"):
                self.planner.timekeeper.on_result(iteration, requests)
        for tracked in requests:
            if tracked.req.finished_reason is not None:
                tracked.is_ended = True
                if self.planner is not None:
                    self._on_finished(tracked)
        self.features.tell(Feature.on_tokens, requests, self.clock.now_s())

    def _on_finished(self, tracked: TrackedRequest) -> None:
        """A request has its whole reply, or was aborted."""
        self.table.ended(tracked)
        self.waiting.ended(tracked)
        self.features.tell(Feature.on_finished, tracked)

    def idle(self) -> None:
        """The scheduler has looked for requests, and has nothing to do."""
        self.waiting.looked(self.clock.now_s())
        if not self.observer.is_busy:
            self.features.tell(Feature.on_report, is_idle=True)

    # --- The parts of a plan ---

    def _evicted(self, plan: Plan, running_batch: Any) -> Sequence[Eviction] | None:
        """What is evicted for a plan on all ranks; None: the engine's order holds."""
        kv = self.kv
        if kv is None:
            return None
        page = self.caps.page_size
        need = sum(self.caps.ceil_to_page(n) + page for n in plan.prefill.values())
        evictions: Sequence[Eviction] | None = None
        with self.guard.watching("kv"):
            evictions = kv.next_to_go(need + page * len(running_batch.reqs))
        return evictions

    def _judged_late(self, rid: str, reason: LateReason) -> None:
        tracked = self.waiting.get(rid)
        unfinished = self.scheduler.chunked_req
        if tracked is None and unfinished is not None and unfinished.rid == rid:
            tracked = TrackedRequest.of(unfinished)
        if tracked is not None and tracked.late is None:
            tracked.late = reason
            self.features.tell(Feature.on_late, tracked, reason)
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
        tracked = self.waiting.track(req)
        num_computed = tracked.num_computed_tokens
        self.table.forget(tracked)
        port.release(self.scheduler.tree_cache, req, keep=mode is not PreemptMode.RECOMPUTE)
        self.features.tell(Feature.on_preempted, tracked, mode, num_computed=num_computed)
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
                self.features.tell(Feature.on_refused, req.cosched)
            else:
                self.waiting.append(req)

    def admitted(self, tracked: TrackedRequest) -> None:
        """A waiting request is in the batch that is being built."""
        self.table.forget(tracked)
        self.features.tell(Feature.on_admitted, tracked)

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
