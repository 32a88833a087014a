"""The controller: one per scheduler. Waiting requests in, plan out, results observed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from cosched.config import Config
from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.plan import Plan, SkipReason
from cosched.core.request import LateReason, Request, RequestClass
from cosched.core.view import Ended
from cosched.core.wire import LATE_KEY
from cosched.engine import port
from cosched.engine.clock import EngineClock
from cosched.engine.decisions import DecisionLog
from cosched.engine.exporter import MetricsExporter
from cosched.engine.guard import Guard
from cosched.engine.identity import identity_of
from cosched.engine.isolated import AloneWatch
from cosched.engine.kv import KvManager, transfer_s_of
from cosched.engine.last_moment import Arrivals, LastMoment
from cosched.engine.lengths import Lengths
from cosched.engine.observe import Iteration, IterationObserver
from cosched.engine.port.partial import SplitBatch
from cosched.engine.port.prefixes import RunningPrefixes
from cosched.engine.ranks import Ranks, Shared
from cosched.engine.running import RunningTable, taken_by_guests
from cosched.engine.service import ServiceRecord
from cosched.engine.state import OfflineProgress, PlanningTimes, ReplicaState
from cosched.engine.timekeeper import Moment, Timekeeper
from cosched.engine.tracked import TrackedRequest
from cosched.engine.tree_core import can_watch
from cosched.engine.view_of import SchedulerView, num_cached
from cosched.engine.waiting import WaitingQueue, WaitingSummary
from cosched.memory.eviction import Eviction
from cosched.memory.recompute import RecomputeBudget
from cosched.policies import PolicyEntry
from cosched.pool.pool import ArrivalQueue, OfflinePool
from cosched.pool.prefix_pool import PrefixPool
from cosched.predict.calibration import Calibrator, error_factor
from cosched.predict.fitted import FittedPredictor
from cosched.predict.profile_file import Profile
from cosched.predict.work import prompt_cost_s, token_cost_s
from cosched.schedule.base import Policy, PolicySettings

MOST_BARRED_PLANS = 64
"""Plans for which a request stands back that the engine refuses again and again."""

_OFFLINE_IN_TAIL = 4
"""One of so many offline requests that run still does, in the mean, when no more begin."""
_CHUNK = 1024
"""Prompt tokens by which the time of one is told."""

PLANNING_WINDOW = 1000
"""Latest plans whose percentiles ``/get_server_info`` shows."""


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    num_safe_plans  plans made by the safe rule, because the policy failed (`cosched.engine.guard`)
    planning_s      host time spent in views and policies [s]
    """

    num_plans: int = 0
    num_replans: int = 0
    num_safe_plans: int = 0
    planning_s: float = 0.0
    num_preemptions: int = 0
    num_engine_refusals: int = 0
    online_prefill_tokens: int = 0
    offline_prefill_tokens: int = 0
    recomputed_tokens: int = 0
    offline_work_s: float = 0.0


RECOMPUTE_WINDOW_S = 60.0
"""What may be computed anew at once is the share of so much time (`KvConfig.recompute_share`)."""


class _Before(NamedTuple):
    """carry: what the policy was given; ended: `Moment.ended`."""

    carry: Any
    ended: tuple[Ended, ...]


class Log(Protocol):
    """A file that lines are written to."""

    @property
    def is_off(self) -> bool:
        """It was given up, because a line could not be written."""
        ...


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
        clock: EngineClock,
        observer: IterationObserver,
        guard: Guard,
    ) -> None:
        self.scheduler = scheduler
        self.config = config
        self.clock = clock
        self.observer = observer
        self.caps = port.caps_of(scheduler)
        self._prefixes: RunningPrefixes | None = None
        if self.caps.shared_prefix:
            self._prefixes = RunningPrefixes.of(scheduler)
        self.predictor = Calibrator(
            _known_predictor(scheduler, entry, config), graphs=port.graph_sizes_of(scheduler)
        )
        assert entry.make is not None, f"{entry.name} plans nothing"
        self.settings = PolicySettings(
            caps=self.caps,
            slo=config.slo.targets(),
            latency_budget_s=config.latency_budget_s,
            budgets=config.budgets,
            offline_rate=config.offline_rate,
            ecoserve=config.ecoserve,
        )
        self.policy: Policy[Any] = entry.make(self.settings)
        self._is_timed = entry.timed
        self._carry = self.policy.initial
        self._before: _Before | None = None
        """What the latest plan was made with, for it to be made again."""
        self.iteration: Iteration | None = None
        self._skipped: Mapping[str, SkipReason] = {}
        """Planned, and not launched yet."""
        self.guard = guard
        self.ranks: Ranks | None = None
        parallel = port.parallel()
        if parallel.tp_size > 1:
            self.ranks = Ranks(port.rank_group(scheduler), is_source=parallel.tp_rank == 0)
        self.is_source = self.ranks is None or self.ranks.is_source
        """This rank plans; the others do as it says."""
        self.taken: Mapping[str, int] = {}
        """Rid of a guest -> KV tokens that it has taken of what its host was promised, where the
        plan that is applied prefills."""
        self._has_hosted = False
        """A plan has had guests: most policies never do, and need not look for them."""
        self.lengths = Lengths(config.named_length(), guard)
        self._table = RunningTable(
            self.lengths, port.row_generations(scheduler), page_size=self.caps.page_size
        )
        self.timekeeper: Timekeeper | None = None
        if self.is_source:
            self.timekeeper = Timekeeper(
                clock=clock, observer=observer, predictor=self.predictor if entry.timed else None
            )
            self.timekeeper.add_end_listener(self.lengths.ended)
            if entry.timed:
                self.timekeeper.add_end_listener(self._count_work)
            self.timekeeper.add_end_listener(self._table.forget)
            prefixes = self._prefixes
            if prefixes is not None:
                self.timekeeper.add_end_listener(lambda tracked: prefixes.forget(tracked.req))
        self.decisions: DecisionLog | None = None
        self.exporter: MetricsExporter | None = None
        self.service = ServiceRecord(slo=self.settings.slo)
        self.logs: dict[str, Log] = {}
        """Those that are written, by name."""
        self.counters = Counters()
        self._planning_s: deque[float] = deque(maxlen=PLANNING_WINDOW)
        self.split: SplitBatch | None = None
        """Of the iteration that is being made ready, when some running requests sit it out."""
        self.decodes_due = False
        """See `BatchRules`."""
        pool: OfflinePool[TrackedRequest] = ArrivalQueue()
        if entry.pool is not None and self.is_source:
            pool = PrefixPool(
                config.pool or entry.pool,
                num_cached=partial(num_cached, scheduler.tree_cache),
                num_left=lambda request: self.lengths.remaining(request).median,
            )
        self._arrivals = Arrivals(observer)
        self.last_moment: LastMoment | None = None
        """None: an iteration is planned as soon as the one before it runs, or is over."""
        if (
            self.is_source
            and entry.timed
            and not (config.plan_early or entry.early)
            and port.overlaps(scheduler)
            and port.waits_alone(scheduler)
        ):
            self.last_moment = LastMoment(
                observer=observer,
                clock=clock,
                is_known=lambda shape: self.predictor.knows(BatchTotals.of(shape)),
            )
        self.waiting = WaitingQueue(
            pool=pool,
            clock=clock,
            guard=guard,
            bounds=config.target_bounds(),
            came_s=self._arrivals.came_s,
        )
        if self.timekeeper is not None:
            self.timekeeper.add_end_listener(self.waiting.ended)
        self.alone: AloneWatch | None = None
        """None: nothing is promised beside the targets."""
        if config.tolerance is not None and self.timekeeper is not None:
            self.alone = self.waiting.alone = AloneWatch(
                config.tolerance,
                caps=self.caps,
                overlaps=port.overlaps(scheduler),
                plans_ahead=port.overlaps(scheduler) and self.last_moment is None,
                predictor=self.predictor,
                num_cached=partial(num_cached, scheduler.tree_cache),
            )
            self.timekeeper.add_end_listener(self.alone.ended)
        self.kv: KvManager | None = None
        """None: SGLang's own eviction order holds."""
        kv = config.named_kv()
        if kv.is_ours and can_watch(scheduler):
            self.kv = KvManager(
                scheduler,
                # What is lost in seconds can be weighed where seconds are known.
                kv if entry.timed else msgspec.structs.replace(kv, admission=False),
                pool=lambda: self.waiting.offline,
                online=self.waiting.online,
                ttft_s=self.settings.slo.ttft_s,
            )
            # Elsewhere it only follows: rank 0 says what goes.
            if self.timekeeper is not None:
                self.waiting.kv = self.kv
                self.timekeeper.add_end_listener(self.kv.ended)
        if port.host_total(scheduler):
            self.use_transfer(transfer_s_of(scheduler, config.kv.host_bandwidth_gb_s))
        share = config.kv.recompute_share
        self._recompute = RecomputeBudget(share=share, most_s=share * RECOMPUTE_WINDOW_S)
        for req in scheduler.waiting_queue:
            self.waiting.append(req)
        scheduler.waiting_queue = self.waiting
        port.report_waiting(scheduler, WaitingSummary(self.waiting))

    def use_transfer(self, transfer_s: float) -> None:
        """A token of KV takes so long from host memory or to it [s]."""
        self.predictor.load_s_per_token = transfer_s
        if self.kv is not None:
            self.kv.use_transfer(transfer_s)

    def use_policy(self, policy: Policy[Any]) -> Policy[Any]:
        """Plan by another policy from now on; returns the one before."""
        before, self.policy = self.policy, policy
        self._carry = policy.initial
        return before

    def plan(self, running_batch: Any, *, is_again: bool = False) -> Plan:
        """The next iteration, checked against the engine's limits; the same on every rank.

        is_again: the plan before this one was discarded; the policy is asked with what it carried
        before that.
        """
        plan = self._plan(running_batch, is_again) if self.is_source else None
        if self.ranks is not None:
            own = None if plan is None else Shared(plan, self._evictions(plan, running_batch))
            plan, evictions = self.ranks.share(own)
            if self.kv is not None:
                self.kv.give(evictions)
        assert plan is not None
        return plan

    def wait_for_requests(self) -> None:
        """Requests are about to be received, for the next iteration."""
        if self.last_moment is not None:
            with self.guard.watching("timing"):
                self.last_moment.wait()

    def idle(self) -> None:
        """The scheduler has looked for requests, and has nothing to do."""
        self._arrivals.looked(self.clock.now_s())
        if self.exporter is not None:
            with self.guard.watching("metrics"):
                self.exporter.idle()

    def promise(self, plan: Plan, running_batch: Any) -> None:
        """Remember what a plan sets aside, and who grows into what is set aside for another."""
        running: dict[str, TrackedRequest] = {}
        if plan.hosts or any(self.waiting.get(rid) is None for rid in plan.promise):
            unfinished = self.scheduler.chunked_req
            running = {req.rid: req.cosched for req in running_batch.reqs}
            if unfinished is not None:
                running[unfinished.rid] = unfinished.cosched
        for rid, num_tokens in plan.promise.items():
            tracked = running.get(rid) or self.waiting.get(rid)
            if tracked is not None:  # it has ended while the plan was drained
                tracked.promise(num_tokens)
                self._table.forget(tracked)
        for rid, hosting in plan.hosts.items():
            guest, host = running.get(rid), running.get(hosting.host)
            if guest is not None and host is not None:
                guest.grow_into(host)
                self._table.forget(guest)
                self._has_hosted = True
        self.taken = {}
        if plan.prefill and self._has_hosted:
            self.taken = taken_by_guests([req.cosched for req in running_batch.reqs])

    def _evictions(self, plan: Plan, running_batch: Any) -> Sequence[Eviction] | None:
        """What goes for a plan on all ranks; None: the engine's order holds."""
        if self.kv is None or self.kv.core.is_off:
            return None
        page = self.caps.page_size
        need = sum(self.caps.ceil_to_page(n) + page for n in plan.prefill.values())
        evictions: Sequence[Eviction] | None = None
        with self.guard.watching("kv"):
            evictions = self.kv.next_to_go(need + page * len(running_batch.reqs))
        return evictions

    def _plan(self, running_batch: Any, is_again: bool) -> Plan:
        started_s = time.perf_counter()
        now_s = self.clock.now_s()
        moment = Moment(now_s, now_s)
        with self.guard.watching("timekeeper"):
            assert self.timekeeper is not None, "this rank plans"
            moment = self.timekeeper.moment()
        if is_again and self._before is not None:
            self._carry = self._before.carry
            moment = moment._replace(ended=self._before.ended + moment.ended)
        self._before = _Before(self._carry, moment.ended)
        self._arrivals.looked(moment.now_s)
        self.waiting.advance(moment.now_s)
        if self.kv is not None:
            with self.guard.watching("kv"):
                self.kv.advance(moment.now_s, self.predictor)
        if self.alone is not None:
            with self.guard.watching("tolerance"):
                self.alone.advance(moment.now_s)
        self.predictor.error = error_factor(self.config.predictor_error, self.counters.num_plans)
        view = self.view(running_batch, moment)
        made = self.guard.plan(self.policy, self.config.policy, view, self._carry)
        if made is not None:
            plan, self._carry = made
        else:
            if self.guard.has_given_up and isinstance(self.waiting.offline, PrefixPool):
                self.waiting.use_arrival_order()
            plan = self.guard.safe_plan(view)
            self.counters.num_safe_plans += 1
        planning_s = time.perf_counter() - started_s
        self.iteration = Iteration(plan=plan, planning_s=planning_s)
        self._skipped = plan.skipped
        self.counters.num_plans += 1
        self.counters.planning_s += planning_s
        self._planning_s.append(planning_s)
        if self.exporter is not None:
            with self.guard.watching("metrics"):
                self.exporter.planned(planning_s)
        with self._logging() as log:
            if log is not None:
                log.planned(self.iteration, view)
        for rid, reason in plan.late.items():
            self._judged_late(rid, reason)
        return plan

    def _judged_late(self, rid: str, reason: LateReason) -> None:
        tracked = self.waiting.get(rid)
        unfinished = self.scheduler.chunked_req
        if tracked is None and unfinished is not None and unfinished.rid == rid:
            tracked = TrackedRequest.of(unfinished)
        if tracked is not None:
            self.service.judged_late(tracked, reason)
            port.tell_client(tracked.req, LATE_KEY, reason.value)

    def view(self, running_batch: Any, moment: Moment) -> SchedulerView:
        """What a plan made now would see."""
        return SchedulerView(
            self.scheduler,
            running_batch=running_batch,
            waiting=self.waiting,
            caps=self.caps,
            moment=moment,
            predictor=self.predictor,
            decodes_due=self.decodes_due,
            why_barred=self._why_barred,
            lengths=self.lengths,
            table=self._table,
            recompute_debt_s=self._recompute.debt_s(moment.now_s),
            kv=self.kv if self.kv is not None and not self.kv.core.is_off else None,
            prefixes=self._prefixes,
            room=None if self.alone is None else self.alone.room,
        )

    @contextlib.contextmanager
    def _logging(self) -> Iterator[DecisionLog | None]:
        """The decision log, if there is one. It ends where it fails: lines must not be missing."""
        try:
            yield self.decisions
        except Exception as error:
            if self.guard.is_strict:
                raise
            self.log_decisions(None)
            self.guard.note("decision_log", error)

    def log_decisions(self, log: DecisionLog | None) -> None:
        """Write every plan to this log from now on."""
        self.decisions = self.waiting.decisions = log

    def on_launch(self, batch: Any | None) -> None:
        """An iteration's batch is ready to run; None: there is nothing to run."""
        iteration, self.iteration = self.iteration, None
        self.observer.planned = None if batch is None else iteration
        if self.last_moment is not None and batch is not None:
            with self.guard.watching("timing"):
                came_late = self.last_moment.launching()
                if iteration is not None:
                    iteration.came_late = came_late
        if iteration is not None:
            with self._logging() as log:
                if log is not None:
                    log.launched(iteration, batch)

    def on_result(self, iteration: Iteration | None, batch: Any) -> None:
        """The tokens of an iteration have come out; None: its launch was not seen."""
        if iteration is not None:
            with self._logging() as log:
                if log is not None:
                    log.finished(iteration, batch)
        self._table.came(batch)
        requests = [t for req in batch.reqs if (t := TrackedRequest.of(req)) is not None]
        if self.timekeeper is not None:
            with self.guard.watching("timekeeper"):
                self.timekeeper.on_result(iteration, requests)
        with self.guard.watching("metrics"):
            self.service.on_result(requests, self.clock.now_s())

    def bar(self, tracked: TrackedRequest) -> None:
        """The engine did not admit a request that the plan admits: it stands back for a while, for
        twice as many plans each time."""
        self.counters.num_engine_refusals += 1
        tracked.num_refusals += 1
        plans = min(2**tracked.num_refusals, MOST_BARRED_PLANS)
        tracked.barred_until = self.counters.num_plans + plans

    def _why_barred(self, request: Request) -> SkipReason | None:
        assert isinstance(request, TrackedRequest), f"{type(request)=}"
        if self.kv is not None and self.kv.is_restoring(request):
            return SkipReason.RESTORING
        if request.barred_until > self.counters.num_plans:
            return SkipReason.ENGINE_REFUSED
        return None

    def export_to(self, exporter: MetricsExporter) -> None:
        """Report to Prometheus from now on."""
        self.exporter = exporter
        self.observer.add_listener(exporter.measured)

    def stopped(self, req: Any) -> None:
        """A plan stops a request, whose memory is about to be given back."""
        self.counters.num_preemptions += 1
        tracked = TrackedRequest.of(req)
        if tracked is not None:
            tracked.num_stopped_at = tracked.num_computed_tokens
            self._table.forget(tracked)

    def abandon(self, requests: Sequence[TrackedRequest]) -> None:
        """The iteration was taken back: these requests have released their memory and wait."""
        self.iteration = self.split = None
        self.decodes_due = False
        self.taken = {}
        for tracked in requests:
            self._table.forget(tracked)
        with self._logging() as log:
            if log is not None:
                log.abandoned()

    def admitted(self, tracked: TrackedRequest) -> None:
        """A waiting request is in the batch that is being built."""
        tracked.num_refusals = 0
        self._table.forget(tracked)
        num_cached = tracked.num_prefix_tokens
        num_lost = tracked.num_stopped_at - num_cached
        tracked.num_stopped_at = 0
        if num_lost > 0:
            self.counters.recomputed_tokens += num_lost
            totals = BatchTotals()
            totals.add_prefill(num_lost, num_cached)
            if self._is_timed:
                self._recompute.pay(self.predictor.predict_s(totals), self.clock.now_s())

    def count_prefill(self, req: Any, num_tokens: int) -> None:
        """Count prompt tokens that the engine admitted."""
        tracked = TrackedRequest.of(req)
        if tracked is not None and tracked.request_class is RequestClass.OFFLINE:
            self.counters.offline_prefill_tokens += num_tokens
        else:
            self.counters.online_prefill_tokens += num_tokens

    def _count_work(self, tracked: TrackedRequest) -> None:
        """Count what an offline request that has ended costs in the best batch alone: its prompt
        without what was cached, and its share of decodes in a batch as large as memory allows."""
        num_output = tracked.num_output_tokens
        if tracked.request_class is not RequestClass.OFFLINE or not num_output:
            return

        def iteration_s(shape: BatchShape) -> float:
            return self.predictor.estimate_s(BatchTotals.of(shape))

        num_cached = min(port.num_cached_at_first(tracked.req), tracked.num_prompt_tokens)
        work_s = prompt_cost_s(iteration_s, num_cached, tracked.num_prompt_tokens - num_cached)
        context = tracked.num_prompt_tokens + num_output // 2
        num_held = port.kv_total(self.scheduler) // max(context, 1)
        num_decodes = max(1, min(self.caps.max_running_requests, num_held))
        work_s += (num_output - 1) * token_cost_s(iteration_s, context, num_decodes=num_decodes)
        self.counters.offline_work_s += work_s

    def state(self) -> ReplicaState:
        """What ``/get_server_info`` shows."""
        running = self._running()
        num_offline = sum(1 for r in running if r.request_class is RequestClass.OFFLINE)
        counters = self.counters
        planning_s = sorted(self._planning_s) or [0.0]
        pool = self.waiting.offline
        output_tokens = self.service.output_tokens
        aborted = self.service.aborted + self.waiting.aborted
        cancelled = self.service.cancelled + self.waiting.cancelled
        return ReplicaState(
            policy=self.config.policy,
            num_waiting_online=len(self.waiting.online),
            num_waiting_offline=len(pool),
            num_waiting_tokens=self.waiting.num_tokens,
            num_running_online=len(running) - num_offline,
            num_running_offline=num_offline,
            num_preemptions=counters.num_preemptions,
            num_engine_refusals=counters.num_engine_refusals,
            num_turned_away=self.scheduler.cosched_offline.num_turned_away,
            num_iterations=self.observer.num_iterations,
            busy_s=round(self.observer.busy_s, 6),
            budget_s=round(self.observer.budget_s, 6),
            budget_used_s=round(self.observer.budget_used_s, 6),
            num_aborted_online=aborted[RequestClass.ONLINE],
            num_aborted_offline=aborted[RequestClass.OFFLINE],
            num_cancelled_online=cancelled[RequestClass.ONLINE],
            num_cancelled_offline=cancelled[RequestClass.OFFLINE],
            num_waits=0 if self.last_moment is None else self.last_moment.num_waits,
            num_dry=0 if self.last_moment is None else self.last_moment.num_dry,
            lead_s=0.0 if self.last_moment is None else round(self.last_moment.lead_s, 6),
            num_plans=counters.num_plans,
            num_replans=counters.num_replans,
            num_safe_plans=counters.num_safe_plans,
            policy_given_up=self.guard.has_given_up,
            failures=dict(self.guard.failures),
            planning_us=PlanningTimes(
                mean=_us(counters.planning_s / max(counters.num_plans, 1)),
                p50=_us(planning_s[len(planning_s) // 2]),
                p99=_us(planning_s[len(planning_s) * 99 // 100]),
            ),
            online_prefill_tokens=counters.online_prefill_tokens,
            offline_prefill_tokens=counters.offline_prefill_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            online_output_tokens=output_tokens[RequestClass.ONLINE],
            offline_output_tokens=output_tokens[RequestClass.OFFLINE],
            offline_work_s=round(counters.offline_work_s, 6),
            attainment={
                target: (met, missed)
                for (_, target), (met, missed) in self.service.attainment.items()
            },
            late={
                reason.value: (num_judged, num_met)
                for reason, (num_judged, num_met) in self.service.late.items()
            },
            times_s={
                f"{request_class.value}_{name}": (round(total_s, 6), num)
                for (request_class, name), (total_s, num) in self.service.times_s.items()
            },
            skipped=dict(Counter(reason.value for reason in self._skipped.values()))
            if len(self.waiting.online) + len(pool)
            else {},
            offline_limits=self.waiting.offline_limits,
            pool=pool.stats() if isinstance(pool, PrefixPool) else None,
            kv=None if self.kv is None else self.kv.occupancy(),
            alone=None if self.alone is None else self.alone.state(),
            logs_off=tuple(name for name, log in self.logs.items() if log.is_off),
        )

    def offline_progress(self) -> OfflineProgress:
        """O(running and preempted requests)."""
        running = self._running()
        begun = [*running, *self.waiting.preempted]
        offline = [one for one in begun if one.request_class is RequestClass.OFFLINE]
        progress = OfflineProgress(
            begun=tuple(
                (one.num_prompt_tokens, one.num_output_tokens, one.max_new_tokens)
                for one in offline
            )
        )
        if not self._is_timed or not offline:
            return progress
        online = [one for one in running if one.request_class is RequestClass.ONLINE]
        contexts = [
            one.num_prompt_tokens + one.num_output_tokens
            for one in [*online, *offline[::_OFFLINE_IN_TAIL]]
        ]
        decodes = BatchTotals.of(BatchShape(decodes=contexts))
        decode_s = self.predictor.estimate_s(decodes)
        decodes.add_prefill(_CHUNK, 0)
        return msgspec.structs.replace(
            progress,
            tail_decode_s=decode_s,
            prefill_token_s=max(self.predictor.estimate_s(decodes) - decode_s, 0.0) / _CHUNK,
        )

    def _running(self) -> list[TrackedRequest]:
        reqs = port.under_way(self.scheduler)
        return [tracked for req in reqs if (tracked := TrackedRequest.of(req)) is not None]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _known_predictor(scheduler: Any, entry: PolicyEntry, config: Config) -> FittedPredictor | None:
    """What the configuration says of this engine's times, None: nothing. ConfigError when it is of
    another engine."""
    if config.latency_model is None or not entry.timed:
        return None
    expected = identity_of(scheduler.server_args, scheduler.model_config)
    name = config.predictor or entry.predictor
    return Profile.predictor_for(Path(config.latency_model), expected, name=name)
