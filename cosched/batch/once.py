"""`Idempotency-Key`: a request that is sent again gets the object that the first one made.

A key is recorded in the transaction that adds its object, so both are there or neither. It is kept
for `KEPT_S`, or until its object is gone. Requests that are refused record nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from cosched.batch.database import Database, batches, files, idempotency_keys
from cosched.batch.errors import ApiError, StoreUnavailableError

HEADER = "Idempotency-Key"
KEPT_S = 24 * 3600
MAX_CHARS = 255
_BLOCK_BYTES = 1 << 20
_keys = idempotency_keys.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """A request with a key.

    owner   whose key it is, as of files and batches
    digest  of what it asks for (`file_digest`, `json_digest`); None: its body is not read yet
    """

    owner: str
    route: Literal["files", "batches"]
    key: str
    digest: str | None = None

    def check(self, digest: str) -> None:
        """ApiError 422 if the first request asked for something else. 409, which some APIs answer,
        is sent again by the `openai` client."""
        if self.digest is not None and digest != self.digest:
            raise ApiError(
                f"{HEADER} {self.key!r} was used for another POST /v1/{self.route} in the last "
                f"{KEPT_S // 3600} h; choose a new key for each request",
                status=422,
                param=HEADER,
                code="idempotency_key_reused",
            )


def once_of(
    headers: Mapping[str, str], *, owner: str, route: Literal["files", "batches"]
) -> Once | None:
    """By the key of a request, None: it has none. ApiError 400."""
    key = headers.get(HEADER.lower())
    if key is None:
        return None
    if 0 < len(key) <= MAX_CHARS and key.isascii() and key.isprintable():
        return Once(owner=owner, route=route, key=key)
    raise ApiError(
        f"{HEADER} must be 1 to {MAX_CHARS} printable ASCII characters; it has {len(key)}",
        param=HEADER,
    )


def file_digest(content: BinaryIO, *fields: str | int | None) -> str:
    """Of an upload, read from its start and left there, and of other fields of its form."""
    found = hashlib.sha256(msgspec.json.encode(fields))
    content.seek(0)
    while block := content.read(_BLOCK_BYTES):
        found.update(block)
    content.seek(0)
    return found.hexdigest()


def json_digest(body: bytes) -> str:
    """Of a JSON value, however it is written."""
    value = msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    return hashlib.sha256(value).hexdigest()


def recorded(connection: sa.Connection, once: Once, *, now: int) -> str | None:
    """The id of the object that the first request made. ApiError 422."""
    wanted = sa.select(_keys.object_id, _keys.digest).where(_is(once), ~_is_stale(now))
    row = connection.execute(wanted).first()
    if row is None:
        return None
    once.check(row.digest)
    return str(row.object_id)


def claim(
    database: Database, connection: sa.Connection, once: Once, name: str, *, now: int
) -> str | None:
    """Record that a request makes the object `name`, or return the id of the object that an earlier
    one made. Of two at a time one waits for the other. ApiError 422, 503."""
    connection.execute(idempotency_keys.delete().where(_is(once), _is_stale(now)))
    insert = (postgresql.insert if database.is_shared else sqlite.insert)(idempotency_keys)
    values = {
        "owner": once.owner,
        "route": once.route,
        "key": once.key,
        "digest": once.digest,
        "object_id": name,
        "expires_at": now + KEPT_S,
    }
    insert = insert.values(values).on_conflict_do_nothing()
    if connection.execute(insert.returning(_keys.key)).first() is not None:
        return None
    earlier = recorded(connection, once, now=now)
    if earlier is None:  # its object went this moment
        raise StoreUnavailableError(f"the object of an {HEADER} is being deleted")
    return earlier


def remove_stale(connection: sa.Connection, *, now: int) -> None:
    connection.execute(idempotency_keys.delete().where(_is_stale(now)))


def _is(once: Once) -> sa.ColumnElement[bool]:
    return sa.and_(_keys.owner == once.owner, _keys.route == once.route, _keys.key == once.key)


def _is_stale(now: int) -> sa.ColumnElement[bool]:
    """Its time is over, or its object is deleted or has expired."""
    has_file = sa.exists().where(
        files.c.id == _keys.object_id,
        sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now),
    )
    has_batch = sa.exists().where(batches.c.id == _keys.object_id)
    return sa.or_(_keys.expires_at <= now, sa.not_(sa.or_(has_file, has_batch)))
