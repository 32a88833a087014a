"""Trace files: one table of formats and one reader. The first line of a file shows its format."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from cosched.core.request import RequestClass
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.files import Ids, first_line, json_lines, numbered_lines
from cosched_traces.seeds import KEYS, key_base
from cosched_traces.workload import Segment, TraceRequest, Workload

MOONCAKE_BLOCK_TOKENS = 512
SERVEGEN_BLOCK_TOKENS = 16
SERVEGEN_REPLY_TOKENS = 128
"""Of the jobs that ServeGen publishes without output lengths; an assumption."""
SERVEGEN_TEXT_TOKENS = 256
"""Of a prompt of its jobs with images and output lengths: the rest is taken to be an image, as the
lengths are few numbers, like sizes of images. An assumption."""
SERVEGEN_IMAGE_TOKENS = 860
"""Of an image of its jobs with ids of images. Their blocks are taken to be text alone, as many of
them differ from line to line, which the placeholders of images do not. An assumption."""


class Row(NamedTuple):
    """`time_s` counts from the zero of the format; `ids`: hashes of the blocks of the prompt, of
    `block` tokens each; `images`: names and tokens of images after its text."""

    line: int
    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ids: Ids = ()
    block: int = MOONCAKE_BLOCK_TOKENS
    images: tuple[tuple[str, int], ...] = ()


def _wall_clock_s(text: str) -> float:
    moment = datetime.fromisoformat(text)
    # Not local time: clocks that are put forward would shift it.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of one file.

    marks        names in the first line of a file; of a CSV file its columns: the time (if there
                 is one), prompt tokens, output tokens
    read         rows of a JSONL file; None: a CSV file
    parse_time   of the first column; None: without arrivals, all requests are at 0
    skips_empty  rows without output tokens are failed requests and are left out
    """

    marks: tuple[str, ...]
    description: str
    read: Callable[[Path], Iterator[Row]] | None = None
    parse_time: Callable[[str], float] | None = None
    skips_empty: bool = False


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Ids


def _mooncake_rows(path: Path) -> Iterator[Row]:
    """Timestamps in ms. An id stands for one block of 512 tokens and all tokens before it; the last
    block of a prompt is mostly shorter."""
    for line, one in json_lines(path, _Mooncake):
        row = Row(line, one.timestamp / 1000, one.input_length, one.output_length, one.hash_ids)
        yield _with_all_blocks(path, row)


def _with_all_blocks(path: Path, row: Row) -> Row:
    expected = -(-row.num_prompt_tokens // row.block)
    if len(row.ids) != expected:
        reason = (
            f"{len(row.ids)} hash_ids for {row.num_prompt_tokens} tokens; blocks of {row.block} "
            f"tokens make {expected}"
        )
        raise RowError(path, row.line, reason)
    return row


class _ServegenJob(msgspec.Struct):
    input_length: int
    output_length: int
    type: str = "text"


def _servegen_rows(path: Path) -> Iterator[Row]:
    for line, job in json_lines(path, _ServegenJob):
        num_text = job.input_length
        images: tuple[tuple[str, int], ...] = ()
        if job.type == "multimodal" and num_text > SERVEGEN_TEXT_TOKENS:
            images = ((f"line {line}", num_text - SERVEGEN_TEXT_TOKENS),)
            num_text = SERVEGEN_TEXT_TOKENS
        yield Row(line, 0.0, num_text, job.output_length, images=images)


class _ServegenPrompt(msgspec.Struct):
    input_length: int
    hash_ids: Ids
    img_ids: tuple[str, ...] = ()


def _servegen_prompt_rows(path: Path) -> Iterator[Row]:
    """A prompt has one id for each block of 16 tokens; the last one may be shorter."""
    for line, one in json_lines(path, _ServegenPrompt):
        row = Row(
            line,
            0.0,
            one.input_length,
            SERVEGEN_REPLY_TOKENS,
            one.hash_ids,
            SERVEGEN_BLOCK_TOKENS,
            tuple((name, SERVEGEN_IMAGE_TOKENS) for name in one.img_ids),
        )
        yield _with_all_blocks(path, row)


# In the order of detection: files with arrivals have the columns of lengths, too.
FORMATS = {
    "azure": Format(
        marks=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        description="Azure LLM inference traces 2023/2024 (CSV)",
        parse_time=_wall_clock_s,
    ),
    "burstgpt": Format(
        marks=("Timestamp", "Request tokens", "Response tokens"),
        description="BurstGPT (CSV)",
        parse_time=float,
        skips_empty=True,
    ),
    "vidur": Format(
        marks=("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        description="Vidur (CSV)",
        parse_time=float,
    ),
    "splitwise": Format(
        marks=("arrival_timestamp", "prompt_size", "token_size"),
        description="splitwise-sim (CSV)",
        parse_time=float,
    ),
    "lengths": Format(
        marks=("num_prefill_tokens", "num_decode_tokens"),
        description="lengths without arrivals, as Vidur and Etalon keep them (CSV)",
    ),
    "mooncake": Format(
        marks=('"timestamp"', '"hash_ids"'),
        description="Mooncake (JSONL)",
        read=_mooncake_rows,
    ),
    "servegen-batch": Format(
        marks=('"request_id"', '"input_length"', '"output_length"'),
        description=(
            "ServeGen's offline jobs with output lengths; of a prompt with images, all but"
            f" {SERVEGEN_TEXT_TOKENS} tokens are an image (JSONL)"
        ),
        read=_servegen_rows,
    ),
    "servegen-prompts": Format(
        marks=('"request_id"', '"input_length"', '"hash_ids"'),
        description=(
            f"ServeGen's offline jobs with shared prefixes; replies of {SERVEGEN_REPLY_TOKENS}"
            f" tokens, images of {SERVEGEN_IMAGE_TOKENS} (JSONL)"
        ),
        read=_servegen_prompt_rows,
    ),
}


def read_trace(
    path: Path,
    *,
    name: str | None = None,
    request_class: RequestClass = RequestClass.ONLINE,
    format: str | None = None,
) -> Workload:
    """The requests of a trace file. Arrivals count from the earliest row; rows out of order are
    sorted. Prompts share the blocks with equal ids, and nothing in formats without ids.

    name    of the workload, in its rids and keys; None: that of the file
    format  a name of `FORMATS`; None: the one that the first line shows
    """
    known = FORMATS[format] if format is not None else _format_of(path)
    name = name or path.name.split(".")[0]
    rows: list[tuple[int, Row]] = []
    num_skipped = 0
    for index, row in enumerate(known.read(path) if known.read else _csv_rows(path, known)):
        for what, count in (("prompt", row.num_prompt_tokens), ("output", row.num_output_tokens)):
            if count < 0:
                raise RowError(path, row.line, f"{what} tokens {count} is negative")
            if count == 0 and not (known.skips_empty and what == "output"):
                raise RowError(path, row.line, f"{what} tokens is 0; no engine can run that")
        if row.num_output_tokens:
            rows.append((index, row))
        else:
            num_skipped += 1
    rows.sort(key=lambda pair: pair[1].time_s)  # stable: rows of equal times keep their order
    first_s = rows[0][1].time_s if rows else 0.0
    own, shared = key_base("rows", name), key_base("blocks", name)
    requests = tuple(
        TraceRequest(
            rid=f"{name}-{index}",
            request_class=request_class,
            arrival_s=row.time_s - first_s,
            num_output_tokens=row.num_output_tokens,
            segments=_segments(row, own + index, shared),
        )
        for index, row in rows
    )
    notes = [f"read {path.name}"]
    if num_skipped:
        notes.append(f"left out {num_skipped} rows of 0 tokens")
    return Workload(name=name, requests=requests, notes=tuple(notes))


def _format_of(path: Path) -> Format:
    first = first_line(path)
    for known in FORMATS.values():
        if all(mark in first for mark in known.marks):
            return known
    formats = "; ".join(known.description for known in FORMATS.values())
    raise WorkloadError(f"{path}: of no known format, it begins {first[:80]!r}; known: {formats}")


def _segments(row: Row, own_key: int, shared: int) -> tuple[Segment, ...]:
    """One segment per id, all but the last of a full block; without ids, one of its own. Then the
    images."""
    images = [
        Segment((shared + key_base("image", name)) % KEYS, num_tokens, encoded=True)
        for name, num_tokens in row.images
    ]
    if not row.ids:
        return (Segment(own_key, row.num_prompt_tokens), *images)
    *full, last = row.ids
    num_last_tokens = row.num_prompt_tokens - len(full) * row.block
    return (
        *(Segment(shared + block, row.block) for block in full),
        Segment(shared + last, num_last_tokens),
        *images,
    )


def _csv_rows(path: Path, known: Format) -> Iterator[Row]:
    """Rows of a CSV file. Its header names the columns, in any order and among others."""
    reader = csv.reader(line for _, line in numbered_lines(path))
    try:
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in known.marks if name not in header]
        if missing:
            there = ", ".join(header) or "nothing"
            raise RowError(path, 1, f"no column {', '.join(missing)}; the header has {there}")
        where = [header.index(name) for name in known.marks]
        for cells in reader:
            line = reader.line_num
            if not cells:
                continue
            if len(cells) != len(header):
                raise RowError(path, line, f"{len(cells)} cells where the header has {len(header)}")
            *time, prompt, output = zip(known.marks, (cells[i] for i in where), strict=True)
            time_s = 0.0
            if known.parse_time is not None:
                time_s = _parsed_time(path, line, *time[0], parse=known.parse_time)
            num_prompt, num_output = (_whole(path, line, *cell) for cell in (prompt, output))
            yield Row(line, time_s, num_prompt, num_output)
    except csv.Error as error:
        raise RowError(path, reader.line_num, str(error)) from error


def _parsed_time(
    path: Path, line: int, column: str, text: str, *, parse: Callable[[str], float]
) -> float:
    try:
        time_s = parse(text)
    except ValueError:
        raise RowError(path, line, f"{column} is not a time: {text!r}") from None
    if not abs(time_s) < float("inf"):
        raise RowError(path, line, f"{column} is not finite: {text!r}")
    return time_s


def _whole(path: Path, line: int, column: str, text: str) -> int:
    try:
        value = float(text)  # pandas writes 44.0 in columns that had gaps
    except ValueError:
        raise RowError(path, line, f"{column} is not a number: {text!r}") from None
    if not value.is_integer():
        raise RowError(path, line, f"{column} is not a whole number: {text!r}")
    return int(value)


def format_table() -> str:
    """The table of formats in docs/simulation.md, in Markdown."""
    lines = ["| format | what it is | shows by |", "|---|---|---|"]
    for name, known in FORMATS.items():
        marks = ", ".join(f"`{mark}`" for mark in known.marks)
        lines.append(f"| `{name}` | {known.description} | {marks} |")
    return "\n".join(lines) + "\n"
