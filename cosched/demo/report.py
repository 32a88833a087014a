"""What the demo prints: a table for people, and last one line of JSON for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from cosched.config import SloConfig
from cosched.demo.records import (
    OfflineSummary,
    OnlineSummary,
    summarize_offline,
    summarize_online,
)
from cosched.demo.scenario import ONLINE_ONLY, Load, Measured
from cosched.versions import versions

__all__ = ["Result", "json_entry", "notes", "result_of", "results_table"]

_LATE_SHARE = 0.5

# Load average per core. The server that was just started makes some load of its own.
_BUSY_LOAD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One scenario in numbers. `offline` is None where no job ran."""

    name: str
    policy: str
    online: OnlineSummary
    offline: OfflineSummary | None
    server_start_s: float
    load_average: float
    slo_ttft_ms: float

    @property
    def is_client_late(self) -> bool:
        """Whether the numbers say more of a client that did not get the processor than of the
        server: it was later, once, than half of the TTFT target."""
        return self.online.max_client_delay_ms > _LATE_SHARE * self.slo_ttft_ms

    def latencies(self) -> dict[str, float | None]:
        """The four numbers that the table shows and that scenarios are compared by."""
        ttft, tpot = self.online.ttft_ms, self.online.tpot_ms
        return {
            "ttft_p50_ms": ttft.p50 if ttft else None,
            "ttft_p99_ms": ttft.p99 if ttft else None,
            "tpot_p50_ms": tpot.p50 if tpot else None,
            "tpot_p99_ms": tpot.p99 if tpot else None,
        }


def result_of(measured: Measured, load: Load, slo: SloConfig) -> Result:
    scenario = measured.scenario
    offline = None
    if scenario.has_offline:
        offline = summarize_offline(
            measured.offline, num_prompts=len(load.job), window_s=load.spec.seconds
        )
    return Result(
        name=scenario.name,
        policy=scenario.policy,
        online=summarize_online(measured.online),
        offline=offline,
        server_start_s=measured.server_start_s,
        load_average=measured.load_average,
        slo_ttft_ms=slo.ttft_ms,
    )


def results_table(results: Sequence[Result]) -> Table:
    """A row per scenario; in brackets how many times the value of online-only it is."""
    table = Table(
        title="Online latency as the client saw it, in ms and in times of online-only, and the "
        "offline work done beside it"
    )
    table.add_column("scenario")
    for name in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        table.add_column(f"{name}\n[ms]", justify="right")
    for name in ("offline\n[requests/s]", "offline\n[tokens/s]", "job done\n[requests]"):
        table.add_column(name, justify="right")
    for result in results:
        ratios = _ratios(result, results)
        cells = [_with_ratio(value, ratios[name]) for name, value in result.latencies().items()]
        mark = " (!)" if result.is_client_late else ""
        table.add_row(result.name + mark, *cells, *_offline_cells(result.offline))
    return table


def notes(results: Sequence[Result]) -> list[str]:
    """What the table does not say and its reader should know."""
    lines = []
    for result in results:
        online, offline = result.online, result.offline
        if result.load_average > _BUSY_LOAD * (os.cpu_count() or 1):
            lines.append(
                f"{result.name}: others used the machine too (load average "
                f"{result.load_average:.1f} on {os.cpu_count()} cores before the window)"
            )
        if result.is_client_late:
            lines.append(
                f"{result.name}: not to be trusted: this client itself sent requests up to "
                f"{online.max_client_delay_ms / 1e3:.1f} s late, as the machine was too busy; run "
                "it again when nothing else runs, or with a lower --rate"
            )
        if online.num_failed:
            lines.append(
                f"{result.name}: {online.num_failed} of {online.num_requests} online requests "
                f"have no whole answer; the first: {online.first_error}"
            )
        if offline is not None and offline.num_failed:
            lines.append(
                f"{result.name}: {offline.num_failed} offline requests failed; the first: "
                f"{offline.first_error}"
            )
        if offline is not None and offline.job_ended_s is not None:
            lines.append(
                f"{result.name}: the job was done {offline.job_ended_s:.0f} s into the window, so "
                f"the rate is less than could be; give more --offline-prompts"
            )
    return lines


def json_entry(*, config: dict[str, Any], seed: int, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "program": "demo",
        "config": config,
        "seed": seed,
        "versions": versions(),
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "results": [
            {
                **_rounded(asdict(result)),
                "is_client_late": result.is_client_late,
                "latencies": _rounded(result.latencies()),
                "ratio_to_online_only": _rounded(_ratios(result, results)),
            }
            for result in results
        ],
    }


def _ratios(result: Result, results: Sequence[Result]) -> dict[str, float | None]:
    """None where there is nothing to compare: no such value, or no online-only scenario."""
    base = next((other.latencies() for other in results if other.name == ONLINE_ONLY), {})
    ratios = {}
    for name, value in result.latencies().items():
        reference = base.get(name)
        ratios[name] = value / reference if value is not None and reference else None
    return ratios


def _with_ratio(value: float | None, ratio: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    if ratio is None:
        return text
    return f"{text} ({ratio:.0f}x)" if ratio >= 10 else f"{text} ({ratio:.1f}x)"


def _offline_cells(offline: OfflineSummary | None) -> tuple[str, str, str]:
    if offline is None:
        return "-", "-", "-"
    return (
        f"{offline.requests_per_s:.1f}",
        f"{offline.tokens_per_s:,.0f}",
        f"{offline.num_done}/{offline.num_prompts}",
    )


def _rounded(value: Any) -> Any:
    """Floats to five significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return value
