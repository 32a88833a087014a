"""Scenarios on one workload, in virtual time, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cosched.benchmark.progress import progress_of_runs
from cosched.benchmark.tuned import (
    CEILING,
    TUNINGS,
    Setting,
    Tuning,
    best_of,
    highest_rate,
    is_searched,
    most_misses,
    tune,
)
from cosched.errors import ConfigError
from cosched.metrics.interval import interval_of
from cosched.metrics.summary import Summary
from cosched.simulation.orders import SENT
from cosched.simulation.parallel import execute_named
from cosched.simulation.run import RunResult, RunSpec, summarize_run
from cosched.simulation.scenario import SCENARIOS, Scenario, runs_as, scenario
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

CLAIRVOYANT = "offline-clairvoyant"

OFFLINE_ONLY = tuple(name for name, entry in SCENARIOS.items() if not entry.has_online)

_BASELINES = ("s0", *OFFLINE_ONLY, "s1", "priority", "cap", "aimd", *TUNINGS)

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

    @property
    def gave_up(self) -> bool:
        return self.result.gave_up

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

    rows    of the first seed
    sweeps  every setting tried for those of `TUNINGS` and for `CLAIRVOYANT`, by scenario and by
            setting; with that seed
    seeds   every scenario's rows, one per seed; of offline requests alone, which are there as a
            ceiling, the first seed's only
    """

    rows: Mapping[str, Row]
    sweeps: Mapping[str, Mapping[str, Row]]
    seeds: Mapping[str, tuple[Row, ...]]

    def to_dict(self) -> dict[str, Any]:
        """Row by row, with what it came to over all seeds."""
        return {
            name: row.to_dict()
            | {
                "over_seeds": {
                    "attainment": _described([one.attainment for one in self.seeds[name]]),
                    "offline_tokens_per_s": _described(
                        [one.offline_tokens_per_s for one in self.seeds[name]]
                    ),
                    **{
                        key: _described([getattr(one.summary.job, key) for one in self.seeds[name]])
                        for key in ("makespan_s", "completion_mean_s", "work_per_s", "bound_ratio")
                    },
                }
            }
            for name, row in self.rows.items()
        }


def _described(values: Sequence[float | None]) -> dict[str, Any]:
    interval = interval_of(values)
    return {"values": list(values), **(asdict(interval) if interval else {})}


def known_scenario(name: str) -> str:
    """The same name. ConfigError unless `run_suite` knows it."""
    if name not in TUNINGS:
        scenario(name, also=TUNINGS)
    return name


def num_runs(base: RunSpec, names: Sequence[str], *, num_seeds: int = 1) -> tuple[int, bool]:
    """How many simulations `run_suite` makes, and whether that is an estimate."""
    searched = [name for name in names if is_searched(name, base)]
    plain = [name for name in names if name not in searched]
    if searched:
        plain += ["s0", CEILING]
    count = sum(TUNINGS[name].num_runs for name in searched) + len({*_simulated_as(plain).values()})
    count += len(_sent_otherwise(plain))
    return count + (num_seeds - 1) * len({"s0", *_beside_online(names)}), bool(searched)


def run_suite(
    base: RunSpec,
    names: Sequence[str],
    *,
    num_jobs: int,
    num_seeds: int = 1,
    quiet: bool = False,
    label: str = "",
    store: ResultStore | None = None,
    on_run: Callable[[str, RunResult], None] | None = None,
) -> SuiteResult:
    """Run scenarios that differ from `base` in the scenario alone.

    Those of `TUNINGS` are searches, of which the best setting is shown; so is ``hygen-throttled``,
    unless `base` gives a rate. They search with the seed of `base`, and keep what they found with
    the seeds after it. `CLAIRVOYANT` is the best of several orders and of all others that run
    offline requests alone: no order shown is above it. What is the same run under two names is
    simulated once. ConfigError names an unknown scenario.
    """
    for name in names:
        known_scenario(name)
        if name not in SCENARIOS and name in TUNINGS and not is_searched(name, base):
            raise ConfigError(f"{name} needs both classes: name --online and --offline")
    if on_run is None:
        total, is_estimate = num_runs(base, names, num_seeds=num_seeds)
        with progress_of_runs(label, total=total, is_estimate=is_estimate, quiet=quiet) as on_run:
            return run_suite(
                base, names, num_jobs=num_jobs, num_seeds=num_seeds, store=store, on_run=on_run
            )

    def execute(runs: Mapping[str, RunSpec]) -> dict[str, RunResult]:
        return execute_named(runs, num_jobs=num_jobs, store=store, on_run=on_run)

    rows, sweeps, found = _run_seed(base, names, {}, execute, num_at_once=num_jobs)
    seeds = {name: [row] for name, row in rows.items()}
    for seed in range(base.seed + 1, base.seed + num_seeds):
        more, _, _ = _run_seed(
            replace(base, seed=seed),
            _beside_online(names),
            found,
            execute,
            num_at_once=num_jobs,
        )
        for name, row in more.items():
            seeds[name].append(row)
    return SuiteResult(
        rows=rows, sweeps=sweeps, seeds={name: tuple(some) for name, some in seeds.items()}
    )


def _beside_online(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in OFFLINE_ONLY]


def _run_seed(
    base: RunSpec,
    names: Sequence[str],
    found: Mapping[str, Setting],
    execute: Callable[[Mapping[str, RunSpec]], Mapping[str, RunResult]],
    *,
    num_at_once: int,
) -> tuple[dict[str, Row], dict[str, dict[str, Row]], dict[str, Setting]]:
    """Rows, sweeps and what the searches found. found: by an earlier seed."""
    searched = [name for name in names if name not in found and is_searched(name, base)]
    plain = [name for name in names if name not in found and name not in searched]
    plain += [] if not searched else ["s0", CEILING]
    plain += ["s0"] if found else []
    simulated_as = _simulated_as(plain)
    specs = {name: replace(base, scenario=scenario(name)) for name in simulated_as}
    tuned = {name: TUNINGS[name].spec(base, setting) for name, setting in found.items()}
    orders = {name: replace(base, scenario=entry) for name, entry in _sent_otherwise(plain).items()}
    results = dict(execute({name: specs[name] for name in simulated_as.values()} | orders | tuned))
    for name, other in simulated_as.items():
        results[name] = replace(results[other], spec=specs[name])
    as_clairvoyant = {name: results[name] for name in (*OFFLINE_ONLY, *orders) if name in results}
    ceiling = max(map(_offline_rate, as_clairvoyant.values()), default=None)
    s0 = results.get("s0")

    def row(name: str, result: RunResult) -> Row:
        summary = summarize_run(
            result.spec,
            result.records,
            result.iterations,
            end_s=result.end_s,
            ceiling_tokens_per_s=ceiling,
        )
        summary = replace(summary, job=result.summary.job)
        baseline = None
        if s0 is not None and result.spec.scenario.has_online:
            baseline = summarize_run(s0.spec, s0.records, s0.iterations, end_s=result.end_s)
        return Row(name=name, result=result, summary=summary, baseline=baseline)

    rows = {name: row(name, result) for name, result in results.items()}
    settings = dict(found)
    sweeps: dict[str, dict[str, Row]] = {}
    if orders:
        tried = {name: row(name, result) for name, result in as_clairvoyant.items()}
        best = max(tried, key=lambda name: _offline_rate(tried[name].result))
        shown = best.removeprefix(CLAIRVOYANT).strip() or "arrival"
        rows[CLAIRVOYANT] = replace(tried[best], name=f"{CLAIRVOYANT} ({shown})")
        sweeps[CLAIRVOYANT] = tried
    for name in searched:
        tuning = TUNINGS[name]

        def run(
            settings: Sequence[Setting],
            may_give_up: bool,
            name: str = name,
            tuning: Tuning = tuning,
        ) -> list[Row]:
            misses = most_misses(results["s0"]) if may_give_up else None
            specs = {str(setting): tuning.spec(base, setting) for setting in settings}
            ran = execute(
                {f"{name} {s}": replace(spec, most_misses=misses) for s, spec in specs.items()}
            )
            return [row(s, replace(ran[f"{name} {s}"], spec=spec)) for s, spec in specs.items()]

        amounts = tuning.amounts(base, highest_rate(results[CEILING]))
        swept = tune(tuning, amounts, run, num_at_once=num_at_once)
        settings[name] = chosen = best_of(swept)
        rows[name] = replace(swept[chosen], name=f"{name} ({chosen})")
        sweeps[name] = {str(setting): swept[setting] for setting in swept}
    return {name: rows[name] for name in names}, sweeps, settings


def _sent_otherwise(names: Sequence[str]) -> dict[str, Scenario]:
    """What is run for `CLAIRVOYANT` beside the order of arrival."""
    if CLAIRVOYANT not in names:
        return {}
    return {f"{CLAIRVOYANT} {sent}": replace(scenario(CLAIRVOYANT), sent=sent) for sent in SENT}


def _simulated_as(names: Sequence[str]) -> dict[str, str]:
    """Each name -> the first of them that is the same run under another name, or itself."""
    return {
        name: next(other for other in names if runs_as(scenario(other), scenario(name)))
        for name in names
    }


def _offline_rate(result: RunResult) -> float:
    return result.summary.offline.tokens_per_s or 0.0
