"""Lines of JSON objects, with the place of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosched_traces.errors import RowError
from cosched_traces.rows import numbered_lines

__all__ = ["count", "json_lines", "number"]


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of a JSONL file, gzip or not; empty lines are no rows."""
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise RowError(path, number, f"no JSON: {error}") from None
        if not isinstance(value, dict):
            raise RowError(path, number, f"no JSON object but {type(value).__name__}")
        yield number, value


def count(
    path: Path, line: int, fields: dict[str, Any], field: str, *, at_least: int | None = None
) -> int:
    """A whole number of an object."""
    value = fields.get(field)
    if type(value) is not int:
        raise RowError(path, line, f"{field} is no whole number: {value!r}")
    if at_least is not None and value < at_least:
        raise RowError(path, line, f"{field} {value} is less than {at_least}")
    return value


def number(path: Path, line: int, fields: dict[str, Any], field: str) -> float:
    """A finite number of an object."""
    value = fields.get(field)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) < float("inf")
    ):
        raise RowError(path, line, f"{field} is no number: {value!r}")
    return float(value)
