"""Scenarios on one workload, in virtual time, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cosched.benchmark.progress import progress_of_runs
from cosched.benchmark.throttled import (
    CEILING,
    NUM_TRIED,
    THROTTLED,
    highest_rate,
    needs_a_rate,
    sweep_rates,
)
from cosched.benchmark.tuned import TUNED, choose_tuned, other_order, tuned_candidates
from cosched.metrics.summary import Summary
from cosched.simulation.parallel import execute_all
from cosched.simulation.run import RunResult, RunSpec, summarize_run
from cosched.simulation.scenario import SCENARIOS, runs_as, scenario
from cosched.simulation.store import ResultStore

__all__ = [
    "ALL_SCENARIOS",
    "OFFLINE_ONLY",
    "Row",
    "SuiteResult",
    "known_scenario",
    "num_runs",
    "run_suite",
]

OFFLINE_ONLY = tuple(name for name, entry in SCENARIOS.items() if not entry.has_online)

_BASELINES = ("s0", *OFFLINE_ONLY, "s1", "priority", TUNED, "cap", "aimd")

ALL_SCENARIOS = (*_BASELINES, *(name for name in SCENARIOS if name not in _BASELINES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scenario on one workload.

    baseline  what `s0` reached in the same window: a run that is done early is not compared with
              hours it did not see. None where there is no online class or no s0
    """

    name: str
    result: RunResult
    summary: Summary
    baseline: Summary | None

    @property
    def attainment(self) -> float | None:
        return self.summary.online.attainment.joint.ratio

    @property
    def baseline_attainment(self) -> float | None:
        return None if self.baseline is None else self.baseline.online.attainment.joint.ratio

    @property
    def offline_tokens_per_s(self) -> float | None:
        return self.summary.offline.tokens_per_s if self.result.spec.scenario.has_offline else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "scenario": self.name,
            "attainment": self.attainment,
            "baseline_attainment": self.baseline_attainment,
            "offline_tokens_per_s": self.offline_tokens_per_s,
            "ceiling_ratio": self.summary.ceiling.ratio,
            **self.result.to_dict(),
            "summary": self.summary.to_dict(with_host=False),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """All scenarios on one workload, in the order asked for.

    sweeps  every setting tried for ``priority-tuned`` and ``hygen-throttled``, by scenario and by
            setting
    """

    rows: Mapping[str, Row]
    sweeps: Mapping[str, Mapping[str, Row]]


def known_scenario(name: str) -> str:
    """The same name. ConfigError unless `run_suite` knows it."""
    if name != TUNED:
        scenario(name, also=(TUNED,))
    return name


def num_runs(base: RunSpec, names: Sequence[str]) -> tuple[int, bool]:
    """How many simulations `run_suite` makes, and whether that is an estimate."""
    is_searched = THROTTLED in names and needs_a_rate(base)
    plain = [name for name in names if name not in (TUNED, THROTTLED)]
    count = len(set(_simulated_as(plain).values()))
    if TUNED in names:
        count += len(tuned_candidates(base)) + 1
    if THROTTLED in names:
        count += 1 + NUM_TRIED if is_searched else 1
    if is_searched and CEILING in names:
        count -= 1
    return count, is_searched


def run_suite(
    base: RunSpec,
    names: Sequence[str],
    *,
    num_jobs: int,
    quiet: bool = False,
    label: str = "",
    store: ResultStore | None = None,
    on_run: Callable[[str, RunResult], None] | None = None,
) -> SuiteResult:
    """Run scenarios that differ from `base` in the scenario alone.

    ``priority-tuned`` is a sweep over stock settings, of which the best is shown
    (`cosched.benchmark.tuned`); so is ``hygen-throttled`` over rates, unless `base` gives one
    (`cosched.benchmark.throttled`). What is the same run under two names is simulated once.
    ConfigError names an unknown scenario.
    """
    for name in names:
        known_scenario(name)
    if on_run is None:
        total, is_estimate = num_runs(base, names)
        with progress_of_runs(label, total=total, is_estimate=is_estimate, quiet=quiet) as on_run:
            return run_suite(base, names, num_jobs=num_jobs, store=store, on_run=on_run)
    is_searched = THROTTLED in names and needs_a_rate(base)
    swept = {TUNED, THROTTLED} if is_searched else {TUNED}
    specs = {name: _spec(base, name) for name in names if name not in swept}
    candidates = tuned_candidates(base) if TUNED in names else {}
    ceilings = {CEILING: _spec(base, CEILING)} if is_searched else {}

    def execute(runs: Mapping[str, RunSpec]) -> dict[str, RunResult]:
        return _execute(runs, num_jobs=num_jobs, store=store, on_run=on_run)

    simulated_as = _simulated_as(list(specs))
    once = {name: specs[name] for name in simulated_as.values()}
    results = execute({**once, **candidates, **ceilings})
    for name, other in simulated_as.items():
        results[name] = replace(results[other], spec=specs[name])
    ceiling = max(
        (_offline_rate(results[name]) for name in OFFLINE_ONLY if name in results), default=None
    )
    s0 = results.get("s0")

    def row(name: str, result: RunResult) -> Row:
        summary = summarize_run(
            result.spec,
            result.records,
            result.iterations,
            end_s=result.end_s,
            ceiling_tokens_per_s=ceiling,
        )
        baseline = None
        if s0 is not None and result.spec.scenario.has_online:
            baseline = summarize_run(s0.spec, s0.records, s0.iterations, end_s=result.end_s)
        return Row(name=name, result=result, summary=summary, baseline=baseline)

    rows = {name: row(name, results[name]) for name in specs}
    sweeps: dict[str, dict[str, Row]] = {}
    if candidates:
        sweep = {name: row(name, results[name]) for name in candidates}
        more = other_order(candidates[_best(sweep)])
        for name, result in execute(more).items():
            sweep[name] = row(name, result)
        best = _best(sweep)
        rows[TUNED] = replace(sweep[best], name=f"{TUNED} ({best})")
        sweeps[TUNED] = sweep
    if is_searched:
        tried, best = sweep_rates(
            base,
            highest=highest_rate(results[CEILING]),
            num_jobs=num_jobs,
            store=store,
            on_run=on_run,
        )
        sweep = {name: row(name, result) for name, result in tried.items()}
        rows[THROTTLED] = replace(sweep[best], name=f"{THROTTLED} ({best})")
        sweeps[THROTTLED] = sweep
    return SuiteResult(rows={name: rows[name] for name in names}, sweeps=sweeps)


def _best(sweep: Mapping[str, Row]) -> str:
    return choose_tuned(
        {
            name: (row.attainment, row.baseline_attainment, row.offline_tokens_per_s)
            for name, row in sweep.items()
        }
    )


def _spec(base: RunSpec, name: str) -> RunSpec:
    return replace(base, scenario=scenario(name))


def _simulated_as(names: Sequence[str]) -> dict[str, str]:
    """Each name -> the first of them that is the same run under another name, or itself."""
    return {
        name: next(other for other in names if runs_as(scenario(other), scenario(name)))
        for name in names
    }


def _offline_rate(result: RunResult) -> float:
    return result.summary.offline.tokens_per_s or 0.0


def _execute(
    specs: Mapping[str, RunSpec],
    *,
    num_jobs: int,
    store: ResultStore | None,
    on_run: Callable[[str, RunResult], None],
) -> dict[str, RunResult]:
    names = list(specs)
    results: dict[str, RunResult] = {}
    for index, result in execute_all([specs[n] for n in names], num_jobs=num_jobs, store=store):
        results[names[index]] = result
        on_run(names[index], result)
    return results
