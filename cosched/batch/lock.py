"""One store at a time for a folder of batches, and one server where the store is not shared."""

from __future__ import annotations

import fcntl
from io import TextIOWrapper
from pathlib import Path

from cosched.errors import ConfigError


def lock_file(path: Path, *, what: str, is_shared: bool = False) -> TextIOWrapper:
    """An open file that keeps other servers out of `what`, until it is closed or the process ends;
    with `is_shared` only those that do not share. It is made, with its folder. ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except FileExistsError:
        raise ConfigError(f"{what} is a file, and must be a folder") from None
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"{what}: another server uses it") from None
    except OSError as error:  # a file system without locks
        lock.close()
        raise ConfigError(f"{what}: {error.strerror}") from None
    return lock
