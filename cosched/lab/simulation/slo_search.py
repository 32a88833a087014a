"""The SLO-aware profiler (HyGen §4.2): the largest value of one parameter of a policy (the time
budget of an iteration, or the admission rate of offline requests) with which a workload meets all
goals. Larger values serve more offline work and delay online requests; very small budgets delay
online requests, too. So the range is scanned from its upper end, and then searched between the
first value that meets the goals and the one above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cosched.errors import ConfigError
from cosched.lab.metrics.goals import Goal
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.run import RunResult, config_of
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.search import largest_good, values_between
from cosched.lab.simulation.setting import setting_of

_DIGITS = 4
"""Significant digits of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """key: of `Config`, which `policy` reads. low, high: default range."""

    summary: str
    key: str
    unit: str
    policy: str
    low: float
    high: float


SEARCHES: Mapping[str, Search] = {
    "budget": Search(
        summary="predicted time of an iteration",
        key="latency_budget_ms",
        unit="ms",
        policy="hygen",
        low=2.0,
        high=1000.0,
    ),
    "offline-rate": Search(
        summary="rate at which offline requests are admitted",
        key="offline_rate",
        unit="req/s",
        policy="hygen-throttled",
        low=0.01,
        high=100.0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run: its value of each goal, and its offline throughput."""

    value: float
    reached: tuple[float | None, ...]
    is_good: bool
    offline_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SloAnswer:
    """value     None: no value in the range meets all goals
    bounds    of each goal, in seconds or as a share; None: there is no baseline
    baseline  value of each goal with online requests alone; None: no goal is relative
    probes    every value tried, in ascending order
    """

    search: str
    key: str
    unit: str
    value: float | None
    goals: tuple[str, ...]
    bounds: tuple[float | None, ...]
    baseline: tuple[float | None, ...] | None
    probes: tuple[Probe, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_largest(
    name: str,
    spec: RunSpec,
    goals: Sequence[Goal],
    *,
    low: float | None = None,
    high: float | None = None,
    tolerance: float = 0.05,
    num_jobs: int = 1,
    on_run: Callable[[str, RunResult], object] = lambda what, result: None,
) -> SloAnswer:
    """Search in virtual time. `tolerance` is relative; `num_jobs` values are tried at a time;
    `on_run` gets the name and the result of each run."""
    wanted = SEARCHES[name]
    low, high = wanted.low if low is None else low, wanted.high if high is None else high
    _check(spec, goals, low=low, high=high, tolerance=tolerance)
    config_of(spec.configured(**{wanted.key: high}))  # a wrong key is an error before the runs
    baseline = None
    if any(goal.is_relative for goal in goals):
        alone = replace(spec, setting=setting_of("s0"), config=())
        [(_, result)] = execute_all([alone], num_jobs=1)
        on_run("online requests alone", result)
        baseline = _reached(goals, result)
    bounds = tuple(
        goal.bound(None if baseline is None else baseline[i]) for i, goal in enumerate(goals)
    )
    probes: dict[float, Probe] = {}

    def probe(values: Sequence[float]) -> list[bool]:
        specs = [spec.configured(**{wanted.key: value}) for value in values]
        for index, result in execute_all(specs, num_jobs=num_jobs):
            value = values[index]
            reached = _reached(goals, result)
            met = [g.is_met(r, b) for g, r, b in zip(goals, reached, bounds, strict=True)]
            probes[value] = Probe(
                value=value,
                reached=reached,
                is_good=all(met),
                offline_tokens_per_s=result.summary.offline.tokens_per_s,
            )
            on_run(f"{value:g} {wanted.unit}", result)
        return [probes[value].is_good for value in values]

    values = values_between(low, high, tolerance=tolerance, digits=_DIGITS)
    value = largest_good(values, probe, num_at_once=num_jobs)
    return SloAnswer(
        search=name,
        key=wanted.key,
        unit=wanted.unit,
        value=value,
        goals=tuple(goal.text for goal in goals),
        bounds=bounds,
        baseline=baseline,
        probes=tuple(probes[value] for value in sorted(probes)),
    )


def _check(
    spec: RunSpec, goals: Sequence[Goal], *, low: float, high: float, tolerance: float
) -> None:
    if not goals:
        raise ConfigError("no goal: name at least one --slo")
    if spec.online is None or spec.offline is None:
        raise ConfigError("the search needs both classes: name --online and --offline")
    if not 0 < low < high:
        raise ConfigError(f"the range is {low:g} to {high:g}; it must be above 0 and ascend")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; it must be in (0, 1)")


def _reached(goals: Sequence[Goal], result: RunResult) -> tuple[float | None, ...]:
    return tuple(goal.measure(result.summary, result.records) for goal in goals)
