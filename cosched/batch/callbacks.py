"""Callbacks: configured URLs are told that a batch has ended, at least once.

A callback is recorded in the transaction that ends its batch, so both are there or neither. A
server claims it for a while, sends it and records how that went; if the server ends before, the
claim does too, and any server of the store sends it again, with the same id.

Events and headers are those of OpenAI's webhooks, which are Standard Webhooks: ``webhook-id``,
``webhook-timestamp`` [s of the epoch], and ``webhook-signature``: ``v1,`` and the base64 of the
HMAC-SHA256 of "ID.TIMESTAMP.BODY".
"""

from __future__ import annotations

import base64
import hmac
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import sqlalchemy as sa

from cosched.batch.batch_records import Status
from cosched.batch.callback_rules import CallbackRules, RefusedUrlError
from cosched.batch.database import Database, callbacks


class CallbackState:
    WAITING = "waiting"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """That a batch has ended, to be told to one URL.

    is_own        the batch names the URL, otherwise the configuration
    event         the status with which the batch ended
    ended_at      when it ended
    num_attempts  begun so far
    reason        why the last one failed
    """

    seq: int
    batch_id: str
    owner: str
    url: str
    host: str
    is_own: bool
    event: str
    ended_at: int
    state: str
    num_attempts: int
    reason: str | None

    @property
    def event_id(self) -> str:
        """The same in each attempt, and for each URL."""
        return f"evt_{self.batch_id.removeprefix('batch_')}"

    def body(self) -> bytes:
        event = {
            "id": self.event_id,
            "object": "event",
            "created_at": self.ended_at,
            "type": f"batch.{self.event}",
            "data": {"id": self.batch_id},
        }
        return msgspec.json.encode(event)


def signed_headers(
    event_id: str, body: bytes, *, secrets: Sequence[bytes], now: int
) -> dict[str, str]:
    """For an attempt now. Each secret signs: while one replaces another, both hold."""
    signed = b"%s.%d.%s" % (event_id.encode(), now, body)
    signatures = [base64.b64encode(hmac.digest(one, signed, "sha256")) for one in secrets]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(f"v1,{one.decode()}" for one in signatures),
    }


def record_callbacks(
    connection: sa.Connection, batch: Any, status: Status, rules: CallbackRules, *, now: int
) -> None:
    """A batch, a row of the table, ends now."""
    rows = []
    for url, is_own in rules.urls_of(batch.metadata).items():
        row = {
            "batch_id": batch.id,
            "owner": batch.owner,
            "url": url,
            "host": "",
            "is_own": is_own,
            "event": status.value,
            "ended_at": now,
            "state": CallbackState.WAITING,
            "num_attempts": 0,
            "due_at": now,
            "reason": None,
        }
        try:
            row["host"] = rules.checked(url).netloc.decode("ascii")
        except RefusedUrlError as error:  # the configuration has changed since
            row |= {"state": CallbackState.FAILED, "due_at": None, "reason": str(error)}
        rows.append(row)
    if rows:
        connection.execute(callbacks.insert(), rows)


class CallbackQueue:
    """The callbacks of a store, for any number of threads."""

    def __init__(self, database: Database, *, clock: Callable[[], float]) -> None:
        """clock: seconds of the epoch"""
        self._database = database
        self.now = clock

    def claim(self, *, limit: int, busy: Collection[str], lease_s: float) -> list[Callback]:
        """Callbacks that are due, the oldest of each host that is not `busy`. No other server
        gets them within the lease."""
        now = self.now()
        is_due = callbacks.c.due_at <= now
        with self._database.read() as connection:
            if (
                connection.execute(sa.select(callbacks.c.seq).where(is_due).limit(1)).first()
                is None
            ):
                return []
        of_hosts = (
            sa.select(sa.func.min(callbacks.c.seq))
            .where(is_due, callbacks.c.host.not_in(list(busy)))
            .group_by(callbacks.c.host)
        )
        found = (
            sa.select(callbacks)
            .where(callbacks.c.seq.in_(of_hosts), is_due)
            .order_by(callbacks.c.due_at)
            .limit(limit)
        )
        with self._database.write() as connection:
            rows = connection.execute(found.with_for_update(skip_locked=True)).all()
            for row in rows:
                _change(
                    connection, row.seq, due_at=now + lease_s, num_attempts=row.num_attempts + 1
                )
        names = [field.name for field in fields(Callback)]
        claimed = [{name: row._mapping[name] for name in names} for row in rows]
        return [Callback(**one | {"num_attempts": one["num_attempts"] + 1}) for one in claimed]

    def delivered(self, callback: Callback) -> None:
        with self._database.write() as connection:
            changes = {"state": CallbackState.DELIVERED, "due_at": None, "reason": None}
            _change(connection, callback.seq, **changes)

    def not_delivered(self, callback: Callback, reason: str, *, due_at: float | None) -> None:
        """An attempt failed. due_at: of the next one; None: there is none. Changes nothing if the
        lease was over and another attempt has begun."""
        state = CallbackState.FAILED if due_at is None else CallbackState.WAITING
        with self._database.write() as connection:
            same = sa.and_(
                callbacks.c.num_attempts == callback.num_attempts,
                callbacks.c.state == CallbackState.WAITING,
            )
            _change(connection, callback.seq, same, state=state, due_at=due_at, reason=reason)

    def num_waiting(self) -> int:
        is_waiting = callbacks.c.due_at.is_not(None)
        with self._database.read() as connection:
            count = sa.select(sa.func.count()).where(is_waiting)
            return connection.execute(count).scalar_one()

    def of_batches(
        self, names: Sequence[str], *, only_own: bool
    ) -> Mapping[str, list[dict[str, Any]]]:
        """Batch -> its callbacks as people see them, if it has some."""
        own = callbacks.c.is_own if only_own else sa.true()
        query = sa.select(callbacks).where(callbacks.c.batch_id.in_(names), own)
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        with self._database.read() as connection:
            for row in connection.execute(query.order_by(callbacks.c.seq)):
                shown = {
                    "host": row.host,
                    "state": row.state,
                    "attempts": row.num_attempts,
                    "reason": row.reason,
                }
                found[row.batch_id].append(shown)
        return found


def _change(
    connection: sa.Connection, seq: int, *where: sa.ColumnElement[bool], **values: Any
) -> None:
    connection.execute(callbacks.update().where(callbacks.c.seq == seq, *where).values(values))
