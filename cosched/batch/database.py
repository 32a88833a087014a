"""The tables of the store, and transactions on them: SQLite, or PostgreSQL by its URL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from cosched.batch.errors import StoreUnavailableError
from cosched.errors import ConfigError

VERSION = 10
"""Of the tables below. A change of them needs a new version: no other is read."""

_LOCK_S = 5
"""For a lock: of rows, of tables, or of SQLite's one writer."""
_STATEMENT_S = 60
"""For a statement of PostgreSQL; the longest delete the lines of an ended batch."""
_CONNECT_TIMEOUT_S = 10
_CONNECTIONS, _MORE_CONNECTIONS = 14, 2
"""That are kept, one for each thread of the service (7), of the feeder (6) and of callbacks, and
what may be beside."""
_TIMEOUTS = f"-c lock_timeout={_LOCK_S}s -c statement_timeout={_STATEMENT_S}s"
_TABLES_LOCK, _QUOTAS_LOCK = 0x636F7363686564, 0x636F7363686565
"""Advisory locks of PostgreSQL: for changes of tables, and for counting what a tenant has."""


class _Text(sa.types.TypeDecorator[str]):
    """Text that may contain U+0000, which JSON allows and PostgreSQL does not."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\\", "\\\\").replace("\0", "\\0")

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or dialect.name != "postgresql" or "\\" not in value:
            return value
        return "\\".join(part.replace("\\0", "\0") for part in value.split("\\\\"))


_metadata = sa.MetaData()

store_row = sa.Table(
    "schema_version",
    _metadata,
    sa.Column("version", sa.Integer, nullable=False),
    # The id of the folder with the files of this store, which is also in the folder.
    sa.Column("folder_id", sa.String(64)),
)
"""One row for the whole store."""

servers = sa.Table(
    "servers",
    _metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    # A server without a heartbeat until then is dead.
    sa.Column("until", sa.Float(53), nullable=False),
)

files = sa.Table(
    "files",
    _metadata,
    # The order in which files are listed; ids are random.
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", _Text, nullable=False, unique=True),
    sa.Column("owner", sa.String(80), nullable=False),
    sa.Column("purpose", _Text, nullable=False),
    sa.Column("filename", _Text, nullable=False),
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
    sa.Column("id", _Text, nullable=False, unique=True),
    sa.Column("owner", sa.String(80), nullable=False),
    sa.Column("tenant", _Text, nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(16), nullable=False),
    sa.Column("window_s", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False, default=0),
    # Of the input file, until `total` is known; 0: not counted.
    sa.Column("num_lines", sa.BigInteger, nullable=False, default=0),
    sa.Column("metadata", sa.JSON),
    sa.Column("output_expires_after_s", sa.BigInteger),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("ending", sa.String(16)),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Column("times", sa.JSON, nullable=False),
    sa.Column("faults", sa.JSON, nullable=False),
    # Names of fields that have no effect.
    sa.Column("ignored", sa.JSON, nullable=False),
    sa.Column("traceparent", sa.String(55)),
    sa.Column("total", sa.Integer, nullable=False, default=0),
    sa.Column("completed", sa.Integer, nullable=False, default=0),
    sa.Column("failed", sa.Integer, nullable=False, default=0),
    sa.Column("closed", sa.Integer, nullable=False, default=0),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("device_s", sa.Float(53), nullable=False, default=0),
    sa.Column("model", sa.String(1024)),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    # The server that reads its lines. Two would add them twice.
    sa.Column("validated_by", sa.String(64)),
    sa.Index("batches_by_owner", "owner", "seq"),
    sa.Index("batches_by_status", "status"),
    sqlite_autoincrement=True,
)


idempotency_keys = sa.Table(
    "idempotency_keys",
    _metadata,
    sa.Column("owner", sa.String(80), primary_key=True),
    sa.Column("route", sa.String(16), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    # Of what the request asks for.
    sa.Column("digest", sa.String(64), nullable=False),
    # The file or the batch that it made.
    sa.Column("object_id", sa.String(64), nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)


callbacks = sa.Table(
    "callbacks",
    _metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("batch_id", _Text, nullable=False),
    sa.Column("owner", sa.String(80), nullable=False),
    sa.Column("url", _Text, nullable=False),
    # With the port; one is called at a time.
    sa.Column("host", _Text, nullable=False),
    # The batch names the URL, otherwise the configuration.
    sa.Column("is_own", sa.Boolean, nullable=False),
    # The status with which the batch ended.
    sa.Column("event", sa.String(16), nullable=False),
    sa.Column("ended_at", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("num_attempts", sa.Integer, nullable=False),
    # The next attempt, or the end of the lease of this one; null: there is none.
    sa.Column("due_at", sa.Float(53)),
    # Why the last attempt failed.
    sa.Column("reason", _Text),
    sa.Index("callbacks_due", "due_at"),
    sa.Index("callbacks_by_batch", "batch_id"),
    sqlite_autoincrement=True,
)


class LineState:
    """Of a line of an open batch; the lines are deleted when it ends."""

    WAITING = 0
    TAKEN = 1
    DONE = 2


lines = sa.Table(
    "lines",
    _metadata,
    sa.Column("batch", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("custom_id", _Text, nullable=False),
    sa.Column("start", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("prefix_key", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    # The server that has taken the line, or for which it is set aside; null: it is free.
    sa.Column("lease_owner", sa.String(64)),
    sa.Index("lines_in_order", "batch", "state", "lease_owner", "prefix_key", "number"),
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


def database_url(url: str) -> sa.URL:
    """The URL with its driver. ConfigError: not a URL, or of another kind of database."""
    try:
        made = sa.make_url(url)
    except sa.exc.ArgumentError:
        # The URL is not shown: it may have a password.
        raise ConfigError(f"batches.url {_WANTED_URL}: this is not a URL") from None
    if made.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return made.set(drivername="postgresql+psycopg")
    if made.get_backend_name() != "sqlite":
        raise ConfigError(f"batches.url {_WANTED_URL}, not {made.drivername}://")
    return made


_WANTED_URL = "must be postgresql://USER@HOST/DATABASE or sqlite:///FILE"


def url_without_password(url: str) -> str:
    """For people to read. ConfigError as `database_url`."""
    made = database_url(url)
    hidden = {name: "hidden" for name in made.query if name in _SECRETS}
    given = made.set(drivername=sa.make_url(url).drivername)
    return given.update_query_dict(hidden).render_as_string(hide_password=True)


_SECRETS = ("password", "sslpassword")
"""URL parameters of libpq."""


class Database:
    """Transactions, for any number of threads; each may raise StoreUnavailableError. `is_shared`:
    several servers may use it at a time."""

    def __init__(self, url: str) -> None:
        """Make the tables. ConfigError when there are others."""
        made = database_url(url)
        self.is_shared = made.get_backend_name() == "postgresql"
        # SQLite has one writer at a time. Waiting here is fairer than in its busy handler, and no
        # transaction fails because another wrote after it had read.
        self._writer = None if self.is_shared else threading.Lock()
        options: dict[str, Any] = {
            "pool_size": _CONNECTIONS,
            "max_overflow": _MORE_CONNECTIONS,
            "pool_timeout": _LOCK_S,
            "hide_parameters": True,  # of errors: they are clients' data
        }
        if self.is_shared:
            given = {"connect_timeout": str(_CONNECT_TIMEOUT_S), "options": _TIMEOUTS}
            made = made.update_query_dict(given | dict(made.query))
            try:
                # Closed connections are replaced.
                self._engine = sa.create_engine(made, pool_pre_ping=True, **options)
            except ImportError as error:
                raise ConfigError(
                    f"batches.url names PostgreSQL, which needs psycopg ({error}): "
                    "pip install 'cosched[postgres]'"
                ) from None
        else:
            if made.database is None:  # in memory: of one connection, so of one thread
                options = {"hide_parameters": True, "poolclass": sa.StaticPool}
            self._engine = sa.create_engine(made, **options)
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", lambda it: it.exec_driver_sql("BEGIN"))
        try:
            self._make_tables()
        except (StoreUnavailableError, sa.exc.DBAPIError) as error:
            self.close()
            reason = error.reason if isinstance(error, StoreUnavailableError) else _reason(error)
            raise ConfigError(f"the store of batches cannot be opened: {reason}") from None
        except ConfigError:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Each statement alone sees a consistent state."""
        with _store_errors(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction. On a shared store other servers write at the same time: rows that are read
        to be changed are read ``FOR UPDATE``, batches first (in the order of their ids), then their
        lines."""
        with _store_errors(), self._alone(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._writer is None:
            yield
            return
        if not self._writer.acquire(timeout=_LOCK_S):
            raise StoreUnavailableError(f"another thread writes for more than {_LOCK_S} s")
        try:
            yield
        finally:
            self._writer.release()

    def add_cost(self, batch: str, seconds: float) -> None:
        """A line that ends without an answer has cost so much [s]."""
        with self.write() as connection:
            cost = batches.c.device_s + seconds
            connection.execute(batches.update().where(batches.c.id == batch).values(device_s=cost))

    def keep_others_from_adding_files(self, connection: sa.Connection) -> None:
        """Until the end of the transaction."""
        if self.is_shared:
            connection.exec_driver_sql("LOCK TABLE files IN SHARE ROW EXCLUSIVE MODE")

    def keep_others_from_quotas(self, connection: sa.Connection) -> None:
        """Until the end of the transaction."""
        if self.is_shared:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_QUOTAS_LOCK)))

    def close(self) -> None:
        self._engine.dispose()

    def _make_tables(self) -> None:
        with self.write() as connection:
            if self.is_shared:
                # Another server may be making them.
                connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
                connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_TABLES_LOCK)))
            _metadata.create_all(connection)
            found = connection.execute(sa.select(store_row.c.version)).scalar()
            if found is None:
                connection.execute(store_row.insert().values(version=VERSION))
            elif found != VERSION:
                raise ConfigError(
                    f"the store of batches has tables of version {found}, this cosched knows "
                    f"{VERSION}: run the cosched that wrote it"
                )


@contextmanager
def _store_errors() -> Iterator[None]:
    """StoreUnavailableError for what is not the fault of a statement: the server is down, the disk
    is full or damaged, a lock is held for too long."""
    try:
        yield
    except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
        raise StoreUnavailableError(_reason(error)) from error
    except sa.exc.TimeoutError as error:
        raise StoreUnavailableError(str(error)) from error
    except sa.exc.DatabaseError as error:
        if type(error) is not sa.exc.DatabaseError:  # a subclass: a fault of the statement
            raise
        raise StoreUnavailableError(_reason(error)) from error  # SQLite: the file is damaged


def _reason(error: sa.exc.DBAPIError) -> str:
    return str(error.orig).strip()


def _prepare_sqlite(connection: Any, record: Any) -> None:
    # Python's own transactions begin only at the first write; the event "begin" begins them.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    # A killed process loses nothing. A crash of the machine may lose the last transactions; their
    # lines are sent again.
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA busy_timeout={_LOCK_S * 1000}")
