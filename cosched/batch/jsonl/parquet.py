"""Parquet files of requests: each row is a line of the batch format, with its columns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from cosched.batch.jsonl import parquet_decoder
from cosched.batch.jsonl.errors import JobFileError
from cosched.errors import ConfigError

_MAGIC = b"PAR1"
_ERROR_BYTES = 1 << 16
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
"""Each arena of glibc would take its share of the address space that is limited."""


class TooLargeError(JobFileError):
    """Decoding takes more memory or time than a file may take."""


class _Start(msgspec.Struct):
    rows: int


class _Fault(msgspec.Struct):
    kind: str
    message: str


def is_parquet(file: BinaryIO) -> bool:
    """By the first bytes, which no JSON begins with. `file` is at its start, before and after."""
    magic = file.read(len(_MAGIC))
    file.seek(0)
    return magic == _MAGIC


class ParquetRows:
    """The rows of a Parquet file as lines of JSON, decoded by another process with a limit on its
    memory and time (`parquet_decoder`): files of a few kilobytes may decode to gigabytes. Use it
    as a context manager, which ends that process."""

    def __init__(self, file: BinaryIO, *, memory_mb: int = 1000) -> None:
        """`file` has a file descriptor. memory_mb: that decoding may take [MB of 1,000,000 bytes].
        JobFileError: the file cannot be read or lacks columns;
        TooLargeError; ConfigError: pyarrow is missing."""
        stdin = file.fileno()  # before `flush`: only then is it a file that was in memory
        file.flush()
        self._memory_mb = memory_mb
        self._decoder = subprocess.Popen(
            # The folder of the program has modules whose names others have too: it is not searched.
            [sys.executable, "-P", parquet_decoder.__file__, str(memory_mb)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
        )
        assert self._decoder.stdout is not None
        self._lines = self._decoder.stdout
        try:
            start = self.readline(-1)
            self.num_rows = msgspec.json.decode(start, type=_Start).rows if start else 0
        except BaseException:
            self.close()
            raise

    def read(self, num_bytes: int) -> bytes:
        """At most this much of the rest, b"" at the end. JobFileError: the file is damaged;
        TooLargeError."""
        found = self._lines.read(num_bytes)
        if not found:
            self._check_end()
        return found

    def readline(self, num_bytes: int) -> bytes:
        """As `read`, up to the end of a line."""
        found = self._lines.readline(num_bytes)
        if not found:
            self._check_end()
        return found

    def close(self) -> None:
        self._decoder.kill()
        self._decoder.wait()
        for pipe in (self._decoder.stdout, self._decoder.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_end(self) -> None:
        assert self._decoder.stderr is not None
        said = self._decoder.stderr.read(_ERROR_BYTES)
        code = self._decoder.wait()
        if not code:
            return
        if code == -signal.SIGXCPU:
            raise TooLargeError(
                f"the Parquet file takes more than {parquet_decoder.CPU_S} s to decode"
            )
        try:
            fault = msgspec.json.decode(said, type=_Fault)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Where C++ cannot report that memory is missing, it ends the process.
            raise TooLargeError(
                f"the Parquet file cannot be decoded with {self._memory_mb} MB of memory"
            ) from None
        if fault.kind == parquet_decoder.CONFIG:
            raise ConfigError(fault.message)
        kind = TooLargeError if fault.kind == parquet_decoder.TOO_LARGE else JobFileError
        raise kind(fault.message)
