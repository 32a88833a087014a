"""One store at a time for a folder of batches, and one server where the store is not shared."""

from __future__ import annotations

import fcntl
from io import TextIOWrapper
from pathlib import Path

from cosched.errors import ConfigError

__all__ = ["lock_folder"]


def lock_folder(folder: Path, *, is_shared: bool = False) -> TextIOWrapper:
    """An open file that keeps other servers out of `folder`, which is made, until it is closed or
    the process ends; with `is_shared` only those that do not share. ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"batches.folder {str(folder)!r}: {error.strerror}") from None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"batches.folder {str(folder)!r}: another server uses it") from None
    return lock
