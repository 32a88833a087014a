"""The input file of a job: what identifies it, and its checked lines as a stream."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tempfile
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

from cosched.batch.jsonl.errors import JobFileError
from cosched.batch.jsonl.file_kinds import fault_of_file
from cosched.batch.jsonl.lines import (
    BadLine,
    IdSet,
    RawLine,
    RequestLine,
    duplicate_of,
    parse_line,
    raw_lines,
)
from cosched.batch.jsonl.parquet import ParquetRows, is_parquet
from cosched.batch.jsonl.prefix_order import in_prefix_order, prefix_key

_BLOCK_BYTES = 1 << 20
_YIELD_EVERY_LINES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An input file at the start of a job. `num_lines` includes empty lines; a row of a Parquet
    file is a line."""

    path: str
    num_bytes: int
    num_lines: int
    sha256: str
    mtime_ns: int

    def check_unchanged(self) -> None:
        """JobFileError if the file was changed since it was read."""
        now = _regular_file(self.path)
        if (now.st_size, now.st_mtime_ns) != (self.num_bytes, self.mtime_ns):
            raise JobFileError(
                f"{self.path} was changed while the job ran ({self.num_bytes} bytes at the start, "
                f"{now.st_size} now): the outputs may answer lines that are no longer there; "
                "start over with --overwrite"
            )

    async def checked_lines(
        self, *, max_line_bytes: int
    ) -> AsyncGenerator[RequestLine | BadLine | None, None]:
        """Every line in order, parsed and checked; None for an empty line.

        A custom_id belongs to the first line that has it, even if that line is otherwise wrong.
        """
        with open(self.path, "rb", buffering=_BLOCK_BYTES) as file:
            raws = input_lines(file, max_line_bytes=max_line_bytes)
            async for _, line in self._checked(raws, max_line_bytes=max_line_bytes):
                yield line

    async def lines_in_prefix_order(
        self, *, max_line_bytes: int, is_done: Callable[[int], bool]
    ) -> AsyncGenerator[RequestLine | BadLine | None, None]:
        """As `checked_lines`, but without those that are done, and valid lines come last, in the
        prefix order of the whole file. They are read twice: only their places and keys are held."""
        keys: list[bytes] = []
        places = array("Q")  # number, start and bytes of each
        with ExitStack() as stack:
            file = stack.enter_context(open(self.path, "rb", buffering=_BLOCK_BYTES))
            kept: BinaryIO = file
            if is_parquet(file):  # its rows are read once
                kept = stack.enter_context(tempfile.TemporaryFile())
            raws = input_lines(file, max_line_bytes=max_line_bytes)
            async for raw, line in self._checked(raws, max_line_bytes=max_line_bytes):
                if is_done(raw.number):
                    continue
                if not isinstance(line, RequestLine):
                    yield line
                    continue
                assert raw.data is not None
                if kept is not file:
                    kept.write(raw.data)
                keys.append(prefix_key(line.body))
                places.extend((raw.number, kept.tell() - len(raw.data), len(raw.data)))
            for index in in_prefix_order(range(len(keys)), keys.__getitem__, together=len(keys)):
                number, start, num_bytes = places[3 * index : 3 * index + 3]
                kept.seek(start)
                raw = RawLine(number=number, data=kept.read(num_bytes))
                yield parse_line(raw, max_line_bytes=max_line_bytes)

    async def _checked(
        self, raws: Iterator[RawLine], *, max_line_bytes: int
    ) -> AsyncGenerator[tuple[RawLine, RequestLine | BadLine | None], None]:
        ids = IdSet(max_ids=self.num_lines)
        for raw in raws:
            if raw.number > self.num_lines:
                return  # the file has grown; `check_unchanged` reports it at the end
            if raw.number % _YIELD_EVERY_LINES == 0:
                await asyncio.sleep(0)  # for signals and the progress display
            if raw.is_empty:
                yield raw, None
                continue
            line = parse_line(raw, max_line_bytes=max_line_bytes)
            if line.custom_id is not None and not ids.add(line.custom_id):
                line = duplicate_of(line)
            yield raw, line


def read_source(path: str) -> Source:
    """Read the whole file once, for its digest and its number of lines.

    Only the digest makes resuming safe: a file of the same size and with the same first bytes may
    have lost a line in the middle.
    """
    before = _regular_file(path)
    digest = hashlib.sha256()
    num_bytes = num_newlines = 0
    last = b"\n"
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                if not num_bytes and (fault := fault_of_file(block)) is not None:
                    raise JobFileError(f"{path}: {fault}")
                digest.update(block)
                num_bytes += len(block)
                num_newlines += block.count(b"\n")
                last = block
            num_lines = num_newlines + (not last.endswith(b"\n"))
            file.seek(0)
            if is_parquet(file):
                with ParquetRows(file) as rows:
                    num_lines = rows.num_rows
    except OSError as error:
        raise JobFileError(f"cannot read the input {path}: {error.strerror}") from error
    return Source(
        path=path,
        num_bytes=num_bytes,
        num_lines=num_lines,
        sha256=digest.hexdigest(),
        mtime_ns=before.st_mtime_ns,
    )


def input_lines(file: BinaryIO, *, max_line_bytes: int) -> Iterator[RawLine]:
    """The lines of a JSONL file, or the rows of a Parquet file as lines."""
    if not is_parquet(file):
        yield from raw_lines(file, max_line_bytes=max_line_bytes)
        return
    with ParquetRows(file) as rows:
        yield from raw_lines(rows, max_line_bytes=max_line_bytes)


def _regular_file(path: str) -> os.stat_result:
    if "://" in path:
        raise JobFileError(f"the input must be a file of this machine: download {path} first")
    try:
        found = os.stat(path)
    except OSError as error:
        raise JobFileError(f"cannot read the input {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise JobFileError(f"the input {path} is not a regular file: resuming reads it again")
    return found
