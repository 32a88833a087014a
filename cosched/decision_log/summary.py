"""A log in numbers, and one decision in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cosched.core.request import RequestClass
from cosched.decision_log.read import Entry
from cosched.decision_log.story import words
from cosched.engine.decision_records import Outcome, RequestRow

__all__ = ["LogSummary", "describe", "tell_decision", "tell_summary"]


class LogSummary:
    """Counts over the decisions of a log. Plans that were dropped count only as such."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._seqs: dict[RequestClass, set[int]] = {kind: set() for kind in RequestClass}
        self._prefill_tokens: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._stopped: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._num_held = 0
        self._late: Counter[str] = Counter()
        self._num_refused = 0
        self._num_decodes = 0
        self._planning_s: list[float] = []
        self._predicted: list[tuple[float, float]] = []
        self._times: list[float] = []

    def add(self, entry: Entry) -> None:
        decision, facts = entry.decision, entry.facts
        plan, result = decision.plan, decision.result
        self._outcomes[result.outcome.value] += 1
        self._planning_s.append(result.planning_s)
        self._times.append(decision.view.now_s)
        for request in decision.requests:
            self._seqs[request.request_class].add(request.arrival_seq)
        if result.outcome is Outcome.REPLANNED:
            return
        for reason, seqs in plan.skipped.items():
            self._skipped[words(reason)] += len(seqs)
        for why, seqs in plan.late.items():
            self._late[words(why)] += len(seqs)
        for _, mode in plan.preempted:
            self._stopped[mode.value] += 1
        refused = set(result.refused)
        for seq, num_tokens in plan.prefill:
            if seq not in refused:
                self._prefill_tokens[facts[seq].request_class.value] += num_tokens
        self._num_held += len(plan.held)
        self._num_refused += len(refused)
        self._num_decodes += result.num_decodes
        self._finished.update(reason for _, reason, _ in result.finished)
        if result.predicted_s is not None and result.measured_s:
            self._predicted.append((result.predicted_s, result.measured_s))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ratios of measured time, and of host time microseconds."""
        return {
            "first_s": min(self._times, default=None),
            "last_s": max(self._times, default=None),
            "outcomes": dict(self._outcomes),
            "requests": {kind.value: len(seqs) for kind, seqs in self._seqs.items()},
            "finished": dict(self._finished),
            "prefill_tokens": dict(self._prefill_tokens),
            "decodes": self._num_decodes,
            "skipped": dict(self._skipped.most_common()),
            "late": dict(self._late),
            "held": self._num_held,
            "stopped": dict(self._stopped),
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


def tell_summary(summary: dict[str, Any]) -> Iterator[str]:
    """A summary's dictionary for people."""
    yield _line("iterations", _counts(summary["outcomes"]))
    if summary["first_s"] is not None:
        yield _line("time", f"{summary['first_s']:.3f} s to {summary['last_s']:.3f} s")
    yield _line("requests", _counts(summary["requests"]))
    yield _line("finished", _counts(summary["finished"]))
    yield _line("prefill tokens", _counts(summary["prefill_tokens"]))
    yield _line("decodes", f"{summary['decodes']}, held {summary['held']}")
    yield _line("stopped", _counts(summary["stopped"]))
    yield _line("skipped", _counts(summary["skipped"]))
    if summary["late"]:
        yield _line("targets lost", _counts(summary["late"]))
    yield _line("refused by SGLang", str(summary["refused"]))
    error = summary["prediction_error"]
    if error is not None:
        shares = (f"{key} {100 * share:.1f} %" for key, share in error.items())
        yield _line("prediction error", ", ".join(shares))
    planning = summary["planning_us"]
    if planning is not None:
        yield _line("planning", ", ".join(f"{key} {us:.0f} us" for key, us in planning.items()))


def describe(entry: Entry) -> dict[str, Any]:
    """One decision in full, requests by name."""
    decision, facts = entry.decision, entry.facts
    view, plan, result = decision.view, decision.plan, decision.result

    def rids(seqs: Iterable[int]) -> list[str]:
        return [facts[seq].rid for seq in seqs]

    def rows(requests: Iterable[RequestRow]) -> list[dict[str, Any]]:
        return [
            {"rid": facts[seq].rid, "class": facts[seq].request_class.value}
            | {"num_output_tokens": num_output, "num_computed_tokens": num_computed}
            for seq, num_output, num_computed, *_ in requests
        ]

    return {
        "iteration": decision.number,
        "now_s": view.now_s,
        "start_s": view.start_s,
        "limits": plan.limits,
        "kv_free_tokens": view.kv.free,
        "kv_evictable_tokens": view.kv.evictable,
        "kv_reserved_tokens": view.kv.reserved,
        "kv_total_tokens": view.kv.total,
        "free_slots": view.free_slots,
        "running": rows(view.running),
        "unfinished": rows(view.unfinished),
        "online": rows(view.online),
        "offline": rows(view.offline),
        "prefill": [
            {"rid": facts[seq].rid, "num_tokens": num_tokens, "num_cached": _cached(entry, seq)}
            for seq, num_tokens in plan.prefill
        ],
        "held": rids(plan.held),
        "stopped": {facts[seq].rid: mode.value for seq, mode in plan.preempted},
        "late": {words(why): rids(seqs) for why, seqs in plan.late.items()},
        "skipped": {words(reason): rids(seqs) for reason, seqs in plan.skipped.items()},
        "refused": rids(result.refused),
        "outcome": result.outcome.value,
        "num_decodes": result.num_decodes,
        "predicted_s": result.predicted_s,
        "measured_s": result.measured_s,
        "planning_s": result.planning_s,
        "finished": {facts[seq].rid: reason for seq, reason, _ in result.finished},
    }


def tell_decision(shown: dict[str, Any]) -> Iterator[str]:
    """What `describe` gave, for people."""
    yield (
        f"iteration {shown['iteration']}, planned at {shown['now_s']:.3f} s to begin at "
        f"{shown['start_s']:.3f} s"
    )
    limits = shown["limits"].items()
    yield _line("limits", ", ".join(f"{phase} {_ms(limit_s)}" for phase, limit_s in limits))
    yield _line(
        "KV tokens",
        f"{shown['kv_free_tokens']} free, {shown['kv_evictable_tokens']} evictable, "
        f"{shown['kv_reserved_tokens']} reserved, of {shown['kv_total_tokens']}",
    )
    yield _line("request slots", f"{shown['free_slots']} free")
    for name in ("running", "unfinished", "online", "offline"):
        label = f"waiting {name}" if name in ("online", "offline") else name
        yield _line(label, ", ".join(row["rid"] for row in shown[name]))
    chunks = (f"{c['rid']} {c['num_tokens']}{_after(c['num_cached'])}" for c in shown["prefill"])
    yield _line("prefill tokens", ", ".join(chunks))
    yield _line("held", ", ".join(shown["held"]))
    yield _line("stopped", ", ".join(f"{rid} ({m})" for rid, m in shown["stopped"].items()))
    for why, rids in shown["late"].items():
        yield _line("targets lost", f"{why}: {', '.join(rids)}")
    for reason, rids in shown["skipped"].items():
        yield _line("skipped", f"{reason}: {', '.join(rids)}")
    yield _line("refused by SGLang", ", ".join(shown["refused"]))
    yield _line("outcome", _OUTCOMES[Outcome(shown["outcome"])])
    yield _line("decodes", str(shown["num_decodes"]))
    times = [f"{kind} {_ms(shown[f'{kind}_s'])}" for kind in ("predicted", "measured")]
    yield _line("time", f"{', '.join(times)}; planning {1e6 * shown['planning_s']:.0f} us")
    yield _line("finished", _joined(shown["finished"]))


_OUTCOMES = {
    Outcome.RAN: "it ran",
    Outcome.NO_BATCH: "there was nothing to run",
    Outcome.REPLANNED: "dropped; the next plan was made when the results on their way were known",
}


def _cached(entry: Entry, seq: int) -> int | None:
    match = entry.decision.view.match.get(seq)
    return None if match is None else match.cached


def _after(num_cached: int | None) -> str:
    return "" if num_cached is None else f" after {num_cached} cached"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _line(label: str, text: str) -> str:
    return f"  {label:<18}{text or '-'}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _joined(named: dict[str, str]) -> str:
    return ", ".join(f"{name} ({value})" for name, value in named.items())
