"""Readers of traces in CSV: Azure, BurstGPT, Vidur and splitwise-sim, plain lengths.

Columns are found by the header's names, so further columns and another order do no harm.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cosched_traces.errors import RowError
from cosched_traces.rows import DEFAULTS, ReadOptions, Row, make_workload, numbered_lines
from cosched_traces.transform import with_arrivals
from cosched_traces.workload import Workload

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens", "Model", "Log Type")
VIDUR = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
SPLITWISE = ("arrival_timestamp", "prompt_size", "token_size")
LENGTHS = ("num_prefill_tokens", "num_decode_tokens")


def read_azure_csv(path: Path, options: ReadOptions = DEFAULTS) -> Workload:
    """Azure LLM inference traces of 2023 and 2024: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Timestamps are wall clock times, without zone (2023) or with one (2024); digits below 1 us are
    dropped. No text and no prefix identity: prompts share nothing.
    """
    return make_workload(path, _rows(path, AZURE, parse_time=_wall_clock_s), options=options)


def read_burstgpt_csv(
    path: Path,
    options: ReadOptions = DEFAULTS,
    *,
    model: str | None = None,
    log_type: str | None = None,
) -> Workload:
    """BurstGPT: ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type``, seconds.

    A response of 0 tokens is a request that failed: choose with `options.on_empty`. `model`
    ("ChatGPT", "GPT-4") and `log_type` ("Conversation log", "API log") keep only such rows; the
    notes say how many rows were left out.
    """
    wanted = (model, log_type)
    num_other = 0

    def keep(cells: Sequence[str]) -> bool:
        nonlocal num_other
        kept = all(want in (None, cell) for want, cell in zip(wanted, cells[3:], strict=True))
        num_other += not kept
        return kept

    rows = _rows(path, BURSTGPT, parse_time=float, keep=keep)
    workload = make_workload(path, rows, options=options)
    if not any(wanted):
        return workload
    note = f"left out {num_other} rows of another model or log type"
    return Workload(name=workload.name, requests=workload.requests, notes=(*workload.notes, note))


def read_arrivals_csv(path: Path, options: ReadOptions = DEFAULTS) -> Workload:
    """Vidur's ``arrived_at,num_prefill_tokens,num_decode_tokens`` or splitwise-sim's
    ``arrival_timestamp,prompt_size,token_size``; seconds."""
    columns = SPLITWISE if SPLITWISE[0] in csv_header(path) else VIDUR
    return make_workload(path, _rows(path, columns, parse_time=float), options=options)


def read_lengths_csv(
    path: Path,
    options: ReadOptions = DEFAULTS,
    *,
    arrivals_s: Sequence[float] | None = None,
) -> Workload:
    """Lengths without arrivals: ``num_prefill_tokens,num_decode_tokens``.

    All requests arrive at 0, or the first ``len(arrivals_s)`` of them at the times given.
    """
    workload = make_workload(path, _rows(path, LENGTHS, parse_time=None), options=options)
    return workload if arrivals_s is None else with_arrivals(workload, arrivals_s)


def csv_header(path: Path) -> list[str]:
    """The names in a CSV file's first line; empty for an empty file."""
    return [name.strip() for name in next(_cells(path), (1, []))[1]]


def _rows(
    path: Path,
    columns: Sequence[str],
    *,
    parse_time: Callable[[str], float] | None,
    keep: Callable[[Sequence[str]], bool] | None = None,
) -> Iterator[Row]:
    """Rows of the named columns: time (unless `parse_time` is None), prompt, output, others.

    `keep` sees a row's cells in the order of `columns`.
    """
    lines = _cells(path)
    header = [name.strip() for name in next(lines, (1, []))[1]]
    missing = [name for name in columns if name not in header]
    if missing:
        reason = f"no column {', '.join(missing)}; the header has {', '.join(header) or 'nothing'}"
        raise RowError(path, 1, reason)
    where = [header.index(name) for name in columns]
    num_tokens = _token_parser(path)
    for line, cells in lines:
        if not cells:
            continue  # an empty line, mostly the last one: no row
        if len(cells) != len(header):
            raise RowError(path, line, f"{len(cells)} cells where the header has {len(header)}")
        picked = [cells[index] for index in where]
        if keep is not None and not keep(picked):
            continue
        time_s = 0.0
        first = 0
        if parse_time is not None:
            time_s = _parse_time(path, line, column=columns[0], text=picked[0], parse=parse_time)
            first = 1
        yield Row(
            line,
            time_s,
            num_tokens(line, columns[first], picked[first]),
            num_tokens(line, columns[first + 1], picked[first + 1]),
        )


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells); the header is one of them."""
    reader = csv.reader(line for _, line in numbered_lines(path))
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise RowError(path, reader.line_num, str(error)) from error


def _wall_clock_s(text: str) -> float:
    moment = datetime.fromisoformat(text)
    # A time without zone taken as local would shift where this machine's clock is put forward.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _parse_time(
    path: Path, line: int, *, column: str, text: str, parse: Callable[[str], float]
) -> float:
    try:
        time_s = parse(text)
    except ValueError:
        raise RowError(path, line, f"{column} is no time: {text!r}") from None
    if not abs(time_s) < float("inf"):
        raise RowError(path, line, f"{column} is not finite: {text!r}")
    return time_s


def _token_parser(path: Path) -> Callable[[int, str, str], int]:
    def parse(line: int, column: str, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            pass
        try:
            value = float(text)  # pandas writes whole numbers so where a column had gaps
        except ValueError:
            raise RowError(path, line, f"{column} is no number: {text!r}") from None
        if not value.is_integer():
            raise RowError(path, line, f"{column} is no whole number: {text!r}")
        return int(value)

    return parse
