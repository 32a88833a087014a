"""Decodes a Parquet file in a process of its own: ``python parquet_decoder.py MEMORY_MB < FILE``.

The process limits its own memory and CPU time, because nothing in the file says what it takes to
decode it: sizes in its metadata are what the writer claims, one value of a dictionary counts once
however many rows repeat it, and a page is decompressed before a reader sees its first row. It
imports nothing of cosched, so that it starts quickly.

It writes ``{"rows": N}``, then each row as a line of JSON. An error goes to stderr as JSON: `kind`
and `message`.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

COLUMNS = ("custom_id", "method", "url", "body")
CPU_S = 60
"""That decoding may take."""
CONFIG, DAMAGED, TOO_LARGE = "config", "damaged", "too_large"
"""Kinds of errors."""

_ROWS_PER_BLOCK = 8
"""Fewer take no less time per row of the usual size, and large rows take more memory together."""
_BUFFER_BYTES = 1 << 20
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")
_NICENESS = 19
"""Chats come first where processors are few."""


class _Fault(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON without a line break; it is not checked.

    A body is an object or its JSON text. Fields that are null are left out, because Parquet gives
    each row the fields of all rows.
    """
    body = row.get("body")
    if isinstance(body, str):
        body = body.encode()
    if isinstance(body, bytes):
        # JSON has line breaks only between its tokens.
        body = msgspec.Raw(body.translate(_LINE_BREAKS))
    else:
        body = _without_nulls(body)
    entry = {name: row[name] for name in COLUMNS[:-1] if row.get(name) is not None}
    return msgspec.json.encode({**entry, "body": body})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _decode(file: BinaryIO, out: BinaryIO, memory_mb: int) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        message = (
            f"a Parquet file needs pyarrow ({error}): pip install 'cosched[parquet]', or give the "
            "lines as JSONL"
        )
        raise _Fault(CONFIG, message) from None
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # frees what it no longer needs
    _limit_resources(memory_mb)
    faults = (pyarrow.ArrowException, OSError, TypeError, ValueError)
    number = 0
    try:
        schema = parquet.read_schema(file)
        file.seek(0)
        missing = [name for name in COLUMNS if name not in schema.names]
        if missing:
            message = (
                f"the Parquet file has no column {' and no '.join(missing)}; each row has "
                f"{', '.join(COLUMNS)}"
            )
            raise _Fault(DAMAGED, message)
        # As dictionaries, values that many rows repeat are held once.
        types = pyarrow.types
        texts = [name for name in COLUMNS if types.is_string(schema.field(name).type)]
        rows = parquet.ParquetFile(
            file, read_dictionary=texts, buffer_size=_BUFFER_BYTES, pre_buffer=False
        )
        out.write(msgspec.json.encode({"rows": rows.metadata.num_rows}) + b"\n")
        out.flush()  # it may be too many
        for row in _rows(rows):
            number += 1
            out.write(line_of(row) + b"\n")
    except (MemoryError, pyarrow.ArrowMemoryError):
        message = (
            f"row {number + 1} of the Parquet file takes more than {memory_mb} MB of memory to "
            "decode; write smaller row groups, or give the lines as JSONL"
        )
        raise _Fault(TOO_LARGE, message) from None
    except BrokenPipeError:
        raise
    except faults as error:
        where = f" after row {number}" if number else ""
        raise _Fault(DAMAGED, f"the Parquet file cannot be read{where}: {error}") from None


def _rows(file: Any) -> Iterator[dict[str, Any]]:
    """However large the row groups are, a few rows at a time."""
    blocks = file.iter_batches(batch_size=_ROWS_PER_BLOCK, columns=list(COLUMNS), use_threads=False)
    for block in blocks:
        columns = {name: block.column(name) for name in COLUMNS}
        for index in range(block.num_rows):
            yield {name: found[index].as_py() for name, found in columns.items()}


def _limit_resources(memory_mb: int) -> None:
    os.nice(_NICENESS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + memory_mb * 1_000_000
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    try:
        with os.fdopen(os.dup(0), "rb") as file:
            file.seek(0)
            _decode(file, sys.stdout.buffer, int(sys.argv[1]))
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except _Fault as fault:
        sys.stdout.buffer.flush()
        fault_json = {"kind": fault.kind, "message": str(fault)}
        sys.stderr.buffer.write(msgspec.json.encode(fault_json))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
