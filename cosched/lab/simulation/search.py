"""The largest or least value of one number of a run with which online requests meet their goals,
found in few runs.

`search` answers the capacity questions of Echo §5.4 (the least memory or replicas, the most load)
and sets a parameter of a policy as HyGen's SLO-aware profiler does (§4.2). A range is a list of
values whose neighbours differ by the tolerance (`values_between`), so that different searches over
one range try the same values and share kept results. Most numbers are monotone: values are good up
to a boundary. Where small values are bad, too (a very small budget delays online requests as a very
large one does), the range is scanned from its upper end first (`largest_good`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cosched.errors import ConfigError
from cosched.lab.metrics.goals import Goal
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.run import RunResult, config_of
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import OfflineClient, setting_of

V = TypeVar("V")

Try = Callable[[Sequence[V]], Sequence[bool]]
"""Tries values side by side; True for each good one."""

NUM_SCANNED = 8

_DIGITS = 4
"""Significant digits of a value where small ones may be bad."""


def values_between(
    low: float,
    high: float,
    *,
    tolerance: float,
    is_integer: bool = False,
    digits: int | None = None,
) -> list[float]:
    """Ascending values from `low` to `high`, each at most `tolerance` (relative) above the one
    before, integers at least one. digits: significant digits they are rounded to."""
    assert 0 < low <= high and tolerance > 0, f"{low=} {high=} {tolerance=}"
    values = [low]
    while values[-1] < high:
        value = values[-1] * (1 + tolerance)
        if is_integer:
            value = max(values[-1] + 1, math.floor(value))
        values.append(min(value, high))
    if digits is not None:
        values = sorted({float(f"{value:.{digits}g}") for value in values})
    return values


def last_good(values: Sequence[V], probe: Try[V], *, num_at_once: int = 1) -> V | None:
    """The last good value of a list that begins with good values and ends with bad ones; None if
    the first is bad. `num_at_once` are tried side by side."""
    is_good, *rest = probe([values[0], values[-1]][: len(values)])
    if not is_good:
        return None
    if all(rest):
        return values[-1]
    good, bad = 0, len(values) - 1
    while bad - good > 1:
        count = min(num_at_once, bad - good - 1)
        points = [good + (bad - good) * (i + 1) // (count + 1) for i in range(count)]
        for point, is_good in zip(points, probe([values[p] for p in points]), strict=True):
            if not is_good:
                bad = point
                break
            good = point
    return values[good]


def largest_good(values: Sequence[V], probe: Try[V], *, num_at_once: int = 1) -> V | None:
    """The largest good one of ascending values, of which small ones may be bad, too: some values
    are tried from the largest down to the first good one, then those up to the bad one above it are
    searched. None if none of those tried is good. Each is tried once."""
    known: dict[V, bool] = {}

    def once(wanted: Sequence[V]) -> list[bool]:
        new = [value for value in wanted if value not in known]
        if new:
            known.update(zip(new, probe(new), strict=True))
        return [known[value] for value in wanted]

    stride = max(math.ceil((len(values) - 1) / NUM_SCANNED), 1)
    indices = [*range(len(values) - 1, 0, -stride), 0]
    for start in range(0, len(indices), num_at_once):
        tried = indices[start : start + num_at_once]
        for index, is_good in zip(tried, once([values[i] for i in tried]), strict=True):
            if is_good:
                above = min(index + stride, len(values) - 1)
                return last_good(values[index : above + 1], once, num_at_once=num_at_once)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One number of a run.

    at           the specification of a run with this value
    bounds       range of values, unless another is named
    least        the least good value is wanted; False: the largest
    is_integer   the values are counts
    is_monotone  False: small values may be bad, too
    key          of `Config`, that the value is for; empty: it is of the machine or the load
    policy       that reads the key
    """

    summary: str
    unit: str
    at: Callable[[RunSpec, float], RunSpec]
    bounds: Callable[[RunSpec], tuple[float, float]]
    least: bool = False
    is_integer: bool = True
    is_monotone: bool = True
    key: str = ""
    policy: str = ""


def _online(spec: RunSpec) -> WorkloadSpec:
    if spec.online is None:
        raise ConfigError("this question is about online requests: name --online")
    return spec.online


def _rate(spec: RunSpec) -> float:
    rate = _online(spec).rate
    if rate is None:
        raise ConfigError("this question starts from a rate: name --online-rate")
    return rate


def _with_rate(spec: RunSpec, rate: float) -> RunSpec:
    return replace(spec, online=replace(_online(spec), rate=rate))


def _sessions(spec: RunSpec) -> int:
    number = _online(spec).num_sessions
    if number is None:
        raise ConfigError("this question starts from a number of sessions: name --online-sessions")
    return number


CAPACITIES: Mapping[str, Search] = {
    "min-kv": Search(
        summary="the least KV memory",
        unit="tokens",
        at=lambda spec, num: replace(spec, machine=replace(spec.machine, kv_tokens=int(num))),
        bounds=lambda spec: (4096.0, float(spec.machine.capacity())),
        least=True,
    ),
    "min-gpus": Search(
        summary="the least replicas that each serve an equal sample of the online requests",
        unit="replicas",
        at=lambda spec, num: _with_rate(spec, _rate(spec) / num),
        bounds=lambda spec: (1.0, 64.0),
        least=True,
    ),
    "max-offline": Search(
        summary="the most offline requests in flight",
        unit="requests",
        at=lambda spec, cap: replace(
            spec, setting=replace(spec.setting, client=OfflineClient.CAP), cap=int(cap)
        ),
        bounds=lambda spec: (1.0, float(spec.max_concurrency)),
    ),
    "max-online-rate": Search(
        summary="the highest rate of online requests",
        unit="req/s",
        at=_with_rate,
        bounds=lambda spec: (_rate(spec) / 16, _rate(spec) * 16),
        is_integer=False,
    ),
    "max-online-sessions": Search(
        summary="the most sessions of online requests",
        unit="sessions",
        at=lambda spec, number: replace(
            spec, online=replace(_online(spec), num_sessions=int(number))
        ),
        bounds=lambda spec: (1.0, 16.0 * _sessions(spec)),
    ),
}
"""What `cosched simulate --find` asks."""


def _parameter(key: str, policy: str, summary: str, unit: str, low: float, high: float) -> Search:
    return Search(
        summary=summary,
        unit=unit,
        at=lambda spec, value: spec.configured(**{key: value}),
        bounds=lambda spec: (low, high),
        is_integer=False,
        is_monotone=False,
        key=key,
        policy=policy,
    )


PARAMETERS: Mapping[str, Search] = {
    "budget": _parameter(
        "latency_budget_ms", "hygen", "predicted time of an iteration", "ms", 2.0, 1000.0
    ),
    "offline-rate": _parameter(
        "offline_rate",
        "hygen-throttled",
        "rate at which offline requests are admitted",
        "req/s",
        0.01,
        100.0,
    ),
}
"""What `cosched profile slo` chooses (HyGen §4.2): larger values serve more offline work and delay
online requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run: its value of each goal, and its offline throughput."""

    value: float
    reached: tuple[float | None, ...]
    is_good: bool
    offline_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """value     None: no value in the range meets all goals
    bounds    of each goal, in seconds or as a share; None: there is no baseline
    baseline  value of each goal with online requests alone; None: no goal is relative
    probes    every value tried, in ascending order
    """

    value: float | None
    low: float
    high: float
    bounds: tuple[float | None, ...]
    baseline: tuple[float | None, ...] | None
    probes: tuple[Probe, ...]


def search(
    wanted: Search,
    spec: RunSpec,
    goals: Sequence[Goal],
    *,
    low: float | None = None,
    high: float | None = None,
    tolerance: float = 0.05,
    num_jobs: int = 1,
    on_run: Callable[[str, RunResult], object] = lambda what, result: None,
) -> Boundary:
    """The largest or least good value. ConfigError if something is missing or wrong, before the
    first run.

    tolerance  of the value, relative
    num_jobs   values that are tried at a time
    on_run     gets the name and the result of each run
    """
    if not goals:
        raise ConfigError("no goal: name at least one --slo")
    is_named = low is not None or high is not None
    least, most = wanted.bounds(spec)
    low, high = least if low is None else low, most if high is None else high
    if not 0 < low <= high or (is_named and low == high):
        raise ConfigError(f"the range is {low:g} to {high:g}; it must be above 0 and ascend")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; it must be in (0, 1)")
    config_of(wanted.at(spec, high))
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
        specs = [wanted.at(spec, value) for value in values]
        for index, result in execute_all(specs, num_jobs=num_jobs):
            value, reached, offline = values[index], _reached(goals, result), result.summary.offline
            met = [g.is_met(r, b) for g, r, b in zip(goals, reached, bounds, strict=True)]
            # A run that refuses its whole offline set ends before online requests arrive.
            refuses = 0 < offline.num_failed == offline.num_requests
            probes[value] = Probe(
                value=value,
                reached=reached,
                is_good=all(met) and not refuses,
                offline_tokens_per_s=offline.tokens_per_s,
            )
            on_run(f"{value:g} {wanted.unit}", result)
        return [probes[value].is_good for value in values]

    digits = None if wanted.is_monotone else _DIGITS
    values = values_between(
        low, high, tolerance=tolerance, is_integer=wanted.is_integer, digits=digits
    )
    find = last_good if wanted.is_monotone else largest_good
    value = find(values[::-1] if wanted.least else values, probe, num_at_once=num_jobs)
    return Boundary(
        value=value,
        low=low,
        high=high,
        bounds=bounds,
        baseline=baseline,
        probes=tuple(probes[value] for value in sorted(probes)),
    )


def _reached(goals: Sequence[Goal], result: RunResult) -> tuple[float | None, ...]:
    return tuple(goal.measure(result.summary, result.records) for goal in goals)
