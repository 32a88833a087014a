"""Parquet files of requests: each row is a line of the batch format, with its columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from cosched.batch.jsonl.errors import JobFileError
from cosched.errors import ConfigError

COLUMNS = ("custom_id", "method", "url", "body")
_MAGIC = b"PAR1"
_ROWS_PER_BLOCK = 64
_BUFFER_BYTES = 1 << 20
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")


def is_parquet(file: BinaryIO) -> bool:
    """By the first bytes, which no JSON begins with. `file` is at its start, before and after."""
    magic = file.read(len(_MAGIC))
    file.seek(0)
    return magic == _MAGIC


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


class ParquetRows:
    """The rows of an open Parquet file, read a few at a time however large its row groups are."""

    def __init__(self, file: BinaryIO, *, max_group_bytes: int | None = None) -> None:
        """max_group_bytes: the decompressed limit of a row group. JobFileError: the file cannot be
        read or lacks columns; ConfigError: pyarrow is missing."""
        try:
            from pyarrow import ArrowException, parquet, types
        except ImportError as error:
            raise ConfigError(
                f"a Parquet file needs pyarrow ({error}): pip install 'cosched[parquet]', or "
                "give the lines as JSONL"
            ) from None
        self._faults: tuple[type[Exception], ...] = (ArrowException, OSError, TypeError, ValueError)
        try:
            schema = parquet.read_schema(file)
            file.seek(0)
            # As dictionaries, values that many rows repeat are held once.
            texts = [name for name in schema.names if types.is_string(schema.field(name).type)]
            self._file = parquet.ParquetFile(
                file,
                read_dictionary=[name for name in texts if name in COLUMNS],
                buffer_size=_BUFFER_BYTES,
                pre_buffer=False,
            )
        except self._faults as error:
            raise _unreadable(error) from None
        missing = [name for name in COLUMNS if name not in schema.names]
        if missing:
            raise JobFileError(
                f"the Parquet file has no column {' and no '.join(missing)}; each row has "
                f"{', '.join(COLUMNS)}"
            )
        metadata = self._file.metadata
        self.num_rows: int = metadata.num_rows
        for number in range(metadata.num_row_groups if max_group_bytes is not None else 0):
            group = metadata.row_group(number)
            columns = [group.column(index) for index in range(group.num_columns)]
            num_bytes = sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.split(".")[0] in COLUMNS
            )
            if num_bytes > max_group_bytes:
                raise JobFileError(
                    f"row group {number + 1} of the Parquet file has {num_bytes} bytes "
                    f"decompressed; the limit is {max_group_bytes}"
                )

    def lines(self) -> Iterator[bytes]:
        """Each row, as `line_of`. JobFileError: the file is damaged."""
        number = 0
        try:
            blocks = self._file.iter_batches(
                batch_size=_ROWS_PER_BLOCK, columns=list(COLUMNS), use_threads=False
            )
            for block in blocks:
                columns = {name: block.column(name) for name in COLUMNS}
                for index in range(block.num_rows):
                    number += 1
                    yield line_of({name: found[index].as_py() for name, found in columns.items()})
        except self._faults as error:
            raise _unreadable(error, after=number) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _unreadable(error: BaseException, *, after: int = 0) -> JobFileError:
    where = f" after row {after}" if after else ""
    return JobFileError(f"the Parquet file cannot be read{where}: {error}")
