"""Capacity questions (Echo §5.4): the least resources, or the most load, that meet the SLO.

Each is a search over one number for the point where the online attainment falls below a share. The
attainment is assumed to be monotone in that number, within the tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.progress import Progress

from cosched.errors import ConfigError, choices
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.search import last_good, values_between
from cosched.lab.simulation.setting import OfflineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One search.

    at          the specification of a run with this value
    bounds      range of values
    least       the least sufficient value; False: the largest good one
    is_integer  the values are counts
    """

    unit: str
    at: Callable[[RunSpec, float], RunSpec]
    bounds: Callable[[RunSpec], tuple[float, float]]
    least: bool = False
    is_integer: bool = True


def _online(spec: RunSpec) -> WorkloadSpec:
    if spec.online is None:
        raise ConfigError("this question is about online requests: name --online")
    return spec.online


def _rate(spec: RunSpec) -> float:
    rate = _online(spec).rate
    if rate is None:
        raise ConfigError("this question starts from a rate: name --online-rate")
    return rate


def _with_kv(spec: RunSpec, num_tokens: float) -> RunSpec:
    return replace(spec, machine=replace(spec.machine, kv_tokens=int(num_tokens)))


def _with_rate(spec: RunSpec, rate: float) -> RunSpec:
    return replace(spec, online=replace(_online(spec), rate=rate))


def _sessions(spec: RunSpec) -> int:
    number = _online(spec).num_sessions
    if number is None:
        raise ConfigError("this question starts from a number of sessions: name --online-sessions")
    return number


def _with_sessions(spec: RunSpec, number: float) -> RunSpec:
    return replace(spec, online=replace(_online(spec), num_sessions=int(number)))


def _with_cap(spec: RunSpec, cap: float) -> RunSpec:
    return replace(spec, setting=replace(spec.setting, client=OfflineClient.CAP), cap=int(cap))


QUESTIONS: Mapping[str, Question] = {
    "min-kv": Question(
        unit="tokens",
        at=_with_kv,
        bounds=lambda spec: (4096.0, float(spec.machine.capacity())),
        least=True,
    ),
    # Replicas that each serve an equal sample of the online requests.
    "min-gpus": Question(
        unit="replicas",
        at=lambda spec, num: _with_rate(spec, _rate(spec) / num),
        bounds=lambda spec: (1.0, 64.0),
        least=True,
    ),
    # Offline requests in flight.
    "max-offline": Question(
        unit="requests",
        at=_with_cap,
        bounds=lambda spec: (1.0, float(spec.max_concurrency)),
    ),
    "max-online-rate": Question(
        unit="req/s",
        at=_with_rate,
        bounds=lambda spec: (_rate(spec) / 16, _rate(spec) * 16),
        is_integer=False,
    ),
    "max-online-sessions": Question(
        unit="sessions",
        at=_with_sessions,
        bounds=lambda spec: (1.0, 16.0 * _sessions(spec)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """value: None if no value within the bounds meets the SLO. probes: every value tried and its
    result, in ascending order."""

    question: str
    value: float | None
    unit: str
    attainment: float
    bounds: tuple[float, float]
    probes: tuple[Mapping[str, Any], ...]

    def sentence(self) -> str:
        low, high = self.bounds
        if self.value is None:
            return (
                f"{self.question}: nothing between {low:g} and {high:g} {self.unit} gives "
                f"an attainment of {self.attainment:.0%}"
            )
        return (
            f"{self.question}: {self.value:g} {self.unit} "
            f"(attainment of at least {self.attainment:.0%})"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find(
    name: str,
    spec: RunSpec,
    *,
    attainment: float = 0.9,
    tolerance: float = 0.05,
    num_jobs: int = 2,
    quiet: bool = False,
) -> Answer:
    """Answer a question. `tolerance` is relative; `num_jobs` values are tried at a time."""
    if name not in QUESTIONS:
        raise ConfigError(f"unknown question {name!r}; choose from {choices(QUESTIONS)}")
    if not 0 < attainment <= 1:
        raise ConfigError(f"attainment is {attainment}; it must be in (0, 1]")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; it must be in (0, 1)")
    question = QUESTIONS[name]
    probes: dict[float, dict[str, Any]] = {}

    def probe(values: Sequence[float]) -> list[bool]:
        specs = [question.at(spec, value) for value in values]
        good: dict[int, bool] = {}
        for index, result in execute_all(specs, num_jobs=num_jobs):
            summary = result.summary
            ratio = summary.online.attainment.joint.ratio
            # A run that refuses its whole offline set ends before online requests arrive.
            refuses = 0 < summary.offline.num_failed == summary.offline.num_requests
            good[index] = ratio is not None and ratio >= attainment and not refuses
            probes[values[index]] = {
                "value": values[index],
                "attainment": ratio,
                "offline_tokens_per_s": summary.offline.tokens_per_s,
            }
        return [good[index] for index in range(len(values))]

    low, high = question.bounds(spec)
    bar = Progress(disable=quiet or not sys.stderr.isatty())
    with bar:
        task = bar.add_task(name, total=None)
        values = values_between(low, high, tolerance=tolerance, is_integer=question.is_integer)
        value = last_good(
            values[::-1] if question.least else values,
            probe,
            num_at_once=num_jobs,
            on_round=lambda: bar.update(task, advance=1),
        )
    return Answer(
        question=name,
        value=value,
        unit=question.unit,
        attainment=attainment,
        bounds=(low, high),
        probes=tuple(probes[value] for value in sorted(probes)),
    )
