"""Tables: of summaries on a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from cosched.errors import ConfigError, choices
from cosched.lab.columns import COLUMNS
from cosched.lab.metrics.summary import Summary, compare

_SHOWN = (
    *("TTFT met %", "TPOT met %", "both met %", "TTFT p50 s", "TTFT p99 s", "missed TTFT p99 s"),
    *("TPOT p50 ms", "TPOT p99 ms", "TBT p99 ms", "job done s", "mean completion s"),
    *("p95 completion s", "work/s", "of bound %", "offline tokens/s", "offline req/s"),
    *("online hit %", "offline hit %", "evicted prompt tokens", "preemptions", "recomputed tokens"),
)
_ALSO_BY_TIER = (*_SHOWN[:6], "TPOT p50 ms", "TPOT p99 ms", "TBT p99 ms", "online hit %")
_UNLIMITED = 10_000


def markdown_rows(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _broken(header: str) -> str:
    """In two lines."""
    return header.replace(" ", "\n", 1)


def print_table(
    summaries: Mapping[str, Summary],
    *,
    baseline: str | None = None,
    marked: Collection[str] = (),
    file: IO[str] | None = None,
) -> None:
    """Print one row per setting to `file` or stdout, and one for each of its tiers; with a baseline
    also the ratios of its p99.

    Marked names get an exclamation mark; columns without values are left out. Lines may be wider
    than the terminal: no number is cut.
    """
    if baseline is not None and baseline not in summaries:
        raise ConfigError(f"unknown baseline {baseline!r}; choose from {choices(summaries)}")
    cells = {_broken(name): [COLUMNS[name].shown(s) for s in summaries.values()] for name in _SHOWN}
    if baseline is not None:
        compared = [compare(s, summaries[baseline]) for s in summaries.values()]
        for metric in ("ttft", "tpot"):
            ratios = [getattr(one, f"{metric}_p99_ratio") for one in compared]
            shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            cells[f"{metric.upper()} p99\nx base"] = shown
    headers = [header for header, values in cells.items() if any(values)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nsetting", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for index, (name, summary) in enumerate(summaries.items()):
        title = f"{name} (base)" if name == baseline else name
        title += " (!)" if name in marked else ""
        table.add_row(title, *(cells[header][index] or "-" for header in headers))
        for tier, served in summary.tiers.items():
            alone = replace(summary, online=served)
            values = {_broken(name): COLUMNS[name].shown(alone) for name in _ALSO_BY_TIER}
            table.add_row(f"  tier {tier}", *(values.get(header) or "-" for header in headers))
    console = Console(file=file)
    natural = console.measure(table, options=console.options.update(width=_UNLIMITED))
    console.width = max(console.width, natural.maximum)
    console.print(table)
