"""What cosched does, as Prometheus metrics beside SGLang's own (``--enable-metrics``).

Counted in the scheduler process and written to the files that SGLang's ``/metrics`` reads
(prometheus_client's multiprocess mode). Names, formulas and units: docs/metrics.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cosched.engine.observe import StepResult

if TYPE_CHECKING:
    from cosched.engine.controller import Controller

__all__ = ["MetricsExporter"]

REFRESH_S = 1.0
"""Host time between two updates of what is a level and not a count."""

PLANNING_BUCKETS_S = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 0.1)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


class MetricsExporter:
    """Counts as things happen; levels once in `REFRESH_S`, and when the scheduler becomes idle."""

    def __init__(self, controller: Controller, labels: Mapping[str, Any]) -> None:
        """labels: those of SGLang's own metrics of this scheduler."""
        # SGLang says where the files are before anything may import prometheus_client.
        from prometheus_client import Counter, Gauge, Histogram

        self._controller = controller
        self._labels = dict(labels)
        self._refresh_at_s = 0.0
        self._is_idle = False
        self._num_preemptions = 0

        def gauge(name: str, text: str, *more: str) -> Any:
            names = [*self._labels, *more]
            return Gauge(f"cosched:{name}", text, names, multiprocess_mode="mostrecent")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            metric = Histogram(f"cosched:{name}", text, [*self._labels], buckets=buckets)
            return metric.labels(**self._labels)

        def counter(name: str, text: str) -> Any:
            return Counter(f"cosched:{name}", text, [*self._labels]).labels(**self._labels)

        self._planning = histogram(
            "planning_seconds", "Host time of a view, its plan and the check.", PLANNING_BUCKETS_S
        )
        self._error = histogram(
            "prediction_error_ratio",
            "Predicted against measured time of an iteration, as a share of the measured.",
            ERROR_BUCKETS,
        )
        self._predicted = counter("iteration_predicted_seconds", "Predicted time of iterations.")
        self._measured = counter("iteration_measured_seconds", "Measured time of the same.")
        self._preemptions = counter("preemptions", "Requests stopped by a plan.")
        self._waiting = gauge("waiting_requests", "Requests that wait.", "request_class")
        self._running = gauge("running_requests", "Requests that run.", "request_class")
        self._pool_requests = gauge(
            "pool_requests", "Offline requests that wait, by prompt length.", "min_prompt_tokens"
        )
        self._pool_tokens = gauge(
            "pool_tokens", "Their prompts and output [tokens].", "min_prompt_tokens"
        )
        self._oldest_age = gauge("pool_oldest_age_seconds", "Since the oldest of them arrived.")
        self._sharing = gauge(
            "pool_sharing_ratio", "Part of their tokens that another one computes for them."
        )
        self._expected_hit = gauge(
            "pool_expected_hit_ratio", "Hit rate to expect of serving them in the pool's order."
        )

    def planned(self, planning_s: float) -> None:
        """A plan was made."""
        self._planning.observe(planning_s)
        self._is_idle = False
        if time.monotonic() >= self._refresh_at_s:
            self._refresh()

    def idle(self) -> None:
        """There is nothing to plan; called again and again for as long as that is so."""
        if not self._is_idle:
            self._is_idle = True
            self._refresh()

    def measured(self, step: StepResult, predicted_s: float) -> None:
        """An iteration is done whose time the policy's predictor knew nothing of."""
        self._predicted.inc(predicted_s)
        self._measured.inc(step.duration_s)
        self._error.observe(abs(predicted_s / step.duration_s - 1))

    def _refresh(self) -> None:
        self._refresh_at_s = time.monotonic() + REFRESH_S
        controller, labels = self._controller, self._labels
        state = controller.state()
        for request_class in ("online", "offline"):
            for metric, kind in ((self._waiting, "waiting"), (self._running, "running")):
                count = state[f"num_{kind}_{request_class}"]
                metric.labels(**labels, request_class=request_class).set(count)
        num_preemptions = controller.counters.num_preemptions
        self._preemptions.inc(num_preemptions - self._num_preemptions)
        self._num_preemptions = num_preemptions
        pool = state["pool"]
        if pool is None:
            return
        for bucket in pool["buckets"]:
            length = bucket["min_prompt_tokens"]
            self._pool_requests.labels(**labels, min_prompt_tokens=length).set(
                bucket["num_requests"]
            )
            self._pool_tokens.labels(**labels, min_prompt_tokens=length).set(bucket["num_tokens"])
        self._oldest_age.labels(**labels).set(pool["oldest_age_s"] or 0.0)
        self._sharing.labels(**labels).set(pool["sharing_ratio"])
        self._expected_hit.labels(**labels).set(pool["expected_hit_ratio"])
