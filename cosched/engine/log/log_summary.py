"""A log in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cosched.core.request import RequestClass
from cosched.engine.log.read import Entry
from cosched.engine.log.story import words


class LogSummary:
    """Counts over the decisions of a log. Of a plan that was replaced only the outcome counts."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._rids: dict[RequestClass, set[str]] = {kind: set() for kind in RequestClass}
        self._prefill_tokens: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._preempted: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._num_paused = self._num_refused = self._num_aborted = self._num_decodes = 0
        self._planning_s: list[float] = []
        self._predicted: list[tuple[float, float]] = []
        self._times: list[float] = []

    def add(self, entry: Entry) -> None:
        decision = entry.decision
        self._outcomes[decision.outcome] += 1
        self._planning_s.append(decision.planning_s)
        self._times.append(decision.now_s)
        self._num_aborted += len(decision.aborted)
        for facts in decision.requests:
            self._rids[facts.request_class].add(facts.rid)
        if decision.outcome == "replanned":
            return
        plan = decision.plan
        self._skipped.update(map(words, plan.skipped.values()))
        self._late.update(map(words, plan.late.values()))
        self._preempted.update(preemption.mode.value for preemption in plan.preempt)
        for rid, num_tokens in plan.prefill.items():
            if rid not in decision.refused:
                request_class = entry.class_of(rid)
                name = "unknown" if request_class is None else request_class.value
                self._prefill_tokens[name] += num_tokens
        self._num_paused += len(plan.paused)
        self._num_refused += len(decision.refused)
        self._num_decodes += decision.num_decodes
        self._finished.update(reason for reason, _ in decision.finished.values())
        if decision.predicted_s is not None and decision.measured_s:
            self._predicted.append((decision.predicted_s, decision.measured_s))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ratios of measured time, and of host time microseconds."""
        return {
            "first_s": min(self._times, default=None),
            "last_s": max(self._times, default=None),
            "outcomes": dict(self._outcomes),
            "requests": {kind.value: len(rids) for kind, rids in self._rids.items()},
            "finished": dict(self._finished),
            "aborted": self._num_aborted,
            "prefill_tokens": dict(self._prefill_tokens),
            "decodes": self._num_decodes,
            "paused": self._num_paused,
            "preempted": dict(self._preempted),
            "skipped": dict(self._skipped.most_common()),
            "late": dict(self._late),
            "refused": self._num_refused,
            "prediction_error": self._prediction_error(),
            "planning_us": _spread([1e6 * seconds for seconds in self._planning_s]),
        }

    def _prediction_error(self) -> dict[str, float] | None:
        if not self._predicted:
            return None
        predicted, measured = np.array(self._predicted).T
        errors = (predicted - measured) / measured
        spread = _spread(np.abs(errors).tolist())
        return None if spread is None else {**spread, "bias": float(errors.mean())}


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    median, p99 = np.percentile(values, [50, 99]).tolist()
    return {"mean": float(np.mean(values)), "median": median, "p99": p99}


def table(values: Mapping[str, Any]) -> Iterator[str]:
    """Lines for people: a value each."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(_shown, value))
        yield f"  {name:<18}{_shown(value) or '-'}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return " ".join(map(_shown, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
