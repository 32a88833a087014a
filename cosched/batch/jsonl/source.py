"""The input file of a job: what identifies it, and its lines as a stream."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from cosched.batch.jsonl.errors import JobFileError
from cosched.batch.jsonl.parquet import ParquetRows, is_parquet

_BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"  # some editors on Windows start a file with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What an input file was when the job started. `num_lines` counts empty lines too; of a Parquet
    file it is the number of rows."""

    path: str
    num_bytes: int
    num_lines: int
    sha256: str
    mtime_ns: int

    def check_unchanged(self) -> None:
        """Raise JobFileError when the file was touched since it was read."""
        now = _regular_file(self.path)
        if (now.st_size, now.st_mtime_ns) != (self.num_bytes, self.mtime_ns):
            raise JobFileError(
                f"{self.path} was changed while the job ran ({self.num_bytes} bytes at the start, "
                f"{now.st_size} now): the outputs may answer lines that are no longer there; "
                "start anew with --overwrite"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """One line as it stands in the file; `data` is None when it was too long to be read."""

    number: int
    data: bytes | None

    @property
    def is_empty(self) -> bool:
        return self.data is not None and (not self.data or self.data.isspace())


def read_source(path: str) -> Source:
    """Read the whole file once: its digest and, for the progress bar, its number of lines.

    A file's digest is the only thing that makes resuming safe: with the same size and the same
    first bytes a file may still have lost a line in the middle.
    """
    before = _regular_file(path)
    digest = hashlib.sha256()
    num_bytes = num_newlines = 0
    last = b"\n"
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                num_bytes += len(block)
                num_newlines += block.count(b"\n")
                last = block
            num_lines = num_newlines + (not last.endswith(b"\n"))
            file.seek(0)
            if is_parquet(file):
                num_lines = ParquetRows(file).num_rows
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
    """As `raw_lines`; of a Parquet file its rows."""
    if not is_parquet(file):
        yield from raw_lines(file, max_line_bytes=max_line_bytes)
        return
    for number, data in enumerate(ParquetRows(file).lines(), start=1):
        yield RawLine(number=number, data=data if len(data) <= max_line_bytes else None)


def raw_lines(file: BinaryIO, *, max_line_bytes: int) -> Iterator[RawLine]:
    """Lines of `file`, numbered from 1. Holds little more than `max_line_bytes` (newline and byte
    order mark do not count) of one line in memory."""
    number = 0
    while data := file.readline(max_line_bytes + 1 + (0 if number else len(_BOM))):
        number += 1
        is_whole = data.endswith(b"\n")
        if number == 1:
            data = data.removeprefix(_BOM)
        if len(data) - is_whole <= max_line_bytes:
            yield RawLine(number=number, data=data)
            continue
        if not is_whole:
            _skip_rest(file)
        yield RawLine(number=number, data=None)


def _skip_rest(file: BinaryIO) -> None:
    while rest := file.readline(_BLOCK_BYTES):
        if rest.endswith(b"\n"):
            return


def _regular_file(path: str) -> os.stat_result:
    try:
        found = os.stat(path)
    except OSError as error:
        raise JobFileError(f"cannot read the input {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise JobFileError(
            f"the input {path} is no regular file: it is read more than once, to resume"
        )
    return found
