"""Opens the store of a server: its lock, its database and the storage of its files."""

from __future__ import annotations

import fcntl
import re
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

import platformdirs
import sqlalchemy as sa

from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database, database_url, store_row
from cosched.batch.storage import (
    PRIVATE,
    FilesUnavailableError,
    FolderStorage,
    Storage,
    UrlStorage,
    folder_of,
    without_secrets,
)
from cosched.errors import ConfigError

_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class OpenStore:
    """`lock` keeps other servers out."""

    database: Database
    storage: Storage
    lock: TextIOWrapper | None

    def close(self) -> None:
        self.database.close()
        if self.lock is not None:
            self.lock.close()


def default_folder(*, model: str, port: int) -> Path:
    """In the user's data directory, by served model name and port: servers of one machine have
    different ports, and a restart with the same command finds its batches. ConfigError: the user
    has no data directory."""
    name = re.sub(r"[^\w.-]+", "_", model).strip("._")[-_MAX_NAME:]
    data = platformdirs.user_data_path("cosched")
    if not data.is_absolute():
        raise ConfigError("the user has no home directory")
    return data / "batches" / f"{name}-{port}"


def open_store(config: BatchesConfig) -> OpenStore:
    """ConfigError: the database or the storage cannot be opened, or they belong to different
    stores."""
    assert config.folder is not None
    folder = folder_of(config.folder)
    with ExitStack() as on_error:
        lock = _lock(config, folder)
        if lock is not None:
            on_error.callback(lock.close)
        try:
            storage = UrlStorage(config.folder) if folder is None else FolderStorage(folder)
        except OSError as error:
            raise ConfigError(f"batches.folder {str(folder)!r}: {error.strerror}") from None
        sqlite = f"sqlite:///{Path(config.folder if folder is None else folder) / 'batches.sqlite'}"
        database = Database(config.url or sqlite)
        on_error.callback(database.close)
        _check_storage(database, storage, f"batches.folder {without_secrets(config.folder)!r}")
        on_error.pop_all()
    return OpenStore(database, storage, lock)


def check_store(config: BatchesConfig) -> None:
    """ConfigError as `open_store`."""
    open_store(config).close()


def lock_file(path: Path, *, what: str, is_shared: bool = False) -> TextIOWrapper:
    """An open file that keeps other servers out of `what` until it is closed or the process ends;
    `is_shared` admits others that share too. Makes the file and its folder. ConfigError."""
    try:
        path.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        lock = path.open("w")
    except FileExistsError:
        raise ConfigError(f"{what} is a file, and must be a folder") from None
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:  # in use, or a file system without locks
        lock.close()
        is_used = isinstance(error, BlockingIOError)
        reason = "another server uses it" if is_used else error.strerror
        raise ConfigError(f"{what}: {reason}") from None
    return lock


def _lock(config: BatchesConfig, folder: Path | None) -> TextIOWrapper | None:
    """None: the store needs no lock."""
    if folder is not None:
        what = f"batches.folder {str(folder)!r}"
        return lock_file(folder / "lock", what=what, is_shared=config.is_shared)
    if config.is_shared:
        return None
    database = database_url(config.url or "").database
    if not database or database == ":memory:":
        raise ConfigError(f"batches.url {config.url!r} must name a file: sqlite:///FILE")
    return lock_file(Path(f"{database}.lock"), what=f"batches.url {config.url!r}")


def _check_storage(database: Database, storage: Storage, what: str) -> None:
    """Both must have the same id, which the first server sets: a sweep removes the files that the
    database does not list, and batches whose files are missing fail."""
    with database.write() as connection:
        known = connection.execute(sa.select(store_row.c.folder_id).with_for_update()).scalar_one()
        try:
            found = storage.get_id()
            if known is None and found is None:
                known = found = secrets.token_hex(16)
                storage.set_id(known)
                connection.execute(store_row.update().values(folder_id=known))
        except OSError as error:
            raise ConfigError(f"{what}: {error.strerror or error}") from None
        except FilesUnavailableError as error:
            raise ConfigError(f"{what}: {error.reason}") from None
    if found == known:
        return
    reason = (
        "the store that batches.url names has its files elsewhere; all its servers must use the "
        "same folder"
        if found is None
        else "it has the files of another store, which this one would remove"
    )
    raise ConfigError(f"{what}: {reason} (store-id)")
