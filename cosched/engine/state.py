"""The state of a replica: ``GET /cosched``, ``/get_server_info`` and Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.request import RequestClass
from cosched.core.view import OfflineLimits
from cosched.engine import port
from cosched.engine.isolated import IsolatedState
from cosched.engine.tracked import TrackedRequest
from cosched.memory.occupancy import KvOccupancy
from cosched.pool.prefix_pool import PoolStats
from cosched.pool.tenants import TenantPool

if TYPE_CHECKING:
    from cosched.engine.controller import Controller

_OFFLINE_IN_TAIL = 4
"""One of this many running offline requests still runs, in the mean, when no more begin."""
_CHUNK = 1024
"""Prompt tokens by which the time of one is estimated."""


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

    def count_prefills(self, batch: Any) -> None:
        """A batch with prompt tokens was built."""
        for req, num_tokens in port.prefills_of(batch):
            tracked = TrackedRequest.of(req)
            if tracked is not None and tracked.request_class is RequestClass.OFFLINE:
                self.offline_prefill_tokens += num_tokens
            else:
                self.online_prefill_tokens += num_tokens


class Log(Protocol):
    """A file that lines are written to."""

    @property
    def is_off(self) -> bool:
        """A line could not be written; nothing is written until the next start."""
        ...


class PlanningTimes(msgspec.Struct, kw_only=True, frozen=True):
    """Host time of views, plans and checks [µs]; the percentiles are of the latest plans."""

    mean: float
    p50: float
    p99: float


class OfflineProgress(msgspec.Struct, kw_only=True, frozen=True):
    """Progress of offline requests, for forecasts of batches.

    begun            of each offline request that has begun: prompt tokens, output tokens so far,
                     most output tokens
    tail_decode_s    predicted time of an iteration of decodes when no more requests begin and the
                     last ones run beside online requests; 0: nothing is predicted [s]
    prefill_token_s  predicted time of one more prompt token in it [s]
    """

    begun: tuple[tuple[int, int, int], ...]
    tail_decode_s: float = 0.0
    prefill_token_s: float = 0.0


class TierState(msgspec.Struct, kw_only=True, frozen=True):
    """Online requests of one tier. attainment, times_s, histograms: as in `ReplicaState`."""

    num_waiting: int
    num_running: int
    attainment: dict[str, tuple[int, int]]
    times_s: dict[str, tuple[float, int]]
    histograms: dict[str, dict[int, int]]


class ReplicaState(msgspec.Struct, kw_only=True, frozen=True):
    """The state of one scheduler. docs/metrics.md describes each field.

    num_safe_plans   plans made by the safe rule, because the policy failed
    policy_given_up  it failed too often in a row: the safe rule plans until a restart
    failures         part that failed and was left out (`cosched.engine.guard`) -> number
    recomputed_tokens  prompt and output tokens computed again after a preemption
    num_aborted_online, num_aborted_offline  requests that ended without their whole reply
    num_cancelled_online, num_cancelled_offline  aborted requests that their client cancelled
    device_s         class -> tenant -> its share of `busy_s` (`cosched.predict.account`) [s]
    budget_s         most time that plans gave their iterations, of those that were limited [s]
    budget_used_s    measured time of the same [s]
    attainment       target -> (requests that met it, requests that missed it)
    late             why online requests were judged late -> (number, of these met their target)
    alone            online requests against their isolated baseline; None: it is not known here
    num_waits        iterations that were planned at the last moment (`cosched.engine.last_moment`)
    num_dry          of these, those for which the device had to wait
    lead_s           time before the predicted end of an iteration at which requests are received;
                     0: when it begins, or has ended [s]
    tokens_per_decode  tokens that an online request gets in an iteration without prefills, a moving
                     average; above 1 with speculative decoding
    times_s          ``online_ttft`` and the like -> (sum [s], number of them) since the start
    histograms       ``ttft`` and ``tpot`` of online requests -> bucket
                     (`cosched.engine.history.bucket_of`) -> number of them
    offline_work_s   predicted device time of finished offline requests in the best batch alone [s]
    skipped          why waiting requests were left out of the latest plan -> number
    pool             None: offline requests wait in the order of arrival
    kv               None: the engine's own order of eviction holds
    tiers            of online requests by name, the highest first; empty without tiers
    logs_off         logs that were switched off because a line could not be written
    """

    policy: str
    num_waiting_online: int
    num_waiting_offline: int
    num_waiting_tokens: int
    num_running_online: int
    num_running_offline: int
    num_preemptions: int
    num_engine_refusals: int
    num_turned_away: int
    num_aborted_online: int
    num_aborted_offline: int
    num_cancelled_online: int
    num_cancelled_offline: int
    num_iterations: int
    busy_s: float
    device_s: dict[str, dict[str, float]]
    budget_s: float
    budget_used_s: float
    num_waits: int
    num_dry: int
    lead_s: float
    tokens_per_decode: float
    num_plans: int
    num_replans: int
    num_safe_plans: int
    policy_given_up: bool
    failures: dict[str, int]
    planning_us: PlanningTimes
    online_prefill_tokens: int
    offline_prefill_tokens: int
    recomputed_tokens: int
    online_output_tokens: int
    offline_output_tokens: int
    offline_work_s: float
    attainment: dict[str, tuple[int, int]]
    late: dict[str, tuple[int, int]]
    times_s: dict[str, tuple[float, int]]
    histograms: dict[str, dict[int, int]]
    skipped: dict[str, int]
    offline_limits: OfflineLimits
    pool: PoolStats | None
    kv: KvOccupancy | None
    logs_off: tuple[str, ...]
    alone: IsolatedState | None = None
    tiers: dict[str, TierState] = {}

    def to_dict(self) -> dict[str, Any]:
        """For JSON and SGLang's messages."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result


def state_of(controller: Controller) -> ReplicaState:
    """What ``/get_server_info`` shows."""
    running = _running(controller)
    num_offline = sum(1 for r in running if r.request_class is RequestClass.OFFLINE)
    counters = controller.counters
    planning_s = sorted(controller.planning_times_s) or [0.0]
    pool = controller.waiting.offline
    output_tokens = controller.service.output_tokens
    aborted = controller.service.aborted + controller.waiting.aborted
    cancelled = controller.service.cancelled + controller.waiting.cancelled
    return ReplicaState(
        policy=controller.config.policy,
        num_waiting_online=len(controller.waiting.online),
        num_waiting_offline=len(pool),
        num_waiting_tokens=controller.waiting.num_tokens,
        num_running_online=len(running) - num_offline,
        num_running_offline=num_offline,
        num_preemptions=counters.num_preemptions,
        num_engine_refusals=counters.num_engine_refusals,
        num_turned_away=controller.scheduler.cosched_offline.num_turned_away,
        num_iterations=controller.observer.num_iterations,
        busy_s=round(controller.observer.busy_s, 6),
        device_s=controller.waiting.account.by_class(),
        budget_s=round(controller.observer.budget_s, 6),
        budget_used_s=round(controller.observer.budget_used_s, 6),
        num_aborted_online=aborted[RequestClass.ONLINE],
        num_aborted_offline=aborted[RequestClass.OFFLINE],
        num_cancelled_online=cancelled[RequestClass.ONLINE],
        num_cancelled_offline=cancelled[RequestClass.OFFLINE],
        num_waits=0 if controller.last_moment is None else controller.last_moment.num_waits,
        num_dry=0 if controller.last_moment is None else controller.last_moment.num_dry,
        lead_s=0.0 if controller.last_moment is None else round(controller.last_moment.lead_s, 6),
        tokens_per_decode=round(controller.table.tokens_per_decode, 3),
        num_plans=counters.num_plans,
        num_replans=counters.num_replans,
        num_safe_plans=counters.num_safe_plans,
        policy_given_up=controller.guard.has_given_up,
        failures=dict(controller.guard.failures),
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
            for (_, target), (met, missed) in controller.service.attainment.items()
        },
        late={
            reason.value: (num_judged, num_met)
            for reason, (num_judged, num_met) in controller.service.late.items()
        },
        times_s={
            f"{request_class.value}_{name}": (round(total_s, 6), num)
            for (request_class, name), (total_s, num) in controller.service.times_s.items()
        },
        histograms={name: {**one} for name, one in controller.service.histograms.items()},
        skipped=dict(Counter(reason.value for reason in controller.latest_plan.skipped.values()))
        if len(controller.waiting.online) + len(pool)
        else {},
        offline_limits=controller.waiting.offline_limits,
        pool=pool.stats() if isinstance(pool, TenantPool) else None,
        kv=None if controller.kv is None else controller.kv.occupancy(),
        alone=None if controller.isolated is None else controller.isolated.state(),
        tiers=_tiers(controller, running),
        logs_off=tuple(name for name, log in controller.logs.items() if log.is_off),
    )


def _tiers(controller: Controller, running: list[TrackedRequest]) -> dict[str, TierState]:
    tiers = controller.service.tiers
    if not tiers:
        return {}
    waiting = Counter(one.tier for one in controller.waiting.online)
    runs = Counter(one.tier for one in running if one.request_class is RequestClass.ONLINE)
    return {
        one.name: TierState(
            num_waiting=waiting[rank],
            num_running=runs[rank],
            attainment={target: (met, missed) for target, (met, missed) in one.attainment.items()},
            times_s={
                name: (round(total_s, 6), num) for name, (total_s, num) in one.times_s.items()
            },
            histograms={name: {**counts} for name, counts in one.histograms.items()},
        )
        for rank, one in enumerate(tiers)
    }


def offline_progress(controller: Controller) -> OfflineProgress:
    """O(running and preempted requests)."""
    running = _running(controller)
    begun = [*running, *controller.waiting.preempted]
    offline = [one for one in begun if one.request_class is RequestClass.OFFLINE]
    progress = OfflineProgress(
        begun=tuple(
            (one.num_prompt_tokens, one.num_output_tokens, one.max_new_tokens) for one in offline
        )
    )
    if not controller.is_timed or not offline:
        return progress
    online = [one for one in running if one.request_class is RequestClass.ONLINE]
    contexts = [
        one.num_prompt_tokens + one.num_output_tokens
        for one in [*online, *offline[::_OFFLINE_IN_TAIL]]
    ]
    decodes = BatchTotals.of(BatchShape(decodes=contexts))
    decode_s = controller.predictor.estimate_s(decodes)
    decodes.add_prefill(_CHUNK, 0)
    return msgspec.structs.replace(
        progress,
        tail_decode_s=decode_s,
        prefill_token_s=max(controller.predictor.estimate_s(decodes) - decode_s, 0.0) / _CHUNK,
    )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _running(controller: Controller) -> list[TrackedRequest]:
    """Running requests and the one whose prefill is unfinished."""
    reqs = port.under_way(controller.scheduler)
    return [tracked for req in reqs if (tracked := TrackedRequest.of(req)) is not None]
