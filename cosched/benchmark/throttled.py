"""HyGen* at its best: Sarathi++ with offline requests admitted at the highest fixed rate that the
online requests bear, as the SLO-aware profiler finds it for each workload (HyGen §5.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cosched.metrics.goals import parse_goal
from cosched.simulation.run import RunResult, RunSpec
from cosched.simulation.scenario import scenario
from cosched.simulation.slo_search import SEARCHES, find_largest
from cosched.simulation.store import ResultStore

__all__ = ["CEILING", "NUM_TRIED", "THROTTLED", "highest_rate", "needs_a_rate", "sweep_rates"]

SEARCH = "offline-rate"

THROTTLED = SEARCHES[SEARCH].policy

CEILING = "offline-fcfs"
"""The scenario that serves the offline set in the order of arrival, as `THROTTLED` does, without
online requests: a higher rate than its own would throttle nothing."""

GOAL = parse_goal("attainment>=-1%")

SPAN = 30.0
"""The highest rate that is searched over the lowest."""

TOLERANCE = 0.1
"""Relative precision of the rate."""

NUM_TRIED = 8
"""About as many runs a search takes with that precision and `SPAN`."""


def needs_a_rate(base: RunSpec) -> bool:
    """Whether a rate is to be searched: both classes are there, and none is given."""
    is_given = SEARCHES[SEARCH].key in dict(base.config)
    return base.online is not None and base.offline is not None and not is_given


def highest_rate(alone: RunResult) -> float:
    """Offline requests per second of a run of `CEILING`; at least one in the run."""
    return max(alone.summary.offline.requests_per_s or 0.0, 1 / alone.end_s)


def sweep_rates(
    base: RunSpec,
    *,
    highest: float,
    num_jobs: int,
    store: ResultStore | None,
    on_run: Callable[[str, RunResult], None],
) -> tuple[dict[str, RunResult], str]:
    """Every rate up to `highest` [1/s] that was tried, ascending, and the one to show: the largest
    that meets `GOAL`, or the one with the highest attainment where none does."""
    tried: dict[str, RunResult] = {}

    def note(name: str, result: RunResult) -> None:
        on_run(name, result)
        tried[name] = result

    answer = find_largest(
        SEARCH,
        replace(base, scenario=scenario(THROTTLED)),
        [GOAL],
        low=highest / SPAN,
        high=highest,
        tolerance=TOLERANCE,
        num_jobs=num_jobs,
        store=store,
        on_run=note,
    )
    rates = {SEARCHES[SEARCH].say(probe.value): probe for probe in answer.probes}
    best = max(rates, key=lambda name: (rates[name].value == answer.value, rates[name].reached))
    return {name: tried[name] for name in rates}, best
