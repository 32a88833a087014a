"""A log in parts: the newest under its own name, older ones beside it, the oldest deleted."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from cosched.errors import ConfigError

NUM_PARTS = 4
"""Full parts kept. FILE is the one being written; the others are FILE-000000, FILE-000001, ..."""

_MOST_FILES = 64  # a server that restarts again and again leaves many short parts


class LineFile:
    """Hands each line to the system at once: a server mostly ends by a signal, and what it did last
    is of interest. Only the user of the server may read a new file: it names requests and owners.
    OSError when a line does not fit on the disk."""

    def __init__(self, path: Path) -> None:
        private = partial(os.open, mode=0o600)
        self._file: IO[bytes] = open(path, "wb", buffering=0, opener=private)

    def write(self, line: bytes) -> int:
        num_bytes = self._file.write(line + b"\n")
        if num_bytes <= len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return num_bytes

    def close(self) -> None:
        self._file.close()


class PartWriter:
    """Writes lines to `path`, in parts that together take about `max_bytes`, those of earlier logs
    of the same name included: what one left becomes an older part."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_part_bytes = max_bytes // NUM_PARTS
        self._num_bytes = 0
        self._number = -1
        self._file: LineFile | None = None

    @property
    def is_full(self) -> bool:
        return self._num_bytes >= self._max_part_bytes and self._path.is_file()

    def start(self) -> int:
        """Begin the next part and return its number, from 0 in each log. OSError when it cannot be
        written."""
        if self._file is not None:
            self._file.close()
        # Devices and pipes have no parts.
        if self._path.is_file() and self._path.stat().st_size:
            parts = _rotated(self._path)
            parts.append(_part(self._path, _number(parts[-1]) + 1 if parts else 0))
            self._path.rename(parts[-1])
            self._delete_oldest(parts)
        self._file = LineFile(self._path)
        self._num_bytes = 0
        self._number += 1
        return self._number

    def write(self, line: bytes) -> None:
        """OSError when it cannot be written."""
        assert self._file is not None, "start comes first"
        self._num_bytes += self._file.write(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _delete_oldest(self, parts: Sequence[Path]) -> None:
        left_bytes = (NUM_PARTS - 1) * self._max_part_bytes
        for count, part in enumerate(reversed(parts)):
            # A full part is a line longer than it may be.
            left_bytes -= min(part.stat().st_size, self._max_part_bytes)
            if left_bytes < 0 or count >= _MOST_FILES:
                part.unlink()


def parts_of(path: Path) -> list[Path]:
    """The files of the newest log of this name, oldest first. ConfigError when there is none.

    A part of an earlier one is a log of its own under its own name.
    """
    if not path.is_file():
        raise ConfigError(f"no file {str(path)!r}")
    parts = [*_rotated(path), path]
    for index in range(len(parts) - 1, -1, -1):
        if _is_first(parts[index]):
            return parts[index:]
    return parts


def switched_off(what: str, path: Path, error: OSError) -> str:
    """What to warn of when a log ends because a line could not be written."""
    return f"the {what} {str(path)!r} is switched off until the next start: {error.strerror}"


class _FirstLine(msgspec.Struct):
    part: int


def _is_first(part: Path) -> bool:
    with part.open("rb") as file:
        try:
            return msgspec.json.decode(file.readline(), type=_FirstLine).part == 0
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}-{number:06d}")


def _number(part: Path) -> int:
    return int(part.name.rpartition("-")[2])


def _rotated(path: Path) -> list[Path]:
    pattern = re.compile(re.escape(path.name) + r"-\d{6}")
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(other for other in beside if pattern.fullmatch(other.name))
