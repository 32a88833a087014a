"""Prometheus metrics of the scheduler, beside SGLang's own (``--enable-metrics``).

They are counted in the scheduler process and written to the files that SGLang's ``/metrics`` reads
(prometheus_client's multiprocess mode): the figures of `cosched.engine.figures`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from cosched.batch.prometheus import Kind, Metric
from cosched.core.request import RequestClass
from cosched.core.view import View
from cosched.engine import port
from cosched.engine.controller import Controller
from cosched.engine.feature import Feature
from cosched.engine.features.class_counters import ClassCounters
from cosched.engine.figures import FIGURES, values_at
from cosched.engine.iteration import Iteration
from cosched.engine.read_state import state_of
from cosched.engine.state import ReplicaState
from cosched.predict.cost_account import key_of

REFRESH_S = 1.0
"""Host time between two refreshes from the state [s]."""

LOGS = ("decision",)

METRICS = tuple(figure.metric for figure in FIGURES)


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
        # What has not happened yet is 0, not absent.
        for request_class in RequestClass:
            for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
                self._of(name, request_class=request_class.value)
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

    def _refresh(self) -> None:
        self._refresh_at_s = time.monotonic() + REFRESH_S
        state = self._state().to_dict()
        for metric, paths, null in FIGURES:
            for values, path in paths.items():
                for keys, value in values_at(state, path):
                    shown = null if value is None else value
                    if shown is not None:
                        key = iter(keys)
                        named = [next(key) if one == "*" else one for one in values]
                        labels = dict(zip(metric.labels, named, strict=True))
                        self._show(metric.kind, metric.name, shown, **labels)
        costs: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (request_class, tenant), seconds in values_at(state, "device_s.*.*"):
            costs[key_of(tenant), request_class] += seconds  # clients name tenants
        for (key_name, request_class), seconds in costs.items():
            labels = {"key": key_name, "request_class": request_class}
            self._show(Kind.COUNTER, "device_seconds", seconds, **labels)
        for log in state["logs_off"]:
            self._of("log_switched_off", log=log).set(1)
        for bucket in state["pool"]["buckets"] if state["pool"] else ():
            length = bucket["min_prompt_tokens"]
            self._of("pool_requests", min_prompt_tokens=length).set(bucket["num_requests"])
            self._of("pool_tokens", min_prompt_tokens=length).set(bucket["num_tokens"])

    def _show(self, kind: Kind, name: str, value: float, **labels: Any) -> None:
        sample = self._of(name, **labels)
        if kind is Kind.GAUGE:
            sample.set(value)
            return
        sample.inc(value - self._counted.get(sample, 0))
        self._counted[sample] = value


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
