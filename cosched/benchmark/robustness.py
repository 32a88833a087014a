"""A policy against an ever worse predictor (HyGen §5.4, impact of predictor accuracy), and on a GPU
that becomes slower while it works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cosched.benchmark.progress import progress_of_runs
from cosched.errors import ConfigError
from cosched.metrics.plots_sweep import Panel, plot_panels
from cosched.metrics.summary import Summary
from cosched.metrics.table import markdown_rows, shown
from cosched.policy.registry import POLICIES, policy_entry
from cosched.simulation.parallel import execute_named
from cosched.simulation.run import RunSpec
from cosched.simulation.scenario import scenario
from cosched.simulation.store import ResultStore

__all__ = [
    "ERRORS",
    "Robustness",
    "plot_robustness",
    "print_robustness",
    "rows_of",
    "run_robustness",
]

ERRORS = (0.0, 0.05, 0.1, 0.2, 0.5)
"""Standard deviations of the factor on a plan's predictions (`cosched.latency.wrong`)."""


class Trouble(NamedTuple):
    """error   of the predictions
    slower  times as long iterations take once the GPU has worked for a while; 1: as before"""

    error: float = 0.0
    slower: float = 1.0


Robustness = Mapping[str, Mapping[Trouble, Summary]]
"""policy -> trouble -> what the run came to. `s0` is there too, without an error."""


def run_robustness(
    base: RunSpec,
    policies: Sequence[str],
    errors: Sequence[float],
    *,
    num_jobs: int,
    quiet: bool,
    store: ResultStore | None,
) -> Robustness:
    """Run every policy with every error and, where `base` has a GPU that becomes slower, on that
    without one. ConfigError where a policy does not predict."""
    for name in policies:
        if not policy_entry(name).timed:
            timed = ", ".join(entry.name for entry in POLICIES.values() if entry.timed)
            raise ConfigError(f"policy {name!r} predicts nothing; choose from {timed}")
    gpus = dict.fromkeys((1.0, base.cost.slower))
    runs: dict[tuple[str, Trouble], RunSpec] = {}
    for slower in gpus:
        on_gpu = replace(base, cost=replace(base.cost, slower=slower))
        runs["s0", Trouble(slower=slower)] = replace(on_gpu, scenario=scenario("s0"))
        for name in policies:
            for error in errors if slower == 1 else (0.0,):
                spec = on_gpu.configured(predictor_error=error) if error else on_gpu
                runs[name, Trouble(error, slower)] = replace(spec, scenario=scenario(name))
    with progress_of_runs("runs", total=len(runs), quiet=quiet) as on_run:
        results = execute_named(
            runs,
            num_jobs=num_jobs,
            store=store,
            on_run=lambda of, result: on_run(
                f"{of[0]} {of[1].error:.0%} x{of[1].slower:g}", result
            ),
        )
    summaries: dict[str, dict[Trouble, Summary]] = {name: {} for name in ("s0", *policies)}
    for (name, trouble), result in sorted(results.items(), key=lambda run: run[0][1][::-1]):
        summaries[name][trouble] = result.summary
    return summaries


_COLUMNS = (
    ("both met %", "attainment", 100.0, ".1f"),
    ("TTFT p99 ms", "p99_ttft_s", 1e3, ".0f"),
    ("TPOT p99 ms", "p99_tpot_s", 1e3, ".1f"),
    ("TBT p99 ms", "p99_tbt_s", 1e3, ".1f"),
    ("offline tok/s", "offline_tokens_per_s", 1.0, ",.0f"),
)


def _row_of(summary: Summary) -> dict[str, float | None]:
    online = summary.online
    return {
        "attainment": online.attainment.joint.ratio,
        "p99_ttft_s": online.ttft_s.p99,
        "p99_tpot_s": online.tpot_s.p99,
        "p99_tbt_s": online.tbt_s.p99,
        "offline_tokens_per_s": summary.offline.tokens_per_s,
    }


def rows_of(robustness: Robustness) -> list[dict[str, Any]]:
    """One row per policy and trouble."""
    return [
        {"policy": name, "predictor_error": error, "slower": slower, **_row_of(summary)}
        for name, found in robustness.items()
        for (error, slower), summary in found.items()
    ]


def print_robustness(robustness: Robustness) -> None:
    headers = ["policy", "error %", "GPU slower", *(title for title, *_ in _COLUMNS)]
    rows = (
        [
            row["policy"],
            f"{row['predictor_error']:.0%}",
            f"{row['slower']:g}x",
            *(shown(row[key], form, scale) for _, key, scale, form in _COLUMNS),
        ]
        for row in rows_of(robustness)
    )
    print(markdown_rows(headers, rows), end="")


def plot_robustness(robustness: Robustness, path: Path) -> Path:
    """Attainment and offline throughput against the error."""
    alone = robustness["s0"][Trouble()].online.attainment.joint.ratio
    policies = {
        name: {error: summary for (error, slower), summary in found.items() if slower == 1}
        for name, found in robustness.items()
        if name != "s0"
    }
    most = 100 * max((error for by_error in policies.values() for error in by_error), default=0.0)

    def lines(key: str, scale: float) -> dict[str, list[tuple[float, float | None]]]:
        return {
            name: [
                (100 * error, None if (y := _row_of(summary)[key]) is None else scale * y)
                for error, summary in by_error.items()
            ]
            for name, by_error in policies.items()
        }

    x = "standard deviation of the error of a prediction [%]"
    met = Panel(
        title="Online requests that meet their SLOs",
        x=x,
        y="attainment [%]",
        lines=lines("attainment", 100),
        references={} if alone is None else {"s0": [(0, 100 * alone), (most, 100 * alone)]},
    )
    served = Panel(
        title="Offline work", x=x, y="offline tokens/s", lines=lines("offline_tokens_per_s", 1)
    )
    return plot_panels([[met, served]], path)
