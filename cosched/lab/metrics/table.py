"""Tables: of summaries on a terminal, and in Markdown."""

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


def markdown_rows(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
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


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _num_lost(s: Summary) -> int | None:
    known = [n for n in (s.online.num_lost_tokens, s.offline.num_lost_tokens) if n is not None]
    return sum(known) if known else None


_COLUMNS = (
    _Column("TTFT\nmet %", lambda s, _: s.online.attainment.ttft.ratio, _percent),
    _Column("TPOT\nmet %", lambda s, _: s.online.attainment.tpot.ratio, _percent),
    _Column("all\nmet %", lambda s, _: s.online.attainment.joint.ratio, _percent),
    _Column("TTFT s\np50", lambda s, _: s.online.ttft_s.p50, _seconds),
    _Column("\np99", lambda s, _: s.online.ttft_s.p99, _seconds),
    _Column("\nx base", lambda _, c: c.ttft_p99_ratio if c else None, _times),
    _Column("missed\np99", lambda s, _: s.online.missed_ttft_s.p99, _seconds),
    _Column("TPOT ms\np50", lambda s, _: s.online.tpot_s.p50, _ms),
    _Column("\np99", lambda s, _: s.online.tpot_s.p99, _ms),
    _Column("\nx base", lambda _, c: c.tpot_p99_ratio if c else None, _times),
    _Column("TBT ms\np99", lambda s, _: s.online.tbt_s.p99, _ms),
    _Column("job\ndone s", lambda s, _: s.job.makespan_s, _seconds),
    _Column("\nmean", lambda s, _: s.job.completion_mean_s, _seconds),
    _Column("\np95", lambda s, _: s.job.completion_p95_s, _seconds),
    _Column("\nwork/s", lambda s, _: s.job.work_per_s, lambda value: f"{value:.3f}"),
    _Column("% of\nbound", lambda s, _: s.job.bound_ratio, _percent),
    _Column("offline\ntok/s", lambda s, _: s.offline.tokens_per_s, _count),
    _Column("\nreq/s", lambda s, _: s.offline.requests_per_s, label_rate),
    _Column("hit %\nonline", lambda s, _: s.online.hit_ratio, _percent),
    _Column("hit %\noffline", lambda s, _: s.offline.hit_ratio, _percent),
    _Column("lost\ntokens", lambda s, _: _num_lost(s), _count),
    _Column(
        "pre-\nempted", lambda s, _: s.online.num_preemptions + s.offline.num_preemptions, _count
    ),
    _Column(
        "recomp.\ntokens",
        lambda s, _: s.online.num_recomputed_tokens + s.offline.num_recomputed_tokens,
        _count,
    ),
)


def make_table(
    summaries: Mapping[str, Summary],
    *,
    baseline: str | None = None,
    marked: Collection[str] = (),
) -> Table:
    """One row per setting; with a baseline also the ratio of each p99 to the baseline's. Marked
    names get an exclamation mark."""
    if baseline is not None and baseline not in summaries:
        raise ConfigError(f"unknown baseline {baseline!r}; choose from {choices(summaries)}")
    base = None if baseline is None else summaries[baseline]
    pairs = [(s, None if base is None else compare(s, base)) for s in summaries.values()]
    values = {column: [column.value(*pair) for pair in pairs] for column in _COLUMNS}
    shown = [column for column in _COLUMNS if any(value is not None for value in values[column])]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nsetting", no_wrap=True)
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
    """Print `make_table` to `file` or stdout. Lines may be wider than the terminal: no number is
    cut."""
    table = make_table(summaries, baseline=baseline, marked=marked)
    console = Console(file=file)
    natural = console.measure(table, options=console.options.update(width=_UNLIMITED))
    console.width = max(console.width, natural.maximum)
    console.print(table)
