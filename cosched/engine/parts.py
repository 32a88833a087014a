"""A log in parts: the newest under its own name, older ones beside it, the oldest deleted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO

from cosched.errors import ConfigError

__all__ = ["NUM_PARTS", "PartWriter", "parts_of"]

NUM_PARTS = 4
"""Most parts kept. FILE is the one being written; the others are FILE-000000, FILE-000001, ..."""


class PartWriter:
    """Writes lines to `path`, in parts that together take about `max_bytes`.

    Each line is handed to the system at once: a server mostly ends by a signal, and what it decided
    last is of interest. Parts of an earlier log of the same name are deleted.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_part_bytes = max_bytes // NUM_PARTS
        self._num_bytes = 0
        self._number = -1
        self._file: IO[bytes] | None = None
        try:
            for old in _rotated(path):
                old.unlink()
        except OSError as error:
            raise ConfigError(f"cannot delete the log {str(path)!r}: {error.strerror}") from None

    @property
    def is_full(self) -> bool:
        return self._num_bytes >= self._max_part_bytes

    def start(self) -> int:
        """Begin the next part and return its number. ConfigError when it cannot be written."""
        try:
            if self._file is not None:
                self._file.close()
                self._path.rename(_part(self._path, self._number))
                _part(self._path, self._number - NUM_PARTS + 1).unlink(missing_ok=True)
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"cannot write the log {str(self._path)!r}: {error.strerror}"
            ) from None
        self._num_bytes = 0
        self._number += 1
        return self._number

    def write(self, line: bytes) -> None:
        assert self._file is not None, "start comes first"
        self._num_bytes += self._file.write(line + b"\n")


def parts_of(path: Path) -> list[Path]:
    """The files of a log, oldest first. ConfigError when there is none."""
    if not path.is_file():
        raise ConfigError(f"no file {str(path)!r}")
    return [*_rotated(path), path]


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}-{number:06d}")


def _rotated(path: Path) -> list[Path]:
    pattern = re.compile(re.escape(path.name) + r"-\d{6}")
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(other for other in beside if pattern.fullmatch(other.name))
