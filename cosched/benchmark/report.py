"""Tables and pictures of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cosched.benchmark.suite import Row, SuiteResult
from cosched.metrics.interval import interval_of
from cosched.metrics.plots_compare import Run, write_comparison_plots
from cosched.metrics.table import markdown_rows, shown

__all__ = ["attainment_cell", "bound_cells", "job_cells", "markdown_table", "write_plots"]

_HEADERS = (
    "scenario",
    "both met %",
    "s0 in that window %",
    "job done s",
    "mean completion s",
    "p95 completion s",
    "work/s",
    "of bound %",
    "TTFT p50 / p99 / of late p99 s",
    "TPOT p50 / p99 ms",
    "online hit %",
    "offline hit %",
    "offline tok/s: computed prompt / cached prompt / output",
    "% of ceiling",
    "stopped",
)


WITHIN = 0.01
"""Of the best attainment, where a scenario counts as keeping the targets."""


def markdown_table(
    rows: Mapping[str, Row], seeds: Mapping[str, Sequence[Row]] | None = None
) -> str:
    """The comparison as a Markdown table. seeds: the same rows with each seed; what they come to in
    the mean, and its 95 % interval, then takes the place of the first one's attainment, completion
    and work."""
    over = {name: [row] if seeds is None else seeds[name] for name, row in rows.items()}
    cells = [_cells(row, over[name]) for name, row in rows.items()]
    bound = bound_cells(over)
    if bound is not None:
        cells.append(["bound", "", "", *bound] + [""] * (len(_HEADERS) - len(bound) - 3))
    return markdown_rows(_HEADERS, cells)


def bound_cells(over: Mapping[str, Sequence[Row]]) -> list[str] | None:
    """`job_cells` of the best that any schedule could do that keeps the targets: the highest bound
    beside what the scenarios did for online requests. None where none has both classes."""
    beside = [
        seeds
        for seeds in over.values()
        if seeds[0].attainment is not None and seeds[0].summary.job.bound_per_s is not None
    ]
    if not beside:
        return None
    best = max(seeds[0].attainment or 0.0 for seeds in beside)
    kept = [seeds for seeds in beside if (seeds[0].attainment or 0.0) >= best - WITHIN]
    jobs = max(
        ([one.summary.job for one in seeds] for seeds in kept),
        key=lambda jobs: jobs[0].bound_per_s or 0.0,
    )
    least_s = _over([one.least_makespan_s for one in jobs], 0)
    return [
        "" if least_s == "-" else f"≥ {least_s}",
        "",
        "",
        _over([one.bound_per_s for one in jobs], 3),
        "100",
    ]


def _over(values: Sequence[float | None], digits: int, scale: float = 1.0) -> str:
    interval = interval_of(values)
    if interval is None:
        return "-"
    shown = f"{scale * interval.mean:,.{digits}f}"
    if interval.half_width is None:
        return shown
    return f"{shown} ± {scale * interval.half_width:,.{digits}f}"


def job_cells(seeds: Sequence[Row]) -> list[str]:
    """When a job was done, the mean and the 95th percentile of its lines, work per second, and that
    as a percentage of its bound."""
    job = [one.summary.job for one in seeds]
    done = _over([one.makespan_s for one in job], 0)
    for row, one in zip(seeds, job, strict=True):
        if one.makespan_s is None:
            done = f"> {row.result.end_s:.0f} ({one.num_finished} of {one.num_lines} lines)"
    return [
        done,
        _over([one.completion_mean_s for one in job], 0),
        _over([one.completion_p95_s for one in job], 0),
        _over([one.work_per_s for one in job], 3),
        _over([one.bound_ratio for one in job], 1, 100),
    ]


def attainment_cell(seeds: Sequence[Row]) -> str:
    """Online requests that met both targets [%]."""
    return _over([one.attainment for one in seeds], 1, 100)


def _cells(row: Row, seeds: Sequence[Row]) -> list[str]:
    online, offline = row.summary.online, row.summary.offline
    has_online = row.result.spec.scenario.has_online
    has_offline = row.result.spec.scenario.has_offline
    ttft, tpot = online.ttft_s, online.tpot_s
    met = [attainment_cell(seeds), shown(row.baseline_attainment, ".1f", 100)]
    latency = [
        f"{shown(ttft.p50, '.2f')} / {shown(ttft.p99, '.2f')}"
        f" / {shown(online.missed_ttft_s.p99, '.1f')}",
        f"{shown(tpot.p50, '.1f', 1e3)} / {shown(tpot.p99, '.1f', 1e3)}",
        shown(online.hit_ratio, ".1f", 100),
    ]
    job = job_cells(seeds)
    tokens = (offline.prompt_tokens_per_s, offline.cached_tokens_per_s, offline.output_tokens_per_s)
    of_offline = [
        shown(offline.hit_ratio, ".1f", 100),
        " / ".join(shown(rate, ",.0f") for rate in tokens),
        shown(row.summary.ceiling.ratio, ".1f", 100),
    ]
    stopped = f"{offline.num_preemptions}" if has_offline and has_online else ""
    return [
        f"{row.name}{', gave up' if row.gave_up else ''}",
        *(met if has_online else [""] * len(met)),
        *(job if has_offline else [""] * len(job)),
        *(latency if has_online else [""] * len(latency)),
        *(of_offline if has_offline else [""] * len(of_offline)),
        stopped,
    ]


def write_plots(folder: Path, suite: SuiteResult) -> None:
    """Trade-off, bars, distributions and SLO curves of the scenarios with online requests."""
    rows = {n: row for n, row in suite.rows.items() if row.result.spec.scenario.has_online}
    write_comparison_plots(
        folder,
        summaries={row.name: row.summary for row in rows.values()},
        runs={
            row.name: Run(
                records=row.result.records,
                observed_until_s=row.result.end_s,
                iterations=row.result.iterations,
            )
            for row in rows.values()
        },
        default_slo=next(iter(rows.values())).result.spec.slo,
    )
