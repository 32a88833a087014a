"""Lines of JSON objects, with the place of what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from cosched_traces.errors import RowError
from cosched_traces.rows import numbered_lines

T = TypeVar("T")

Positive = Annotated[int, msgspec.Meta(ge=1)]
Ids = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
Text = Annotated[str, msgspec.Meta(min_length=1)]


def json_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """(line number, object) of each line of a JSONL file, gzip or not; empty lines are no rows.

    kind  what the object is: `dict`, or a struct, whose unknown fields are left out
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
    """A part of an object. RowError where it is none of its kind."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RowError(path, line, f"{error}: {str(value)[:80]}") from None
