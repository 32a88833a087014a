"""Reads the state of a replica from its controller (`cosched.engine.state`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.chat_load import ChatState
from cosched.engine.controller import Controller
from cosched.engine.features.class_counters import ClassCounters
from cosched.engine.features.device_cost import DeviceCost
from cosched.engine.features.isolated_watch import IsolatedWatch
from cosched.engine.features.log_decisions import LogDecisions
from cosched.engine.features.offline_work import OfflineWork
from cosched.engine.features.plan_timing import PlanTiming
from cosched.engine.features.shared_reads import SharedReads
from cosched.engine.state import (
    OfflineProgress,
    PlanningTimes,
    ReplicaState,
    TierState,
    in_json,
)
from cosched.engine.tracked import TrackedRequest
from cosched.pool.tenants import TenantPool
from cosched.predict.saturation import saturation

_OFFLINE_IN_TAIL = 4
"""One of this many running offline requests still runs, in the mean, when no more begin."""
_CHUNK = 1024
"""Prompt tokens by which the time of one is estimated."""


def shown_state(controller: Controller) -> dict[str, Any]:
    """What ``/get_server_info`` shows: the state and the progress of offline requests. A figure
    that is not finite is None and counts as a failure."""
    progress = msgspec.to_builtins(offline_progress(controller))
    lost: list[str] = []
    shown: dict[str, Any] = in_json(
        state_of(controller).to_dict() | {"offline_progress": progress}, lost
    )
    if lost:
        controller.guard.note("state", ValueError(f"not finite: {', '.join(lost)}"))
    return shown


def state_of(controller: Controller) -> ReplicaState:
    """The state of its replica."""
    running = _running(controller)
    num_offline = sum(1 for r in running if r.request_class is RequestClass.OFFLINE)
    counters = controller.counters
    planning_s = sorted(counters.planning_times_s) or [0.0]
    pool = controller.waiting.offline
    features = controller.features
    served = features[ClassCounters]
    output_tokens = served.output_tokens
    aborted = served.aborted + controller.waiting.aborted
    cancelled = served.cancelled + controller.waiting.cancelled
    timing, alone = features.get(PlanTiming), features.get(IsolatedWatch)
    shared = features.get(SharedReads)
    work, decisions = features.get(OfflineWork), features.get(LogDecisions)
    online, offline = (
        served.by_class[kind].to_dict(f"{kind.value}_")
        for kind in (RequestClass.ONLINE, RequestClass.OFFLINE)
    )
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
        device_s=features[DeviceCost].account.by_class(),
        budget_s=round(counters.budget_s, 6),
        budget_used_s=round(counters.budget_used_s, 6),
        num_aborted_online=aborted[RequestClass.ONLINE],
        num_aborted_offline=aborted[RequestClass.OFFLINE],
        num_cancelled_online=cancelled[RequestClass.ONLINE],
        num_cancelled_offline=cancelled[RequestClass.OFFLINE],
        num_waits=0 if timing is None else timing.num_waits,
        num_dry=0 if timing is None else timing.num_dry,
        lead_s=0.0 if timing is None else round(timing.lead_s, 6),
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
        encoded_tokens=counters.encoded_tokens,
        online_output_tokens=output_tokens[RequestClass.ONLINE],
        offline_output_tokens=output_tokens[RequestClass.OFFLINE],
        offline_work_s=0.0 if work is None else round(work.work_s, 6),
        late={
            reason.value: (num_judged, num_met)
            for reason, (num_judged, num_met) in served.late.items()
        },
        attainment=online["attainment"] | offline["attainment"],
        times_s=online["times_s"] | offline["times_s"],
        histograms=online["histograms"],
        skipped=dict(Counter(reason.value for reason in counters.latest_plan.skipped.values()))
        if len(controller.waiting.online) + len(pool)
        else {},
        offline_limits=controller.waiting.offline_limits,
        pool=pool.stats() if isinstance(pool, TenantPool) else None,
        kv=None if controller.kv is None else controller.kv.occupancy(),
        shared_prefix=None if shared is None else shared.state(),
        alone=None if alone is None else alone.state(),
        chat=chat_state(controller),
        tiers=_tiers(controller, running),
        logs_off=("decision",) if decisions is not None and decisions.is_off else (),
    )


def chat_state(controller: Controller) -> ChatState | None:
    """O(online requests of the last minute)."""
    if not (controller.is_timed and controller.predictor.knows_prefills):
        return None
    unfinished = TrackedRequest.of(controller.scheduler.chunked_req)
    is_chat = unfinished is not None and unfinished.request_class is RequestClass.ONLINE
    rates = controller.features[ClassCounters].chat_load.rates(
        controller.clock.now_s(),
        [*controller.waiting.online, *([unfinished] if unfinished and is_chat else [])],
        tokens_per_decode=controller.table.tokens_per_decode,
    )
    if rates is None:
        return None
    share = saturation(
        rates,
        controller.predictor.extrapolated_s,
        max_running=controller.caps.max_running_requests,
        kv_tokens=port.kv_total(controller.scheduler),
    )
    return ChatState(saturation=round(share, 4), requests_per_s=round(rates.requests_per_s, 4))


def _tiers(controller: Controller, running: list[TrackedRequest]) -> dict[str, TierState]:
    tiers = controller.features[ClassCounters].tiers
    if not tiers:
        return {}
    waiting = Counter(one.tier for one in controller.waiting.online)
    runs = Counter(one.tier for one in running if one.request_class is RequestClass.ONLINE)
    return {
        name: TierState(num_waiting=waiting[rank], num_running=runs[rank], **served.to_dict())
        for rank, (name, served) in enumerate(tiers.items())
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
