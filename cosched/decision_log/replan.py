"""Recorded views planned again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from cosched.core.batch import BatchTotals
from cosched.core.estimates import Predictor
from cosched.core.plan import Plan
from cosched.core.view import View
from cosched.decision_log.read import Entry
from cosched.decision_log.view import NotRecordedError, RecordedView, recorded_plan
from cosched.engine.decision_records import Header, Outcome
from cosched.errors import ConfigError
from cosched.latency.calibration import Calibrator
from cosched.policy.base import Policy
from cosched.policy.registry import policy_entry

__all__ = ["Replanned", "replan"]

_HOPELESS = 20
"""After so many plans without one that can be made, the others are not tried."""


@dataclass(slots=True, kw_only=True)
class Replanned:
    """How a policy's plans compare with the recorded ones.

    num_equal         plans equal in everything: work, reasons, limits
    num_same_work     plans that compute, hold and stop the same
    num_cut           plans of another policy that were made from those waiting requests alone that
                      the recorded one looked at, though more waited
    num_unanswered    plans that could not be made, for the policy asks for what was not recorded
    first_difference  the first plan that is not equal, and how; None: all are
    """

    policy: str
    num_plans: int = 0
    num_equal: int = 0
    num_same_work: int = 0
    num_cut: int = 0
    num_unanswered: int = 0
    first_difference: str | None = None


def replan(entries: Iterable[Entry], *, policy: str | None = None) -> Replanned:
    """Plan every recorded view with the named policy, or with the recorded one, built with the
    recorded settings and asked with the recorded calibrator.

    Another policy sees of what waits what the recorded one looked at. ConfigError for a policy that
    plans nothing, for one that asks from the beginning for what this log does not hold, and for a
    log without decisions."""
    planner: _Planner | None = None
    for entry in entries:
        if planner is None:
            planner = _Planner(entry.header, policy or entry.header.policy)
        planner.add(entry)
    if planner is None:
        raise ConfigError("the log holds no decisions")
    return planner.replanned


class _Planner:
    def __init__(self, header: Header, policy: str) -> None:
        entry = policy_entry(policy)
        make = entry.make
        if make is None:
            raise ConfigError(f"policy {policy!r} leaves all decisions to SGLang")
        self._recorded = header.policy
        self._is_another = policy != header.policy
        self._by_arrival = self._is_another and entry.pool is None
        self._num_made = self._num_not_made = 0  # of views in which there was something to plan
        self._believed = _Believed()
        self._policy: Policy[Any] = make(header.settings)
        self._carry = self._policy.initial
        self.replanned = Replanned(policy=policy)

    def add(self, entry: Entry) -> None:
        self._believed.use(entry)
        result = self.replanned
        result.num_plans += 1
        view = RecordedView(
            entry,
            predictor=self._believed,
            by_another=self._is_another,
            by_arrival=self._by_arrival,
        )
        recorded_carry = entry.decision.carry
        if recorded_carry is not None and not self._is_another:
            self._carry = msgspec.convert(recorded_carry, type(self._policy.initial))
        try:
            plan, carry = self._policy.plan(cast("View", view), self._carry)
            if entry.decision.result.outcome is not Outcome.REPLANNED:
                self._carry = carry
        except NotRecordedError as error:
            result.num_unanswered += 1
            differences = [f"the policy asks for {error}, which was not recorded"]
            self._count_not_made(entry, differences[0])
        else:
            self._num_made += _has_work(entry)
            result.num_cut += view.is_cut
            recorded = recorded_plan(entry)
            differences = list(_work_differences(recorded, plan))
            result.num_same_work += not differences
            differences += _reason_differences(recorded, plan)
        if not differences:
            result.num_equal += 1
        elif result.first_difference is None:
            number, now_s = entry.decision.number, entry.decision.view.now_s
            result.first_difference = f"iteration {number} at {now_s:.3f} s: {differences[0]}"

    def _count_not_made(self, entry: Entry, why: str) -> None:
        self._num_not_made += _has_work(entry)
        if self._is_another and not self._num_made and self._num_not_made >= _HOPELESS:
            raise ConfigError(
                f"policy {self.replanned.policy!r} cannot plan from a log of {self._recorded!r}: "
                f"none of the first {_HOPELESS} plans can be made; {why}"
            )


def _has_work(entry: Entry) -> bool:
    view = entry.decision.view
    return bool(view.running or view.unfinished or view.online or view.offline)


class _Believed(Predictor):
    """What the recorded predictor would have answered."""

    def __init__(self) -> None:
        self._calibrator = Calibrator()
        self._is_known = False

    def use(self, entry: Entry) -> None:
        self._is_known = entry.calibrator is not None
        if entry.calibrator is not None:
            self._calibrator.restore(entry.calibrator)

    @property
    def name(self) -> str:
        return "recorded"

    def predict_s(self, totals: BatchTotals) -> float:
        if not self._is_known:
            raise NotRecordedError("a prediction")
        return self._calibrator.predict_s(totals)

    @property
    def margin(self) -> float:
        return self._calibrator.margin if self._is_known else 0.0

    def describe(self) -> dict[str, object]:
        return {"predictor": self.name}


def _work_differences(recorded: Plan, now: Plan) -> Iterator[str]:
    if list(recorded.prefill.items()) != list(now.prefill.items()):
        yield f"prefill was {_tokens(recorded)}, now {_tokens(now)}"
    if recorded.preempt != now.preempt:
        yield f"stopped were {_stopped(recorded)}, now {_stopped(now)}"
    if recorded.decodes != now.decodes:
        yield f"running requests decoded: {recorded.decodes}, now {now.decodes}"
    if recorded.hold != now.hold:
        yield f"held were {_names(sorted(recorded.hold))}, now {_names(sorted(now.hold))}"
    if recorded.promise != now.promise:
        yield f"promised were {_names(map(str, recorded.promise.items()))}, now " + _names(
            map(str, now.promise.items())
        )
    if recorded.hosts != now.hosts:
        yield f"hosted were {_hosted(recorded)}, now {_hosted(now)}"


def _reason_differences(recorded: Plan, now: Plan) -> Iterator[str]:
    if recorded.skipped != now.skipped:
        yield f"skipped were {_skipped(recorded)}, now {_skipped(now)}"
    if recorded.late != now.late:
        yield f"late were {_late(recorded)}, now {_late(now)}"
    if recorded.limits != now.limits:
        yield f"limits were {_limits(recorded)}, now {_limits(now)}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _tokens(plan: Plan) -> str:
    return _names(f"{rid}: {num_tokens}" for rid, num_tokens in plan.prefill.items())


def _hosted(plan: Plan) -> str:
    return _names(f"{rid} by {h.host} up to {h.offset}" for rid, h in plan.hosts.items())


def _stopped(plan: Plan) -> str:
    return _names(f"{stopped.rid} ({stopped.mode.value})" for stopped in plan.preempt)


def _skipped(plan: Plan) -> str:
    return _names(f"{rid} ({reason.value})" for rid, reason in plan.skipped.items())


def _late(plan: Plan) -> str:
    return _names(f"{rid} ({why.value})" for rid, why in plan.late.items())


def _limits(plan: Plan) -> str:
    return _names(f"{phase} {limit_s * 1e3:.6g} ms" for phase, limit_s in plan.limits.items())
