"""From the rows of a file to a workload: what every reader shares."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from cosched.core.request import RequestClass
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.seeds import key_base
from cosched_traces.workload import Segment, TraceRequest, Workload

GZIP_MAGIC = b"\x1f\x8b"


class OnEmpty(Enum):
    """What to do with a row of 0 prompt or 0 output tokens, which no engine can run.

    ERROR  stop (the default: such a row says something about the trace that one should know)
    CLAMP  make it 1 token: the request keeps its place and the cost of its other part
    DROP   leave the row out and say in the workload's notes how many were left out
    """

    ERROR = "error"
    CLAMP = "clamp"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of every reader.

    name           of the workload, in its rids and its key space; None: the file's name
    request_class  of every request of the file
    on_empty       what to do with rows of 0 tokens
    max_rows       read no more than the first so many rows
    """

    name: str | None = None
    request_class: RequestClass = RequestClass.ONLINE
    on_empty: OnEmpty = OnEmpty.ERROR
    max_rows: int | None = None

    def name_for(self, path: Path) -> str:
        return self.name or path.name.split(".")[0]


DEFAULTS = ReadOptions()


class Row(NamedTuple):
    """One row as its format gives it. `time_s` counts from the format's own zero."""

    line: int
    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


SegmentsOf = Callable[[Row], tuple[Segment, ...]]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of a text file, unpacked when it is gzip.

    Raises `WorkloadError` when there is no such file and `RowError` at the line where a damaged one
    cannot be read on.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
                for number, line in enumerate(text, 1):
                    yield number, line
    except (FileNotFoundError, IsADirectoryError) as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise RowError(path, number + 1, f"cannot be read: {error}") from error


def make_workload(
    path: Path,
    rows: Iterable[Row],
    *,
    options: ReadOptions,
    segments_of: SegmentsOf | None = None,
) -> Workload:
    """Rows as requests: arrivals count from the earliest row, and rows out of order are sorted.

    Without `segments_of` each row's prompt is its own: traces without text or hashes share nothing.
    """
    name = options.name_for(path)
    kept: list[tuple[int, Row]] = []
    num_empty = 0
    for index, given in enumerate(islice(rows, options.max_rows)):
        row = _without_zero(path, given, options.on_empty)
        num_empty += row is not given
        if row is not None:
            kept.append((index, row))
    kept.sort(key=lambda pair: pair[1].time_s)  # stable: rows of equal times keep the file's order
    first_s = kept[0][1].time_s if kept else 0.0
    base = key_base("rows", name)
    requests = tuple(
        TraceRequest(
            rid=f"{name}-{index}",
            request_class=options.request_class,
            arrival_s=row.time_s - first_s,
            num_output_tokens=row.num_output_tokens,
            segments=segments_of(row)
            if segments_of
            else (Segment(base + index, row.num_prompt_tokens),),
        )
        for index, row in kept
    )
    notes = [f"read {path.name}"]
    if num_empty:
        notes.append(f"{options.on_empty.value} {num_empty} rows of 0 tokens")
    return Workload(name=name, requests=requests, notes=tuple(notes))


def _without_zero(path: Path, row: Row, on_empty: OnEmpty) -> Row | None:
    """The row itself when both lengths are above 0, else what `on_empty` makes of it."""
    for what, count in (("prompt", row.num_prompt_tokens), ("output", row.num_output_tokens)):
        if count < 0:
            raise RowError(path, row.line, f"{what} tokens {count} is negative")
        if count == 0 and on_empty is OnEmpty.ERROR:
            reason = f"{what} tokens is 0; on_empty=OnEmpty.CLAMP or DROP accepts such rows"
            raise RowError(path, row.line, reason)
    if row.num_prompt_tokens and row.num_output_tokens:
        return row
    if on_empty is OnEmpty.DROP:
        return None
    return row._replace(
        num_prompt_tokens=max(row.num_prompt_tokens, 1),
        num_output_tokens=max(row.num_output_tokens, 1),
    )
