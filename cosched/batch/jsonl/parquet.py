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
    """By its first bytes, which begin no JSON. `file` is at its beginning, before and after."""
    magic = file.read(len(_MAGIC))
    file.seek(0)
    return magic == _MAGIC


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON, without a line break.

    It is checked in `cosched.batch.jsonl.lines`. A body is an object, or the text of one; a field
    that is null is left out, since Parquet gives each row the fields of all.
    """
    body = row.get("body")
    if isinstance(body, str):
        body = body.encode()
    if isinstance(body, bytes):
        # JSON has line breaks between its tokens only.
        body = msgspec.Raw(body.translate(_LINE_BREAKS))
    else:
        body = _without_nulls(body)
    entry = {name: row[name] for name in COLUMNS[:-1] if row.get(name) is not None}
    return msgspec.json.encode({**entry, "body": body})


class ParquetRows:
    """The rows of an open Parquet file, read a few at a time however large its row groups are."""

    def __init__(self, file: BinaryIO, *, max_group_bytes: int | None = None) -> None:
        """max_group_bytes  most that a row group may have when it is decompressed

        JobFileError: the file cannot be read, or misses columns; ConfigError: pyarrow is missing.
        """
        try:
            from pyarrow import ArrowException, parquet, types
        except ImportError as error:
            raise ConfigError(
                f"a Parquet file needs pyarrow ({error}): pip install 'cosched[parquet]', or "
                "give the lines as JSONL"
            ) from None
        self._faults: tuple[type[BaseException], ...] = (
            ArrowException,
            OSError,
            TypeError,
            ValueError,
        )
        try:
            schema = parquet.read_schema(file)
            file.seek(0)
            # A value that stands in many rows is held once.
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
        self.num_rows: int = self._file.metadata.num_rows
        if max_group_bytes is not None:
            self._check_groups(max_group_bytes)

    def _check_groups(self, most: int) -> None:
        metadata = self._file.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = [group.column(index) for index in range(group.num_columns)]
            num_bytes = sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.split(".")[0] in COLUMNS
            )
            if num_bytes > most:
                raise JobFileError(
                    f"row group {number + 1} of the Parquet file has {num_bytes} bytes when it is "
                    f"decompressed, and may have {most}"
                )

    def lines(self) -> Iterator[bytes]:
        """Row after row, as `line_of`. JobFileError: the file is damaged."""
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
