"""Tables and pictures of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cosched.benchmark.suite import Row, SuiteResult
from cosched.metrics.interval import interval_of
from cosched.metrics.plots_compare import Run, write_comparison_plots

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
    lines = ["| " + " | ".join(_HEADERS) + " |", "|---" * len(_HEADERS) + "|"]
    for name, row in rows.items():
        some = [row] if seeds is None else seeds[name]
        lines.append("| " + " | ".join(_cells(row, some)) + " |")
    return "\n".join(lines) + "\n"


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
    attainment = online.attainment
    return [
        row.name,
        _percent(attainment.ttft.ratio) if has_online else "",
        _percent(attainment.tpot.ratio) if has_online else "",
        _over([one.attainment for one in seeds], 1, 100) if has_online else "",
        _percent(row.baseline_attainment) if has_online else "",
        f"{_number(online.ttft_s.p50, 2)} / {_number(online.ttft_s.p99, 2)}" if has_online else "",
        f"{_number(online.tpot_s.p50, 1, 1e3)} / {_number(online.tpot_s.p99, 1, 1e3)}"
        if has_online
        else "",
        _percent(online.hit_ratio) if has_online else "",
        _over([one.offline_tokens_per_s or 0.0 for one in seeds], 0) if has_offline else "",
        _percent(row.summary.ceiling.ratio) if has_offline else "",
        _percent(offline.hit_ratio) if has_offline else "",
        f"{offline.num_preemptions}" if has_offline and has_online else "",
        f"{row.result.end_s:.0f}{', gave up' if row.gave_up else ''}",
    ]


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.1f}"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


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
