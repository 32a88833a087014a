"""Prometheus metrics of the scheduler, beside SGLang's own (``--enable-metrics``).

Counted in the scheduler process and written to the files that SGLang's ``/metrics`` reads
(prometheus_client's multiprocess mode). Formulas and units: docs/metrics.md. The number of label
values is bounded: classes, targets, logs, places that may fail, length buckets.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from cosched.batch.prometheus import Kind, Metric
from cosched.core.request import LateReason, RequestClass
from cosched.core.view import View
from cosched.engine import port
from cosched.engine.controller import Controller
from cosched.engine.feature import Feature
from cosched.engine.features.class_counters import TARGETS, ClassCounters
from cosched.engine.iteration import Iteration
from cosched.engine.read_state import state_of
from cosched.engine.state import ReplicaState
from cosched.predict.account import key_of

REFRESH_S = 1.0
"""Host time between two refreshes from the state [s]."""

LOGS = ("decision",)

_PLANNING_S = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 0.1)
_ERROR = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 600, 3600)
_TPOT_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 10)
_E2E_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)

_CLASS, _TARGET = ("request_class",), ("request_class", "target")
_TIER = ("tier", "target")
_CLASSES = tuple(name.value for name in RequestClass)
_LATENCIES = ("ttft", "tpot")
_KV_USES = ("free", "running_online", "running_offline", "returning", "referenced", "dead")
_HOST_USES = ("free", "doubled", "returning", "referenced", "dead")


class _Row(NamedTuple):
    """A metric and the fields of `ReplicaState` that it shows: label values -> dotted path. Without
    paths it is counted as things happen, or by `MetricsExporter._refresh`."""

    metric: Metric
    paths: Mapping[Any, str] = {}


def _row(kind: Kind, name: str, text: str, path: str = "") -> _Row:
    """One value, without labels."""
    return _Row(Metric(name, kind, text), {(): path} if path else {})


def _rows(kind: Kind, name: str, text: str, label: str, path: str, values: Any) -> _Row:
    """One value for each label value, which stands for ``{}`` in the path."""
    paths = {(value,): path.format(value) for value in values}
    return _Row(Metric(name, kind, text, (label,)), paths)


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

_TABLE = (
    # Requests, as things happen.
    _Row(Metric("ttft_seconds", _H, "Time from arrival to first token.", _CLASS, _TTFT_S)),
    _Row(Metric("tpot_seconds", _H, "Time per output token after the first.", _CLASS, _TPOT_S)),
    _Row(Metric("e2e_seconds", _H, "Time from arrival to last token.", _CLASS, _E2E_S)),
    _Row(Metric("slo_met", _C, "Requests that met a target.", _TARGET)),
    _Row(Metric("slo_missed", _C, "Requests that missed a target.", _TARGET)),
    # Requests, from the state.
    _rows(_C, "aborted", "Requests that ended without their whole reply.",
          "request_class", "num_aborted_{}", _CLASSES),
    _rows(_C, "cancelled", "Aborted requests that their client cancelled.",
          "request_class", "num_cancelled_{}", _CLASSES),
    _Row(Metric("late", _C, "Online requests judged unable to meet their TTFT target.",
                ("reason",))),
    _Row(Metric("late_met", _C,
                "Online requests judged unable to meet their TTFT target that met it.",
                ("reason",))),
    _rows(_C, "prefill_tokens", "Prompt tokens computed.",
          "request_class", "{}_prefill_tokens", _CLASSES),
    _rows(_C, "output_tokens", "Output tokens generated.",
          "request_class", "{}_output_tokens", _CLASSES),
    _Row(Metric("device_seconds", _C,
                "Shares of requests in the time that the device was busy.",
                ("key", "request_class"))),
    _row(_C, "offline_work_seconds",
         "Predicted device time of finished offline requests in the best batch alone.",
         "offline_work_s"),
    _rows(_G, "waiting_requests", "Requests waiting at the scheduler.",
          "request_class", "num_waiting_{}", _CLASSES),
    _rows(_G, "running_requests", "Requests running.",
          "request_class", "num_running_{}", _CLASSES),
    _row(_G, "saturation",
         "Device time that online requests need at their TPOT target, per second; 1 is all.",
         "chat.saturation"),
    # Tiers of online requests.
    _Row(Metric("tier_slo_met", _C, "Online requests of a tier that met a target.", _TIER)),
    _Row(Metric("tier_slo_missed", _C, "Online requests of a tier that missed a target.", _TIER)),
    _Row(Metric("tier_requests", _G, "Online requests of a tier that wait or run.",
                ("tier", "state"))),
    # Online requests beside offline work and without it.
    _rows(_C, "beside_seconds", "Sum of the TTFT or TPOT of online requests beside offline work.",
          "latency", "alone.{}.total_s", _LATENCIES),
    _rows(_C, "alone_seconds",
          "Sum of the estimated TTFT or TPOT of online requests without offline work.",
          "latency", "alone.{}.total_alone_s", _LATENCIES),
    _rows(_C, "beside_requests",
          "Online requests in the sums of TTFT or TPOT with and without offline work.",
          "latency", "alone.{}.num", _LATENCIES),
    _rows(_G, "beside_p99_seconds",
          "p99 of the TTFT or TPOT of recent online requests beside offline work.",
          "latency", "alone.{}.p99_s", _LATENCIES),
    _rows(_G, "alone_p99_seconds",
          "p99 of the estimated TTFT or TPOT of recent online requests without offline work.",
          "latency", "alone.{}.p99_alone_s", _LATENCIES),
    _Row(Metric("tolerance_room_ratio", _G,
                "Share of TTFT or TPOT that offline work may still add.", ("latency",))),
    # Plans.
    _row(_C, "preemptions", "Running requests preempted by a plan.", "num_preemptions"),
    _row(_C, "recomputed_tokens", "Tokens computed again because a preemption lost their KV.",
         "recomputed_tokens"),
    _row(_C, "engine_refusals", "Admissions of a plan that the engine refused.",
         "num_engine_refusals"),
    _row(_C, "last_moments", "Iterations planned just before the device needed them.",
         "num_waits"),
    _row(_C, "dry_launches", "GPU idle gaps: the next iteration was launched late.", "num_dry"),
    _row(_G, "planning_lead_seconds",
         "Time before the expected end of an iteration at which the next is planned.", "lead_s"),
    _row(_G, "tokens_per_decode",
         "Tokens of an online request in an iteration without prefills, moving average.",
         "tokens_per_decode"),
    _row(_C, "safe_plans", "Fallback plans, made because the policy failed.", "num_safe_plans"),
    _row(_G, "policy_given_up", "1 while fallback plans replace the policy until a restart.",
         "policy_given_up"),
    _Row(Metric("failures", _C, "Failures inside cosched that were caught, by place.",
                ("place",))),
    _Row(Metric("log_switched_off", _G,
                "1 after a log was switched off because a line could not be written.", ("log",))),
    _row(_C, "offline_turned_away",
         "Offline requests answered with 429 because the pool was full.", "num_turned_away"),
    _row(_G, "offline_paused", "1 while the operator pauses offline work.",
         "offline_limits.paused"),
    _row(_G, "offline_max_running",
         "Operator's limit of running offline requests; +Inf without one."),
    # Iterations.
    _Row(Metric("planning_seconds", _H,
                "Host time of planning an iteration: view, plan and check.",
                buckets=_PLANNING_S)),
    _row(_C, "iteration_predicted_seconds",
         "Predicted time of iterations that were predicted and measured."),
    _row(_C, "iteration_measured_seconds",
         "Measured time of iterations that were predicted and measured."),
    _row(_C, "iteration_budget_seconds", "Time budget of iterations with a budget.", "budget_s"),
    _row(_C, "iteration_budget_used_seconds", "Measured time of iterations with a budget.",
         "budget_used_s"),
    _Row(Metric("prediction_error_ratio", _H,
                "Relative error of the predicted time of an iteration.", buckets=_ERROR)),
    # The pool.
    _Row(Metric("pool_requests", _G,
                "Waiting offline requests by shortest prompt length of their bucket.",
                ("min_prompt_tokens",))),
    _Row(Metric("pool_tokens", _G,
                "Prompt and output tokens of waiting offline requests, by bucket [tokens].",
                ("min_prompt_tokens",))),
    _row(_G, "pool_oldest_age_seconds", "Age of the oldest waiting offline request.",
         "pool.oldest_age_s"),
    _row(_G, "pool_sharing_ratio",
         "Share of the tokens of waiting offline requests that another one computes.",
         "pool.sharing_ratio"),
    _row(_G, "pool_expected_hit_ratio",
         "Expected hit rate of serving waiting offline requests in the pool's order.",
         "pool.expected_hit_ratio"),
    # KV memory.
    _rows(_G, "kv_tokens", "KV memory by use [tokens].", "use", "kv.{}", _KV_USES),
    _row(_G, "kv_kept_tokens", "KV memory reserved for online requests [tokens].", "kv.kept"),
    _rows(_C, "kv_evicted_tokens", "Evicted KV tokens, by the class that had used them.",
          "request_class", "kv.evicted_{}", _CLASSES),
    _rows(_C, "kv_missed_tokens", "Evicted tokens likely to be reused, by use.",
          "use", "kv.evicted_{}", ("referenced", "returning")),
    _rows(_G, "kv_host_tokens", "Host memory for KV by use [tokens].",
          "use", "kv.host.{}", _HOST_USES),
    _row(_C, "kv_demoted_tokens",
         "KV tokens evicted from the device with a copy left in host memory.", "kv.host.demoted"),
    _rows(_C, "kv_transferred_tokens", "KV tokens copied to host memory or back.",
          "direction", "kv.host.{}", ("to_host", "to_device")),
    _row(_C, "kv_waited_tokens", "KV tokens copied to host memory while an eviction waited.",
         "kv.host.waited"),
)  # fmt: skip

METRICS = tuple(row.metric for row in _TABLE)


class MetricsExporter(Feature):
    """Counts as things happen, and shows the state once in `REFRESH_S` and when the scheduler
    becomes idle. Implements `cosched.engine.features.class_counters.ServiceListener`."""

    place = "metrics"

    @classmethod
    def of(cls, controller: Controller) -> MetricsExporter | None:
        labels = port.metric_labels(controller.scheduler)
        if labels is None or port.parallel().stage != 0:
            return None
        exporter = cls(partial(state_of, controller), labels)
        controller.features[ClassCounters].listener = exporter
        return exporter

    def __init__(
        self,
        state: Callable[[], ReplicaState],
        labels: Mapping[str, Any],
        *,
        registry: Any = None,
    ) -> None:
        """state: of the replica now; labels: those of SGLang's own metrics of this scheduler;
        registry: prometheus_client's, None: its default."""
        self._state = state
        self._labels = dict(labels)
        self._refresh_at_s = 0.0
        self._is_idle = False
        self._counted: dict[Any, float] = {}
        """Counter and labels -> what it has been increased by."""
        self._metrics = {
            metric.name: _declare(metric, tuple(self._labels), registry) for metric in METRICS
        }
        self._of = cache(self._find)
        # A counter that has not counted yet is 0, not absent.
        for request_class, targets in TARGETS.items():
            for target in targets:
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

    def _find(self, name: str, **more: Any) -> Any:
        labels = {**self._labels, **more}
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric

    def on_plan(self, iteration: Iteration, view: View) -> None:
        self._of("planning_seconds").observe(iteration.planning_s or 0.0)

    def on_report(self, *, is_idle: bool) -> None:
        if (is_idle and not self._is_idle) or time.monotonic() >= self._refresh_at_s:
            self._refresh()
        self._is_idle = is_idle

    def on_result(self, iteration: Iteration, batch: Any) -> None:
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
        state = self._state()
        for metric, paths in _TABLE:
            for values, path in paths.items():
                value = _value(state, path)
                if value is not None:
                    labels = dict(zip(metric.labels, values, strict=True))
                    self._show(metric.kind, metric.name, value, **labels)
        for place, count in state.failures.items():
            self._show(_C, "failures", count, place=place)
        costs: defaultdict[tuple[str, str], float] = defaultdict(float)
        for request_class, by_tenant in state.device_s.items():
            for tenant, seconds in by_tenant.items():
                costs[key_of(tenant), request_class] += seconds  # clients name tenants
        for (key, request_class), seconds in costs.items():
            self._show(_C, "device_seconds", seconds, key=key, request_class=request_class)
        for reason, (num_judged, num_met) in state.late.items():
            self._show(_C, "late", num_judged, reason=reason)
            self._show(_C, "late_met", num_met, reason=reason)
        for name, tier in state.tiers.items():
            for target, (num_met, num_missed) in tier.attainment.items():
                self._show(_C, "tier_slo_met", num_met, tier=name, target=target)
                self._show(_C, "tier_slo_missed", num_missed, tier=name, target=target)
            self._show(_G, "tier_requests", tier.num_waiting, tier=name, state="waiting")
            self._show(_G, "tier_requests", tier.num_running, tier=name, state="running")
        for latency in _LATENCIES if state.alone is not None else ():
            room = getattr(state.alone, latency).room
            if room is not None:
                self._show(_G, "tolerance_room_ratio", room, latency=latency)
        most = state.offline_limits.max_running
        self._of("offline_max_running").set(math.inf if most is None else most)
        for log in state.logs_off:
            self._of("log_switched_off", log=log).set(1)
        for bucket in () if state.pool is None else state.pool.buckets:
            length = bucket.min_prompt_tokens
            self._of("pool_requests", min_prompt_tokens=length).set(bucket.num_requests)
            self._of("pool_tokens", min_prompt_tokens=length).set(bucket.num_tokens)

    def _show(self, kind: Kind, name: str, value: float, **labels: Any) -> None:
        sample = self._of(name, **labels)
        if kind is _G:
            sample.set(value)
            return
        sample.inc(value - self._counted.get(sample, 0))
        self._counted[sample] = value


def _value(state: ReplicaState, path: str) -> float | None:
    """The field at a dotted path; 0 if it is None, None if a part on the way is."""
    *parts, name = path.split(".")
    part: Any = state
    for each in parts:
        part = getattr(part, each)
        if part is None:
            return None
    value: float | None = getattr(part, name)
    return 0 if value is None else value


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
