"""The tables of the store, and transactions on them: SQLite, or PostgreSQL by its URL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from cosched.errors import ConfigError

__all__ = ["Database", "LineState", "batches", "files", "lines", "results"]

VERSION = 1
"""Of the tables below. A change of them needs a new one, and an entry in `_UPGRADES`."""

_UPGRADES: dict[int, tuple[str, ...]] = {}
"""Version -> the SQL statements that make its tables those of the next."""

_BUSY_TIMEOUT_MS = 30_000

_metadata = sa.MetaData()

_version = sa.Table("schema_version", _metadata, sa.Column("version", sa.Integer, nullable=False))

files = sa.Table(
    "files",
    _metadata,
    # Counts up: the order in which files are listed, which ids of chance do not have.
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("owner", sa.String(80), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("batch_id", sa.String(64)),
    sa.Column("is_errors", sa.Boolean, nullable=False, default=False),
    sa.Index("files_by_owner", "owner", "seq"),
    sqlite_autoincrement=True,
)

batches = sa.Table(
    "batches",
    _metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("owner", sa.String(80), nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(16), nullable=False),
    sa.Column("window_s", sa.BigInteger, nullable=False),
    sa.Column("metadata", sa.JSON),
    sa.Column("output_expires_after_s", sa.BigInteger),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("ending", sa.String(16)),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Column("times", sa.JSON, nullable=False),
    sa.Column("faults", sa.JSON, nullable=False),
    sa.Column("total", sa.Integer, nullable=False, default=0),
    sa.Column("completed", sa.Integer, nullable=False, default=0),
    sa.Column("failed", sa.Integer, nullable=False, default=0),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Index("batches_by_owner", "owner", "seq"),
    sa.Index("batches_by_status", "status"),
    sqlite_autoincrement=True,
)


class LineState:
    """Of a line that has to be answered; it is gone once its batch has ended."""

    WAITING = 0
    TAKEN = 1
    DONE = 2


lines = sa.Table(
    "lines",
    _metadata,
    sa.Column("batch", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("start", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("prefix_key", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    # Who sends it, and until when nobody else may: one server so far, which takes all leases back
    # when it starts.
    sa.Column("lease_owner", sa.String(64)),
    sa.Column("lease_until", sa.BigInteger),
    sa.Index("lines_in_order", "batch", "state", "prefix_key", "number"),
    sqlite_with_rowid=False,
)

results = sa.Table(
    "results",
    _metadata,
    sa.Column("batch", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("is_errors", sa.Boolean, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)


class Database:
    """Transactions; for any number of threads."""

    def __init__(self, url: str) -> None:
        """Make the tables, or check that they are of this version. ConfigError."""
        try:
            self._engine = sa.create_engine(url)
        except (sa.exc.ArgumentError, ImportError) as error:
            raise ConfigError(f"batches.url: {error}") from None
        # SQLite has one writer at a time; waiting here is fairer than in its busy handler, and no
        # transaction that has read can find that it may not write.
        self._writer = threading.Lock()
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", lambda it: it.exec_driver_sql("BEGIN"))
        try:
            self._make_tables()
        except sa.exc.DBAPIError as error:
            raise ConfigError(f"the store of batches cannot be opened: {error.orig}") from None

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A consistent look at the store."""
        with self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """All or nothing of what is done in the block."""
        with self._writer, self._engine.begin() as connection:
            yield connection

    def close(self) -> None:
        self._engine.dispose()

    def _make_tables(self) -> None:
        with self.write() as connection:
            _metadata.create_all(connection)
            found = connection.execute(sa.select(_version.c.version)).scalar()
            if found is None:
                connection.execute(_version.insert().values(version=VERSION))
                return
            if found > VERSION:
                raise ConfigError(
                    f"the store of batches has tables of version {found}, this cosched knows "
                    f"{VERSION}: run the cosched that wrote it, or a newer one"
                )
            for version in range(found, VERSION):
                for statement in _UPGRADES[version]:
                    connection.exec_driver_sql(statement)
            connection.execute(_version.update().values(version=VERSION))


def _prepare_sqlite(connection: Any, record: Any) -> None:
    # Python's own transactions begin only at the first write; `begin` above begins them.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    # A killed process loses nothing; a crash of the machine may lose the last transactions, whose
    # lines are then sent again.
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
