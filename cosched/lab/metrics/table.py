"""Tables: of summaries, for a terminal or for a file, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from cosched.lab.columns import COLUMNS
from cosched.lab.metrics.summary import Summary

_SHOWN = (
    *("TTFT met %", "TPOT met %", "both met %", "TTFT p50 s", "TTFT p99 s", "missed TTFT p99 s"),
    *("TPOT p50 ms", "TPOT p99 ms", "TBT p99 ms", "job done s", "mean completion s"),
    *("p95 completion s", "work/s", "of bound %", "offline tokens/s", "offline req/s"),
    *("online hit %", "offline hit %", "evicted prompt tokens", "preemptions", "recomputed tokens"),
)
_FIRST = (
    *("both met %", "TTFT p99 s", "TPOT p99 ms", "job done s", "of bound %", "offline tokens/s"),
    *("preemptions", "TTFT p50 s", "TPOT p50 ms"),
)
"""Where not all columns fit on a terminal, those that are shown first."""
_ALSO_BY_TIER = (*_SHOWN[:6], "TPOT p50 ms", "TPOT p99 ms", "TBT p99 ms", "online hit %")
_UNLIMITED = 10_000
_WIDEST_NAME = 24
"""On a terminal; longer ones are folded."""

Row = tuple[str, Mapping[str, str]]
"""A setting, and column -> cell; an empty cell is none."""


def markdown_rows(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _broken(header: str) -> str:
    """In two lines."""
    return header.replace(" ", "\n", 1)


def print_table(summaries: Mapping[str, Summary], *, file: IO[str] | None = None) -> None:
    """Print one row per setting to `file` or stdout, and one for each of its tiers; columns without
    values are left out."""
    rows: list[Row] = []
    for name, summary in summaries.items():
        rows.append((name, {column: COLUMNS[column].shown(summary) for column in _SHOWN}))
        for tier, served in summary.tiers.items():
            alone = replace(summary, online=served)
            shown = {column: COLUMNS[column].shown(alone) for column in _ALSO_BY_TIER}
            rows.append((f"  tier {tier}", shown))
    print_rows(rows, file=file)


def print_rows(rows: Sequence[Row], *, file: IO[str] | None = None) -> None:
    """Print rows to `file` or stdout; columns without a cell are left out.

    On a terminal as many columns as fit, the most important ones; the last line says if some are
    left out. Elsewhere all of them: lines may be long, and no number is cut.
    """
    console = Console(file=file)
    unlimited = console.options.update(width=_UNLIMITED)
    known = dict.fromkeys(one for _, cells in rows for one in cells)
    headers = [one for one in known if any(cells.get(one) for _, cells in rows)]
    widest = _WIDEST_NAME if console.is_terminal else None
    by_importance = sorted(headers, key=lambda one: (one not in _FIRST, _place(one)))
    for number in range(len(headers), 0, -1):
        shown = [header for header in headers if header in by_importance[:number]]
        table = _table(rows, shown, widest_name=widest)
        width = console.measure(table, options=unlimited).maximum
        if width <= console.width or not console.is_terminal:
            break
    console.width = max(console.width, width)
    console.print(table)
    if len(shown) < len(headers):
        console.print(f"{len(shown)} of {len(headers)} columns; --json FILE writes all figures")


def _place(header: str) -> int:
    return _FIRST.index(header) if header in _FIRST else 0


def _table(rows: Sequence[Row], headers: Sequence[str], *, widest_name: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nsetting", overflow="fold", max_width=widest_name)
    for header in headers:
        table.add_column(_broken(header), justify="right", no_wrap=True)
    for name, cells in rows:
        table.add_row(name, *(cells.get(header) or "-" for header in headers))
    return table
