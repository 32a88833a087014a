"""The figures of a replica that people see: as what Prometheus gets each, and where it is in the
state (`cosched.engine.state`). docs/metrics.md has the same table, with formulas and units.

The number of label values is bounded: classes, targets, logs, places that may fail, length buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cosched.batch.prometheus import Kind, Metric
from cosched.core.request import RequestClass
from cosched.memory.occupancy import KV_USES

TARGETS: Mapping[RequestClass, tuple[str, ...]] = {
    RequestClass.ONLINE: ("ttft", "tpot", "all"),
    RequestClass.OFFLINE: ("deadline",),
}
"""What can be met or missed. ``all``: TTFT and TPOT of the same request."""

_PLANNING_S = (1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 0.1)
_ERROR = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 600, 3600)
_TPOT_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 10)
_E2E_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)

_CLASS, _TARGET = ("request_class",), ("request_class", "target")
_TIER = ("tier", "target")
_CLASSES = tuple(name.value for name in RequestClass)
_LATENCIES = ("ttft", "tpot")
_HOST_USES = ("free", "doubled", "returning", "referenced", "dead")


class Figure(NamedTuple):
    """paths  label values -> dotted path in the state, in which ``*`` stands for each key that is
           there, and names the label value that is ``*``. Without paths it is counted as things
           happen, or shown by `MetricsExporter` in a way of its own
    null   what is shown where the state has None; None: nothing
    """

    metric: Metric
    paths: Mapping[tuple[str, ...], str] = {}
    null: float | None = 0.0


def _row(kind: Kind, name: str, text: str, path: str = "") -> Figure:
    """One value, without labels."""
    return Figure(Metric(name, kind, text), {(): path} if path else {})


def _rows(kind: Kind, name: str, text: str, label: str, path: str, values: Any) -> Figure:
    """One value for each label value, which stands for ``{}`` in the path."""
    paths: dict[tuple[str, ...], str] = {(value,): path.format(value) for value in values}
    return Figure(Metric(name, kind, text, (label,)), paths)


def _each(kind: Kind, name: str, text: str, path: str, *labels: str) -> Figure:
    """One value for each key that the path finds."""
    return Figure(Metric(name, kind, text, labels), {("*",) * len(labels): path})


def _judged(place: int) -> dict[tuple[str, ...], str]:
    """place: 0: met; 1: missed."""
    return {
        (request_class.value, target): f"attainment.{target}.{place}"
        for request_class, targets in TARGETS.items()
        for target in targets
    }


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

FIGURES = (
    # Requests, as things happen.
    Figure(Metric("ttft_seconds", _H, "Time from arrival to first token.", _CLASS, _TTFT_S)),
    Figure(Metric("tpot_seconds", _H, "Time per output token after the first.", _CLASS, _TPOT_S)),
    Figure(Metric("e2e_seconds", _H, "Time from arrival to last token.", _CLASS, _E2E_S)),
    # Requests, from the state.
    Figure(Metric("slo_met", _C, "Requests that met a target.", _TARGET), _judged(0)),
    Figure(Metric("slo_missed", _C, "Requests that missed a target.", _TARGET), _judged(1)),
    _rows(_C, "aborted", "Requests that ended without their whole reply.",
          "request_class", "num_aborted_{}", _CLASSES),
    _rows(_C, "cancelled", "Aborted requests that their client cancelled.",
          "request_class", "num_cancelled_{}", _CLASSES),
    _each(_C, "late", "Online requests judged unable to meet their TTFT target.",
          "late.*.0", "reason"),
    _each(_C, "late_met", "Online requests judged unable to meet their TTFT target that met it.",
          "late.*.1", "reason"),
    _rows(_C, "prefill_tokens", "Prompt tokens computed.",
          "request_class", "{}_prefill_tokens", _CLASSES),
    _rows(_C, "output_tokens", "Output tokens generated.",
          "request_class", "{}_output_tokens", _CLASSES),
    Figure(Metric("device_seconds", _C,
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
    _each(_C, "tier_slo_met", "Online requests of a tier that met a target.",
          "tiers.*.attainment.*.0", *_TIER),
    _each(_C, "tier_slo_missed", "Online requests of a tier that missed a target.",
          "tiers.*.attainment.*.1", *_TIER),
    Figure(Metric("tier_requests", _G, "Online requests of a tier that wait or run.",
                  ("tier", "state")),
           {("*", state): f"tiers.*.num_{state}" for state in ("waiting", "running")}),
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
    _rows(_G, "tolerance_room_ratio", "Share of TTFT or TPOT that offline work may still add.",
          "latency", "alone.{}.room", _LATENCIES)._replace(null=None),
    # Plans.
    _row(_C, "preemptions", "Running requests preempted by a plan.", "num_preemptions"),
    _row(_C, "recomputed_tokens", "Tokens computed again because a preemption lost their KV.",
         "recomputed_tokens"),
    _row(_C, "encoded_tokens", "Tokens of images, video and sound computed by the encoder.",
         "encoded_tokens"),
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
    _each(_C, "failures", "Failures inside cosched that were caught, by place.",
          "failures.*", "place"),
    Figure(Metric("log_switched_off", _G,
                "1 after a log was switched off because a line could not be written.", ("log",))),
    _row(_C, "offline_turned_away",
         "Offline requests answered with 429 because the pool was full.", "num_turned_away"),
    _row(_G, "offline_paused", "1 while the operator pauses offline work.",
         "offline_limits.paused"),
    _row(_G, "offline_max_running",
         "Operator's limit of running offline requests; +Inf without one.",
         "offline_limits.max_running")._replace(null=math.inf),
    # Iterations.
    Figure(Metric("planning_seconds", _H,
                "Host time of planning an iteration: view, plan and check.",
                buckets=_PLANNING_S)),
    _row(_C, "iteration_predicted_seconds",
         "Predicted time of iterations that were predicted and measured."),
    _row(_C, "iteration_measured_seconds",
         "Measured time of iterations that were predicted and measured."),
    _row(_C, "iteration_budget_seconds", "Time budget of iterations with a budget.", "budget_s"),
    _row(_C, "iteration_budget_used_seconds", "Measured time of iterations with a budget.",
         "budget_used_s"),
    Figure(Metric("prediction_error_ratio", _H,
                "Relative error of the predicted time of an iteration.", buckets=_ERROR)),
    # Attention.
    _row(_C, "shared_prefix_iterations", "Iterations whose attention read shared prefixes once.",
         "shared_prefix.num_iterations"),
    _row(_C, "shared_prefix_decodes", "Decodes in these iterations.",
         "shared_prefix.num_decodes"),
    # The pool.
    Figure(Metric("pool_requests", _G,
                "Waiting offline requests by shortest prompt length of their bucket.",
                ("min_prompt_tokens",))),
    Figure(Metric("pool_tokens", _G,
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
    _rows(_G, "kv_tokens", "KV memory by use [tokens].", "use", "kv.{}", KV_USES),
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


def values_at(state: Any, path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What each ``*`` of the path stands for, and the value there; nothing where a part on the way
    is None. state: `ReplicaState.to_dict`."""
    part, _, rest = path.partition(".")
    if state is None:
        return
    if part == "*":
        for key, value in state.items():
            for keys, found in values_at(value, rest) if rest else [((), value)]:
                yield (key, *keys), found
        return
    value = state[int(part)] if part.isdecimal() else state[part]
    yield from values_at(value, rest) if rest else [((), value)]
