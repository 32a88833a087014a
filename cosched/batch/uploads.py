"""What is kept of an uploaded file: its bytes, or the rows of a Parquet file as lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from cosched.batch.config import BatchesConfig
from cosched.batch.errors import ApiError
from cosched.batch.jsonl.parquet import ParquetRows, is_parquet
from cosched.errors import CoschedError

_BLOCK_BYTES = 1 << 20


def blocks_of(content: BinaryIO, *, config: BatchesConfig) -> Iterator[bytes]:
    """JSONL, a block at a time, with line N for row N. ApiError 400, 413: a Parquet file is none
    or has too much in it; may come in the midst of it."""
    if not is_parquet(content):
        while block := content.read(_BLOCK_BYTES):
            yield block
        return
    num_bytes = 0
    try:
        rows = ParquetRows(content, max_group_bytes=config.max_file_bytes)
        if rows.num_rows > config.max_lines:
            raise ApiError(
                f"a batch may have {config.max_lines} lines (batches.max_lines), and the Parquet "
                f"file has {rows.num_rows} rows",
                param="file",
            )
        for number, line in enumerate(rows.lines(), start=1):
            num_bytes += len(line) + 1
            if num_bytes > config.max_file_bytes:
                raise too_large(config, f", and as JSONL row {number} goes beyond that")
            yield line + b"\n"
    except ApiError:
        raise
    except CoschedError as error:
        raise ApiError(str(error), param="file") from None


def too_large(config: BatchesConfig, more: str = "") -> ApiError:
    limit = config.max_file_bytes
    message = f"a file may have {limit} bytes (batches.max_file_mb){more}"
    return ApiError(message, status=413, param="file")
