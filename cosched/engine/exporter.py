"""What cosched does, as Prometheus metrics beside SGLang's own (``--enable-metrics``).

Counted in the scheduler process and written to the files that SGLang's ``/metrics`` reads
(prometheus_client's multiprocess mode). Formulas and units: docs/metrics.md. Labels take few
values: two classes, a handful of targets, logs, places that may fail and length buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from cosched.batch.prometheus import Kind, Metric
from cosched.core.request import LateReason, RequestClass
from cosched.engine.isolated import IsolatedState, LatencyBeside
from cosched.engine.observe import Iteration
from cosched.engine.service import TARGETS
from cosched.engine.state import ReplicaState
from cosched.memory.occupancy import KvOccupancy

if TYPE_CHECKING:
    from cosched.engine.controller import Controller

REFRESH_S = 1.0
"""Host time between two updates of what is a level and not a count."""

LOGS = ("decision", "iteration")

_PLANNING_S = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 0.1)
_ERROR = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 600, 3600)
_TPOT_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 10)
_E2E_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


_CLASS = ("request_class",)
_TARGET = ("request_class", "target")
_BUCKET = ("min_prompt_tokens",)
_USE = ("use",)
_DIRECTION = ("direction",)
_REASON = ("reason",)
_LATENCY = ("latency",)

METRICS = (
    Metric("ttft_seconds", Kind.HISTOGRAM, "Time from arrival to first token.", _CLASS, _TTFT_S),
    Metric(
        "tpot_seconds", Kind.HISTOGRAM, "Time per output token after the first.", _CLASS, _TPOT_S
    ),
    Metric("e2e_seconds", Kind.HISTOGRAM, "Time from arrival to last token.", _CLASS, _E2E_S),
    Metric("aborted", Kind.COUNTER, "Requests that ended without their whole reply.", _CLASS),
    Metric("cancelled", Kind.COUNTER, "Aborted requests that their client took back.", _CLASS),
    Metric("slo_met", Kind.COUNTER, "Requests that met a target.", _TARGET),
    Metric("slo_missed", Kind.COUNTER, "Requests that missed a target.", _TARGET),
    Metric(
        "late", Kind.COUNTER, "Online requests judged unable to meet their TTFT target.", _REASON
    ),
    Metric(
        "late_met",
        Kind.COUNTER,
        "Online requests judged unable to meet their TTFT target that met it.",
        _REASON,
    ),
    Metric(
        "beside_seconds",
        Kind.COUNTER,
        "Sum of the TTFT or TPOT of online requests beside offline work.",
        _LATENCY,
    ),
    Metric(
        "alone_seconds",
        Kind.COUNTER,
        "Sum of the estimated TTFT or TPOT of online requests without offline work.",
        _LATENCY,
    ),
    Metric(
        "beside_requests",
        Kind.COUNTER,
        "Online requests in the sums of TTFT or TPOT with and without offline work.",
        _LATENCY,
    ),
    Metric(
        "beside_p99_seconds",
        Kind.GAUGE,
        "p99 of the TTFT or TPOT of recent online requests beside offline work.",
        _LATENCY,
    ),
    Metric(
        "alone_p99_seconds",
        Kind.GAUGE,
        "p99 of the estimated TTFT or TPOT of recent online requests without offline work.",
        _LATENCY,
    ),
    Metric(
        "tolerance_room_ratio",
        Kind.GAUGE,
        "Share of TTFT or TPOT that offline work may still add.",
        _LATENCY,
    ),
    Metric("prefill_tokens", Kind.COUNTER, "Prompt tokens computed.", _CLASS),
    Metric("output_tokens", Kind.COUNTER, "Output tokens generated.", _CLASS),
    Metric(
        "offline_work_seconds",
        Kind.COUNTER,
        "Predicted device time of finished offline requests in the best batch alone.",
    ),
    Metric("waiting_requests", Kind.GAUGE, "Requests waiting at the scheduler.", _CLASS),
    Metric("running_requests", Kind.GAUGE, "Requests running.", _CLASS),
    Metric("preemptions", Kind.COUNTER, "Running requests preempted by a plan."),
    Metric(
        "recomputed_tokens",
        Kind.COUNTER,
        "Tokens computed again because a preemption lost their KV.",
    ),
    Metric("engine_refusals", Kind.COUNTER, "Admissions of a plan that the engine refused."),
    Metric("last_moments", Kind.COUNTER, "Iterations planned just before the device needed them."),
    Metric("dry_launches", Kind.COUNTER, "GPU idle gaps: the next iteration was launched late."),
    Metric(
        "planning_lead_seconds",
        Kind.GAUGE,
        "Time before the expected end of an iteration at which the next is planned.",
    ),
    Metric("safe_plans", Kind.COUNTER, "Fallback plans, made because the policy failed."),
    Metric(
        "policy_given_up", Kind.GAUGE, "1 while fallback plans replace the policy until a restart."
    ),
    Metric(
        "failures", Kind.COUNTER, "Failures inside cosched that were caught, by place.", ("place",)
    ),
    Metric(
        "offline_turned_away",
        Kind.COUNTER,
        "Offline requests answered with 429 because the pool was full.",
    ),
    Metric("offline_paused", Kind.GAUGE, "1 while the operator pauses offline work."),
    Metric(
        "offline_max_running",
        Kind.GAUGE,
        "Operator's limit of running offline requests; +Inf without one.",
    ),
    Metric(
        "log_switched_off",
        Kind.GAUGE,
        "1 after a log was switched off because a line could not be written.",
        ("log",),
    ),
    Metric(
        "planning_seconds",
        Kind.HISTOGRAM,
        "Host time of planning an iteration: view, plan and check.",
        buckets=_PLANNING_S,
    ),
    Metric(
        "iteration_predicted_seconds",
        Kind.COUNTER,
        "Predicted time of iterations that were predicted and measured.",
    ),
    Metric(
        "iteration_measured_seconds",
        Kind.COUNTER,
        "Measured time of iterations that were predicted and measured.",
    ),
    Metric("iteration_budget_seconds", Kind.COUNTER, "Time budget of iterations with a budget."),
    Metric(
        "iteration_budget_used_seconds", Kind.COUNTER, "Measured time of iterations with a budget."
    ),
    Metric(
        "prediction_error_ratio",
        Kind.HISTOGRAM,
        "Relative error of the predicted time of an iteration.",
        buckets=_ERROR,
    ),
    Metric(
        "pool_requests",
        Kind.GAUGE,
        "Waiting offline requests by shortest prompt length of their bucket.",
        _BUCKET,
    ),
    Metric(
        "pool_tokens",
        Kind.GAUGE,
        "Prompt and output tokens of waiting offline requests, by bucket [tokens].",
        _BUCKET,
    ),
    Metric("pool_oldest_age_seconds", Kind.GAUGE, "Age of the oldest waiting offline request."),
    Metric(
        "pool_sharing_ratio",
        Kind.GAUGE,
        "Share of the tokens of waiting offline requests that another one computes.",
    ),
    Metric(
        "pool_expected_hit_ratio",
        Kind.GAUGE,
        "Expected hit rate of serving waiting offline requests in the pool's order.",
    ),
    Metric("kv_tokens", Kind.GAUGE, "KV memory by use [tokens].", _USE),
    Metric("kv_kept_tokens", Kind.GAUGE, "KV memory reserved for online requests [tokens]."),
    Metric(
        "kv_evicted_tokens",
        Kind.COUNTER,
        "Evicted KV tokens, by the class that had used them.",
        _CLASS,
    ),
    Metric("kv_missed_tokens", Kind.COUNTER, "Evicted tokens likely to be reused, by use.", _USE),
    Metric("kv_host_tokens", Kind.GAUGE, "Host memory for KV by use [tokens].", _USE),
    Metric(
        "kv_demoted_tokens",
        Kind.COUNTER,
        "KV tokens evicted from the device with a copy left in host memory.",
    ),
    Metric(
        "kv_transferred_tokens",
        Kind.COUNTER,
        "KV tokens copied to host memory or back.",
        _DIRECTION,
    ),
    Metric(
        "kv_waited_tokens",
        Kind.COUNTER,
        "KV tokens copied to host memory while an eviction waited.",
    ),
)


class MetricsExporter:
    """Counts as things happen; levels once in `REFRESH_S`, and when the scheduler becomes idle.

    Implements `cosched.engine.service.ServiceListener`.
    """

    def __init__(
        self, controller: Controller, labels: Mapping[str, Any], *, registry: Any = None
    ) -> None:
        """labels: those of SGLang's own metrics of this scheduler; registry: prometheus_client's,
        None: its default."""
        self._controller = controller
        self._labels = dict(labels)
        self._refresh_at_s = 0.0
        self._is_idle = False
        self._last: ReplicaState | None = None
        self._metrics = {
            metric.name: _declare(metric, tuple(self._labels), registry) for metric in METRICS
        }
        # Every request needs these: found once.
        self._of = cache(self._find)
        for request_class, targets in TARGETS.items():
            for target in targets:  # a counter that has never counted is 0, not absent
                for name in ("slo_met", "slo_missed"):
                    self._of(name, request_class=request_class.value, target=target)
            for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds", "output_tokens"):
                self._of(name, request_class=request_class.value)
        for reason in LateReason:
            for name in ("late", "late_met"):
                self._of(name, reason=reason.value)
        for log in LOGS:
            self._of("log_switched_off", log=log).set(0)
        self._of("failures", place="plan")
        controller.service.listener = self

    def _find(self, name: str, **more: Any) -> Any:
        labels = {**self._labels, **more}
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric

    def planned(self, planning_s: float) -> None:
        """A plan was made."""
        self._of("planning_seconds").observe(planning_s)
        self._is_idle = False
        if time.monotonic() >= self._refresh_at_s:
            self._refresh()

    def idle(self) -> None:
        """There is nothing to plan; called again and again for as long as that is so."""
        if not self._is_idle or time.monotonic() >= self._refresh_at_s:
            self._is_idle = True
            self._refresh()

    def measured(self, iteration: Iteration) -> None:
        """An iteration is done."""
        predicted_s, seconds = iteration.predicted_s, iteration.seconds
        if predicted_s is None or seconds <= 0:
            return
        self._of("iteration_predicted_seconds").inc(predicted_s)
        self._of("iteration_measured_seconds").inc(seconds)
        self._of("prediction_error_ratio").observe(abs(predicted_s / seconds - 1))

    def first_token(self, request_class: RequestClass, ttft_s: float) -> None:
        self._of("ttft_seconds", request_class=request_class.value).observe(ttft_s)

    def finished(self, request_class: RequestClass, e2e_s: float, tpot_s: float | None) -> None:
        self._of("e2e_seconds", request_class=request_class.value).observe(e2e_s)
        if tpot_s is not None:
            self._of("tpot_seconds", request_class=request_class.value).observe(tpot_s)

    def judged(self, request_class: RequestClass, target: str, is_met: bool) -> None:
        name = "slo_met" if is_met else "slo_missed"
        self._of(name, request_class=request_class.value, target=target).inc()

    def _refresh(self) -> None:
        self._refresh_at_s = time.monotonic() + REFRESH_S
        state = self._controller.state()
        before, self._last = self._last, state
        for name, field, more in _COUNTED:
            count = getattr(state, field) - (0 if before is None else getattr(before, field))
            self._of(name, **more).inc(count)
        for name, field, more in _LEVELS:
            self._of(name, **more).set(getattr(state, field))
        for place, count in state.failures.items():
            count -= 0 if before is None else before.failures.get(place, 0)
            self._of("failures", place=place).inc(count)
        for reason, counts in state.late.items():
            so_far = (0, 0) if before is None else before.late[reason]
            for name, num, num_before in zip(("late", "late_met"), counts, so_far, strict=True):
                self._of(name, reason=reason).inc(num - num_before)
        limits = state.offline_limits
        self._of("offline_paused").set(limits.paused)
        most = limits.max_running
        self._of("offline_max_running").set(math.inf if most is None else most)
        for log in state.logs_off:
            self._of("log_switched_off", log=log).set(1)
        if state.alone is not None:
            self._refresh_alone(state.alone, None if before is None else before.alone)
        if state.kv is not None:
            self._refresh_kv(state.kv, None if before is None else before.kv)
        pool = state.pool
        if pool is None:
            return
        for bucket in pool.buckets:
            length = bucket.min_prompt_tokens
            self._of("pool_requests", min_prompt_tokens=length).set(bucket.num_requests)
            self._of("pool_tokens", min_prompt_tokens=length).set(bucket.num_tokens)
        self._of("pool_oldest_age_seconds").set(pool.oldest_age_s or 0.0)
        self._of("pool_sharing_ratio").set(pool.sharing_ratio)
        self._of("pool_expected_hit_ratio").set(pool.expected_hit_ratio)

    def _refresh_alone(self, alone: IsolatedState, before: IsolatedState | None) -> None:
        for latency in ("ttft", "tpot"):
            here: LatencyBeside | None = getattr(alone, latency)
            if here is None:
                continue
            so_far = None if before is None else getattr(before, latency)
            for name, field in _ALONE_COUNTED:
                count = getattr(here, field) - (0 if so_far is None else getattr(so_far, field))
                self._of(name, latency=latency).inc(count)
            self._of("beside_p99_seconds", latency=latency).set(here.p99_s or 0.0)
            self._of("alone_p99_seconds", latency=latency).set(here.p99_alone_s or 0.0)
            self._of("tolerance_room_ratio", latency=latency).set(here.room)

    def _refresh_kv(self, kv: KvOccupancy, before: KvOccupancy | None) -> None:
        for use in KV_USES:
            self._of("kv_tokens", use=use).set(getattr(kv, use))
        self._of("kv_kept_tokens").set(kv.kept)
        for name, field, more in _KV_COUNTED:
            count = getattr(kv, field) - (0 if before is None else getattr(before, field))
            self._of(name, **more).inc(count)
        host = kv.host
        if host is None:
            return
        for use in HOST_USES:
            self._of("kv_host_tokens", use=use).set(getattr(host, use))
        host_before = None if before is None else before.host
        for name, field, more in _HOST_COUNTED:
            so_far = 0 if host_before is None else getattr(host_before, field)
            self._of(name, **more).inc(getattr(host, field) - so_far)


KV_USES = ("free", "running_online", "running_offline", "returning", "referenced", "dead")
"""The fields of `KvOccupancy` that add up to the capacity."""

HOST_USES = ("free", "doubled", "returning", "referenced", "dead")
"""The fields of `HostOccupancy` that add up to its capacity."""

_ONLINE, _OFFLINE = ({"request_class": name.value} for name in RequestClass)
_COUNTED: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("preemptions", "num_preemptions", {}),
    ("recomputed_tokens", "recomputed_tokens", {}),
    ("engine_refusals", "num_engine_refusals", {}),
    ("last_moments", "num_waits", {}),
    ("dry_launches", "num_dry", {}),
    ("safe_plans", "num_safe_plans", {}),
    ("offline_turned_away", "num_turned_away", {}),
    ("aborted", "num_aborted_online", _ONLINE),
    ("aborted", "num_aborted_offline", _OFFLINE),
    ("cancelled", "num_cancelled_online", _ONLINE),
    ("cancelled", "num_cancelled_offline", _OFFLINE),
    ("iteration_budget_seconds", "budget_s", {}),
    ("iteration_budget_used_seconds", "budget_used_s", {}),
    ("prefill_tokens", "online_prefill_tokens", _ONLINE),
    ("prefill_tokens", "offline_prefill_tokens", _OFFLINE),
    ("output_tokens", "online_output_tokens", _ONLINE),
    ("output_tokens", "offline_output_tokens", _OFFLINE),
    ("offline_work_seconds", "offline_work_s", {}),
)
"""Counter, the field of the state that it follows, labels."""

_ALONE_COUNTED = (
    ("beside_seconds", "total_s"),
    ("alone_seconds", "total_alone_s"),
    ("beside_requests", "num"),
)
"""Counter, the field of `LatencyBeside` that it follows."""

_KV_COUNTED: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("kv_evicted_tokens", "evicted_online", _ONLINE),
    ("kv_evicted_tokens", "evicted_offline", _OFFLINE),
    ("kv_missed_tokens", "evicted_referenced", {"use": "referenced"}),
    ("kv_missed_tokens", "evicted_returning", {"use": "returning"}),
)
"""The same of `KvOccupancy`."""

_HOST_COUNTED: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("kv_demoted_tokens", "demoted", {}),
    ("kv_transferred_tokens", "to_host", {"direction": "to_host"}),
    ("kv_transferred_tokens", "to_device", {"direction": "to_device"}),
    ("kv_waited_tokens", "waited", {}),
)
"""The same of `HostOccupancy`."""

_LEVELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("planning_lead_seconds", "lead_s", {}),
    ("policy_given_up", "policy_given_up", {}),
    ("waiting_requests", "num_waiting_online", _ONLINE),
    ("waiting_requests", "num_waiting_offline", _OFFLINE),
    ("running_requests", "num_running_online", _ONLINE),
    ("running_requests", "num_running_offline", _OFFLINE),
)


def _declare(metric: Metric, labels: tuple[str, ...], registry: Any) -> Any:
    # SGLang says where the files are before anything may import prometheus_client.
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    options: dict[str, Any] = {
        "name": f"cosched:{metric.name}",
        "documentation": metric.text,
        "labelnames": (*labels, *metric.labels),
        "registry": REGISTRY if registry is None else registry,
    }
    if metric.kind is Kind.COUNTER:
        return Counter(**options)
    if metric.kind is Kind.GAUGE:
        return Gauge(**options, multiprocess_mode="mostrecent")
    return Histogram(**options, buckets=metric.buckets)
