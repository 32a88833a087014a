"""Lines of JSON objects, with the place of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosched_traces.errors import RowError
from cosched_traces.rows import numbered_lines

__all__ = ["json_lines"]


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
