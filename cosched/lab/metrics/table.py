"""Summaries side by side, for people."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from cosched.errors import ConfigError, choices
from cosched.lab.metrics.figure import label_rate
from cosched.lab.metrics.summary import Comparison, Summary, compare

_NONE = "-"
_UNLIMITED = 10_000


def shown(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number in a table: its format, after it was multiplied."""
    return _NONE if value is None else format(scale * value, form)


def markdown_rows(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """value gets the summary and its comparison with the baseline, if there is one. A column
    without any value is left out."""

    header: str
    value: Callable[[Summary, Comparison | None], float | None]
    show: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _ms(value_s: float) -> str:
    return f"{1000 * value_s:.1f}"


def _seconds(value_s: float) -> str:
    return f"{value_s:.3f}" if value_s < 10 else f"{value_s:.1f}"


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _work(value: float) -> str:
    return f"{value:.3f}"


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None and other is None else (one or 0) + (other or 0)


def _count(value: float) -> str:
    return f"{value:,.0f}"


_COLUMNS = (
    _Column(header="TTFT\nmet %", value=lambda s, _: s.online.attainment.ttft.ratio, show=_percent),
    _Column(header="TPOT\nmet %", value=lambda s, _: s.online.attainment.tpot.ratio, show=_percent),
    _Column(header="all\nmet %", value=lambda s, _: s.online.attainment.joint.ratio, show=_percent),
    _Column(header="TTFT s\np50", value=lambda s, _: s.online.ttft_s.p50, show=_seconds),
    _Column(header="\np99", value=lambda s, _: s.online.ttft_s.p99, show=_seconds),
    _Column(
        header="\nx base",
        value=lambda _, c: c.ttft_p99_ratio if c else None,
        show=_times,
    ),
    _Column(header="late\np99", value=lambda s, _: s.online.missed_ttft_s.p99, show=_seconds),
    _Column(header="TPOT ms\np50", value=lambda s, _: s.online.tpot_s.p50, show=_ms),
    _Column(header="\np99", value=lambda s, _: s.online.tpot_s.p99, show=_ms),
    _Column(
        header="\nx base",
        value=lambda _, c: c.tpot_p99_ratio if c else None,
        show=_times,
    ),
    _Column(header="TBT ms\np99", value=lambda s, _: s.online.tbt_s.p99, show=_ms),
    _Column(header="job\ndone s", value=lambda s, _: s.job.makespan_s, show=_seconds),
    _Column(header="\nmean", value=lambda s, _: s.job.completion_mean_s, show=_seconds),
    _Column(header="\np95", value=lambda s, _: s.job.completion_p95_s, show=_seconds),
    _Column(header="\nwork/s", value=lambda s, _: s.job.work_per_s, show=_work),
    _Column(header="% of\nbound", value=lambda s, _: s.job.bound_ratio, show=_percent),
    _Column(header="offline\ntok/s", value=lambda s, _: s.offline.tokens_per_s, show=_count),
    _Column(header="\nreq/s", value=lambda s, _: s.offline.requests_per_s, show=label_rate),
    _Column(header="hit %\nonline", value=lambda s, _: s.online.hit_ratio, show=_percent),
    _Column(header="hit %\noffline", value=lambda s, _: s.offline.hit_ratio, show=_percent),
    _Column(
        header="lost\ntokens",
        value=lambda s, _: _sum(s.online.num_lost_tokens, s.offline.num_lost_tokens),
        show=_count,
    ),
    _Column(
        header="pre-\nempted",
        value=lambda s, _: s.online.num_preemptions + s.offline.num_preemptions,
        show=_count,
    ),
    _Column(
        header="recomp.\ntokens",
        value=lambda s, _: s.online.num_recomputed_tokens + s.offline.num_recomputed_tokens,
        show=_count,
    ),
)


def make_table(
    summaries: Mapping[str, Summary],
    *,
    baseline: str | None = None,
    marked: Collection[str] = (),
) -> Table:
    """One row per scenario; with a baseline also each p99 against the baseline's. Names that are
    marked get an exclamation mark."""
    if baseline is not None and baseline not in summaries:
        raise ConfigError(f"unknown baseline {baseline!r}; choose from {choices(summaries)}")
    base = None if baseline is None else summaries[baseline]
    pairs = [(s, None if base is None else compare(s, base)) for s in summaries.values()]
    values = {column: [column.value(*pair) for pair in pairs] for column in _COLUMNS}
    shown = [column for column in _COLUMNS if any(value is not None for value in values[column])]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nscenario", no_wrap=True)
    for column in shown:
        table.add_column(column.header, justify="right", no_wrap=True)
    for index, name in enumerate(summaries):
        cells = [(column, values[column][index]) for column in shown]
        title = f"{name} (base)" if name == baseline else name
        table.add_row(
            f"{title} (!)" if name in marked else title,
            *(_NONE if value is None else column.show(value) for column, value in cells),
        )
    return table


def print_table(
    summaries: Mapping[str, Summary],
    *,
    baseline: str | None = None,
    marked: Collection[str] = (),
    file: IO[str] | None = None,
) -> None:
    """Print `make_table` to `file` or stdout, whatever the width of the terminal: a line that wraps
    can still be read, a number that was cut cannot."""
    table = make_table(summaries, baseline=baseline, marked=marked)
    console = Console(file=file)
    natural = console.measure(table, options=console.options.update(width=_UNLIMITED))
    console.width = max(console.width, natural.maximum)
    console.print(table)
