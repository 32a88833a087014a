"""The store of a server: its database, and the folder that has its files."""

from __future__ import annotations

import secrets
from io import TextIOWrapper
from pathlib import Path

import sqlalchemy as sa

from cosched.batches.config import BatchesConfig
from cosched.batches.database import Database, store_row
from cosched.batches.lock import lock_folder
from cosched.errors import ConfigError

__all__ = ["check_store", "open_store"]

_ID_FILE = "store-id"


def open_store(config: BatchesConfig) -> tuple[TextIOWrapper, Database]:
    """The lock of the folder, and the database. ConfigError: one cannot be had, or the two do not
    belong together."""
    assert config.folder is not None
    folder = Path(config.folder)
    lock = lock_folder(folder, is_shared=config.is_shared)
    try:
        database = Database(config.url or f"sqlite:///{folder / 'batches.sqlite'}")
        try:
            _check_folder(database, folder)
        except BaseException:
            database.close()
            raise
    except BaseException:
        lock.close()
        raise
    return lock, database


def check_store(config: BatchesConfig) -> None:
    """ConfigError as `open_store`."""
    lock, database = open_store(config)
    database.close()
    lock.close()


def _check_folder(database: Database, folder: Path) -> None:
    """Files that the database does not list are removed, and of those that it lists the batches
    fail which do not find them: both have the same id, which the first server gives them."""
    path = folder / _ID_FILE
    with database.write() as connection:
        known = connection.execute(sa.select(store_row.c.folder_id).with_for_update()).scalar_one()
        try:
            found = path.read_text().strip() if path.exists() else None
            if known is None and found is None:
                known = found = secrets.token_hex(16)
                path.write_text(f"{known}\n")
                connection.execute(store_row.update().values(folder_id=known))
        except OSError as error:
            raise ConfigError(f"batches.folder {str(folder)!r}: {error.strerror}") from None
    if found == known:
        return
    reason = (
        "it is not the folder in which the store that batches.url names has its files; all its "
        "servers must have the same one"
        if found is None
        else "it has the files of another store, which this one would remove"
    )
    raise ConfigError(f"batches.folder {str(folder)!r}: {reason} ({path.name})")
