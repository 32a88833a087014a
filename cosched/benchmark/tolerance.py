"""Offline work for a tolerance (HyGen §5.2, Fig. 3 and 4): for each share by which a latency of the
online requests may grow, the largest latency budget of `hygen` and the largest offline rate of
`hygen-throttled` that stay within it, and what each then serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cosched.benchmark.progress import progress_of_runs
from cosched.benchmark.tuned import CEILING, highest_rate
from cosched.metrics.goals import Goal, parse_goal
from cosched.metrics.plots_sweep import Panel, plot_panels
from cosched.metrics.table import markdown_rows, shown
from cosched.simulation.parallel import execute_named
from cosched.simulation.run import RunResult, RunSpec
from cosched.simulation.scenario import scenario
from cosched.simulation.slo_search import SEARCHES, find_largest
from cosched.simulation.store import ResultStore

__all__ = [
    "METRICS",
    "TOLERANCES",
    "Found",
    "ToleranceSweep",
    "plot_tolerances",
    "print_tolerances",
    "sweep_tolerances",
]

METRICS = ("p99_tbt", "mean_tbt")

TOLERANCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)

UNAWARE = "sarathi"
"""The policy that knows no SLO: HyGen's Sarathi++."""

RATE_SPAN = 100.0
"""The highest offline rate that is searched over the lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a policy reaches within a tolerance. From `value` on None when no value of its parameter
    keeps it.

    tolerance     by which the metric may be above that of the online requests alone; None: the
                  policy knows of none
    key, value    the parameter of `Config`
    interference  by which the metric was above
    """

    policy: str
    metric: str
    tolerance: float | None = None
    key: str | None = None
    value: float | None = None
    interference: float | None = None
    attainment: float | None = None
    offline_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToleranceSweep:
    """alone  what online requests alone reach of each metric [s]"""

    alone: Mapping[str, float | None]
    alone_tokens_per_s: float | None
    unaware: tuple[Found, ...]
    found: tuple[Found, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep_tolerances(
    base: RunSpec,
    metrics: Sequence[str],
    tolerances: Sequence[float],
    *,
    precision: float,
    num_jobs: int,
    quiet: bool,
    store: ResultStore,
) -> ToleranceSweep:
    """Search both parameters for every metric and tolerance. Searches share runs through `store`.

    metrics    as in a goal: p99_tbt, mean_ttft, ...
    precision  relative, of the values found
    """
    goals = {m: [parse_goal(f"{m}<=+{100 * t:g}%") for t in tolerances] for m in metrics}
    names = ("s0", CEILING, UNAWARE)
    specs = {name: replace(base, scenario=scenario(name)) for name in names}
    found = []
    shown: set[str] = set()
    with progress_of_runs("runs", total=None, quiet=quiet) as on_run:
        fixed = execute_named(specs, num_jobs=num_jobs, store=store, on_run=on_run)
        alone = {m: goals[m][0].measure(fixed["s0"].summary, fixed["s0"].records) for m in metrics}
        for search, (low, high) in _ranges(fixed[CEILING]).items():
            wanted = SEARCHES[search]
            for metric, goal in ((m, goal) for m in metrics for goal in goals[m]):
                runs: dict[str, RunResult] = {}

                def note(name: str, result: RunResult, runs: dict[str, RunResult] = runs) -> None:
                    runs[name] = result
                    title = f"{result.spec.scenario.name} {name}"
                    if title not in shown:  # searches share runs
                        shown.add(title)
                        on_run(title, result)

                answer = find_largest(
                    search,
                    replace(base, scenario=scenario(wanted.policy)),
                    [goal],
                    low=low,
                    high=high,
                    tolerance=precision,
                    num_jobs=num_jobs,
                    store=store,
                    on_run=note,
                )
                one = Found(
                    policy=wanted.policy,
                    metric=metric,
                    tolerance=goal.limit,
                    key=wanted.key,
                    value=answer.value,
                )
                if answer.value is not None:
                    one = _measured(one, goal, runs[wanted.say(answer.value)], alone[metric])
                found.append(one)
    return ToleranceSweep(
        alone=alone,
        alone_tokens_per_s=fixed["s0"].summary.online.tokens_per_s,
        unaware=tuple(
            _measured(Found(policy=UNAWARE, metric=m), goals[m][0], fixed[UNAWARE], alone[m])
            for m in metrics
        ),
        found=tuple(found),
    )


def _ranges(ceiling: RunResult) -> dict[str, tuple[float | None, float | None]]:
    """search -> where; None: where the search looks by itself."""
    highest = highest_rate(ceiling)
    return {"budget": (None, None), "offline-rate": (highest / RATE_SPAN, highest)}


def _measured(found: Found, goal: Goal, result: RunResult, alone: float | None) -> Found:
    reached = goal.measure(result.summary, result.records)
    online, offline = result.summary.online, result.summary.offline
    return replace(
        found,
        interference=reached / alone - 1 if reached and alone else None,
        attainment=online.attainment.joint.ratio,
        offline_tokens_per_s=offline.tokens_per_s,
        total_tokens_per_s=(online.tokens_per_s or 0.0) + (offline.tokens_per_s or 0.0),
    )


def print_tolerances(sweep: ToleranceSweep) -> None:
    for metric, seconds in sweep.alone.items():
        said = "nothing" if seconds is None else f"{1e3 * seconds:.1f} ms"
        print(f"{metric} of the online requests alone: {said}")
    headers = ("metric", "tolerance", "policy", "found", "reached", "both met %", "offline tok/s")
    rows = (
        (
            found.metric,
            shown(found.tolerance, "+.0%"),
            found.policy,
            "-" if found.value is None else f"{found.key} {found.value:g}",
            shown(found.interference, "+.1%"),
            shown(found.attainment, ".1f", 100),
            shown(found.offline_tokens_per_s, ",.0f"),
            shown(found.total_tokens_per_s, ",.0f"),
        )
        for found in (*sweep.found, *sweep.unaware)
    )
    print("\n" + markdown_rows((*headers, "all tok/s"), rows), end="")


def _title(metric: str) -> str:
    statistic, _, name = metric.partition("_")
    return f"{statistic} of online {name.upper()}"


def plot_tolerances(sweep: ToleranceSweep, path: Path) -> Path:
    """Reached interference and offline throughput against the tolerance, a column per metric."""
    most = 100 * max(found.tolerance or 0.0 for found in sweep.found)

    def lines(metric: str, attribute: str, scale: float) -> dict[str, list[tuple[float, Any]]]:
        drawn: dict[str, list[tuple[float, Any]]] = {}
        for found in sweep.found:
            if found.metric == metric:
                y = getattr(found, attribute)
                point = (100 * (found.tolerance or 0.0), None if y is None else scale * y)
                drawn.setdefault(found.policy, []).append(point)
        return drawn

    interference = [
        Panel(
            title=_title(metric),
            x="tolerance [%]",
            y="growth reached [%]",
            lines=lines(metric, "interference", 100),
            references={"tolerance": [(0, 0), (most, most)]},
        )
        for metric in sweep.alone
    ]
    throughput = [
        Panel(
            title="Offline work",
            x="tolerance [%]",
            y="offline tokens/s",
            lines=lines(metric, "offline_tokens_per_s", 1),
            references={
                f"{one.policy} ({one.interference or 0.0:+.0%})": [
                    (0, one.offline_tokens_per_s or 0.0),
                    (most, one.offline_tokens_per_s or 0.0),
                ]
                for one in sweep.unaware
                if one.metric == metric
            },
        )
        for metric in sweep.alone
    ]
    return plot_panels([interference, throughput], path)
