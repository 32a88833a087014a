"""Which targets a request met. Formulas: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from cosched.core.request import Slo
from cosched.lab.metrics.records import RequestRecord

ROUNDING_S = 1e-9
"""Tolerance of a target: differences of sums of durations have rounding errors."""


class Verdict(Enum):
    """Undecided: the run ended while the request could still have met the target."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class JctTarget:
    """EcoServe §4: the JCT target of a reply of n tokens is ``scale * (prompt_s + token_s * n)``.

    prompt_s  average prompt processing latency of the data set [s]; t_p
    token_s   average latency of a generated token [s]; t_g
    """

    prompt_s: float
    token_s: float
    scale: float = 2.0

    def limit_s(self, num_output_tokens: int) -> float:
        return self.scale * (self.prompt_s + self.token_s * num_output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One verdict per target; None where the request has no such target.

    joint is over TTFT, TPOT and deadline; jct is EcoServe's measure and not part of it.
    """

    ttft: Verdict | None
    tpot: Verdict | None
    deadline: Verdict | None
    jct: Verdict | None
    joint: Verdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Of the requests that have the target. ratio = met / (met + missed); None: none is decided."""

    num_met: int
    num_missed: int
    num_undecided: int
    ratio: float | None

    @classmethod
    def of(cls, verdicts: Iterable[Verdict | None]) -> Attainment:
        counts = dict.fromkeys(Verdict, 0)
        for verdict in verdicts:
            if verdict is not None:
                counts[verdict] += 1
        return cls.counted(*(counts[verdict] for verdict in Verdict))

    @classmethod
    def counted(cls, num_met: int, num_missed: int, num_undecided: int) -> Attainment:
        num_decided = num_met + num_missed
        return cls(
            num_met=num_met,
            num_missed=num_missed,
            num_undecided=num_undecided,
            ratio=num_met / num_decided if num_decided else None,
        )


def with_defaults(slo: Slo, default: Slo) -> Slo:
    """A request's own targets, and the default's where it has none."""
    return Slo(
        ttft_s=default.ttft_s if slo.ttft_s is None else slo.ttft_s,
        tpot_s=default.tpot_s if slo.tpot_s is None else slo.tpot_s,
        deadline_s=default.deadline_s if slo.deadline_s is None else slo.deadline_s,
    )


def common_slo(records: Iterable[RequestRecord], default: Slo) -> Slo:
    """The targets that all of them have; None where they differ."""
    slos = {with_defaults(record.slo, default) for record in records}

    def only(values: set[float | None]) -> float | None:
        return values.pop() if len(values) == 1 else None

    return Slo(ttft_s=only({slo.ttft_s for slo in slos}), tpot_s=only({s.tpot_s for s in slos}))


def judge(
    record: RequestRecord, slo: Slo, *, now_s: float, jct_target: JctTarget | None = None
) -> Judgement:
    """The verdicts on a request that was watched until `now_s`, after its last event."""
    ttft = None if slo.ttft_s is None else _ttft(record, slo.ttft_s, now_s)
    tpot = None if slo.tpot_s is None else _tpot(record, slo.tpot_s, now_s)
    deadline = None if slo.deadline_s is None else _until(record, slo.deadline_s, now_s)
    jct = None
    if jct_target is not None:
        # An open reply has at least one token to come, and its target grows with it.
        num_tokens = record.num_output_tokens + record.is_open
        jct = _until(record, jct_target.limit_s(num_tokens), now_s)
    return Judgement(
        ttft=ttft, tpot=tpot, deadline=deadline, jct=jct, joint=_joint(ttft, tpot, deadline)
    )


def _ttft(record: RequestRecord, limit_s: float, now_s: float) -> Verdict:
    if not record.ok:
        return Verdict.MISSED
    if record.ttft_s is not None:
        return _within(record.ttft_s, limit_s)
    return _still(now_s - record.arrival_s, limit_s)


def _tpot(record: RequestRecord, limit_s: float, now_s: float) -> Verdict:
    if not record.ok:
        return Verdict.MISSED
    if record.is_finished:
        return Verdict.MET if record.tpot_s is None else _within(record.tpot_s, limit_s)
    if record.first_token_s is None:
        return Verdict.UNDECIDED
    # After k tokens the next one is due k targets after the first.
    return _still(now_s - record.first_token_s, limit_s * record.num_output_tokens)


def _until(record: RequestRecord, limit_s: float, now_s: float) -> Verdict:
    if not record.ok:
        return Verdict.MISSED
    if record.e2e_s is not None:
        return _within(record.e2e_s, limit_s)
    return _still(now_s - record.arrival_s, limit_s)


def _within(value_s: float, limit_s: float) -> Verdict:
    return Verdict.MET if value_s <= limit_s + ROUNDING_S else Verdict.MISSED


def _still(elapsed_s: float, limit_s: float) -> Verdict:
    """Of something that has not come yet."""
    return Verdict.UNDECIDED if elapsed_s <= limit_s + ROUNDING_S else Verdict.MISSED


def _joint(*verdicts: Verdict | None) -> Verdict | None:
    given = [verdict for verdict in verdicts if verdict is not None]
    for worst in (Verdict.MISSED, Verdict.UNDECIDED, Verdict.MET):
        if worst in given:
            return worst
    return None
