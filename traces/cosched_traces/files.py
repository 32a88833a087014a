"""Lines of trace files, with the place of what is wrong in them."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from cosched_traces.errors import RowError, WorkloadError

T = TypeVar("T")

Positive = Annotated[int, msgspec.Meta(ge=1)]
Ids = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
Text = Annotated[str, msgspec.Meta(min_length=1)]

_GZIP_MAGIC = b"\x1f\x8b"


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of a text file, gzip or not.

    Raises `WorkloadError` if there is no such file and `RowError` at the first unreadable line.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
                for number, line in enumerate(text, 1):
                    yield number, line
    except (FileNotFoundError, IsADirectoryError) as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise RowError(path, number + 1, f"cannot be read: {error}") from error


def first_line(path: Path) -> str:
    """Empty for an empty file."""
    return next((line for _, line in islice(numbered_lines(path), 1)), "")


def json_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """(line number, object) of each line of a JSONL file; empty lines are skipped.

    kind  type of the objects: `dict`, or a struct, whose unknown fields are ignored
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RowError(path, number, f"{error}: {line.strip()[:80]}") from None


def convert(path: Path, line: int, value: Any, kind: type[T]) -> T:
    """A part of an object. RowError if it is not of this type."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RowError(path, line, f"{error}: {str(value)[:80]}") from None
