"""Tables and pictures of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cosched.benchmark.suite import Row, SuiteResult
from cosched.metrics.interval import interval_of
from cosched.metrics.plots_compare import Run, write_comparison_plots
from cosched.metrics.table import markdown_rows, shown

__all__ = ["markdown_table", "write_plots"]

_HEADERS = (
    "scenario",
    "TTFT met %",
    "TPOT met %",
    "both met %",
    "s0 in that window %",
    "TTFT p50 / p99 s",
    "TPOT p50 / p99 ms",
    "online hit %",
    "job done s",
    "mean completion s",
    "work/s",
    "offline tok/s",
    "% of ceiling",
    "offline hit %",
    "stopped",
    "ended at s",
)


def markdown_table(
    rows: Mapping[str, Row], seeds: Mapping[str, Sequence[Row]] | None = None
) -> str:
    """The comparison as a Markdown table. seeds: the same rows with each seed; what they come to in
    the mean, and its 95 % interval, then takes the place of the first one's attainment and offline
    throughput."""
    return markdown_rows(
        _HEADERS,
        (_cells(row, [row] if seeds is None else seeds[name]) for name, row in rows.items()),
    )


def _over(values: Sequence[float | None], digits: int, scale: float = 1.0) -> str:
    interval = interval_of(values)
    if interval is None:
        return "-"
    shown = f"{scale * interval.mean:,.{digits}f}"
    if interval.half_width is None:
        return shown
    return f"{shown} ± {scale * interval.half_width:,.{digits}f}"


def _cells(row: Row, seeds: Sequence[Row]) -> list[str]:
    online, offline = row.summary.online, row.summary.offline
    has_online = row.result.spec.scenario.has_online
    has_offline = row.result.spec.scenario.has_offline
    met, ttft, tpot = online.attainment, online.ttft_s, online.tpot_s
    of_online = [
        shown(met.ttft.ratio, ".1f", 100),
        shown(met.tpot.ratio, ".1f", 100),
        _over([one.attainment for one in seeds], 1, 100),
        shown(row.baseline_attainment, ".1f", 100),
        f"{shown(ttft.p50, '.2f')} / {shown(ttft.p99, '.2f')}",
        f"{shown(tpot.p50, '.1f', 1e3)} / {shown(tpot.p99, '.1f', 1e3)}",
        shown(online.hit_ratio, ".1f", 100),
    ]
    job = [one.summary.job for one in seeds]
    of_offline = [
        _over([one.makespan_s for one in job], 0),
        _over([one.completion_mean_s for one in job], 0),
        _over([one.work_per_s for one in job], 3),
        _over([one.offline_tokens_per_s or 0.0 for one in seeds], 0),
        shown(row.summary.ceiling.ratio, ".1f", 100),
        shown(offline.hit_ratio, ".1f", 100),
    ]
    return [
        row.name,
        *(of_online if has_online else [""] * len(of_online)),
        *(of_offline if has_offline else [""] * len(of_offline)),
        f"{offline.num_preemptions}" if has_offline and has_online else "",
        f"{row.result.end_s:.0f}{', gave up' if row.gave_up else ''}",
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
