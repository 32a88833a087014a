"""Batches, their lines and the results: the record of what is done and what is still to do.

Each change is one transaction. In the same transaction a line gets its result, is counted, and is
closed to be taken again; a process that ends at any moment loses and repeats nothing.

Servers that share a store send heartbeats. What a server has leased (lines, and the validation of a
batch) is free again once its heartbeats stop. If it is alive all the same, the first result of a
line is kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sa

from cosched.batch.batch_records import (
    OPEN,
    Batch,
    Fault,
    File,
    Finished,
    Line,
    NewBatch,
    NewLine,
    Status,
)
from cosched.batch.callback_rules import CallbackRules
from cosched.batch.callbacks import record_callbacks
from cosched.batch.config import NO_QUOTA, QuotaConfig
from cosched.batch.database import (
    Database,
    LineState,
    batches,
    callbacks,
    files,
    lines,
    results,
    servers,
)
from cosched.batch.documents import Claim
from cosched.batch.errors import CLOSED, ApiError, not_found, unsent
from cosched.batch.files import new_id
from cosched.batch.jsonl.line_results import RecordWriter
from cosched.batch.jsonl.lines import RequestLine
from cosched.batch.leases import Leases, has_leftovers, is_alive, mark, release
from cosched.batch.once import Once, claim, recorded
from cosched.batch.quota import check_new_batch

_NO_FILES: Mapping[bool, tuple[str, int]] = {}
_SUMS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "device_s")


def records_of(batch_id: str) -> RecordWriter:
    """Makes the lines of a batch's results."""
    return RecordWriter(digest=batch_id.removeprefix("batch_"))


class BatchStore:
    """For any number of threads. Owners see only their own batches; None sees all."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float],
        quota: QuotaConfig = NO_QUOTA,
        callback_rules: CallbackRules | None = None,
        on_end: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        """on_end: called by the server that ends a batch, in the thread that does"""
        self._on_end = on_end
        self._database = database
        self._clock = clock
        self._quota = quota
        self._callback_rules = callback_rules

    def now(self) -> int:
        """Seconds of the epoch."""
        return int(self._clock())

    def join(self, server: str, *, lease_s: float) -> None:
        """Register a server. If the store is not shared, all others are dead."""
        with self._database.write() as connection:
            if not self._database.is_shared:
                self._remove_servers(connection, sa.true())
            until = self._clock() + lease_s
            connection.execute(servers.insert().values(name=server, until=until))

    def beat(self, server: str, *, lease_s: float) -> int:
        """The heartbeat of a server, which then lives for another `lease_s`; the number of live
        servers. The dead lose their leases. 0: this one was found dead; it must `join` again."""
        now = self._clock()
        with self._database.write() as connection:
            own = servers.update().where(servers.c.name == server)
            if not connection.execute(own.values(until=now + lease_s)).rowcount:
                return 0
        with self._database.write() as connection:
            self._remove_servers(connection, servers.c.until < now)
            count = sa.select(sa.func.count()).select_from(servers)
            return connection.execute(count).scalar_one()

    def leave(self, server: str) -> None:
        """A server ends, and frees its leases."""
        with self._database.write() as connection:
            self._remove_servers(connection, servers.c.name == server)

    def _remove_servers(self, connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
        dead = connection.scalars(sa.select(servers.c.name).where(which).with_for_update()).all()
        if not dead:
            return
        connection.execute(servers.delete().where(servers.c.name.in_(dead)))
        found = sa.select(batches.c.seq).where(batches.c.status.in_(OPEN)).order_by(batches.c.id)
        for seq in connection.scalars(found.with_for_update()).all():
            release(connection, seq, lines.c.lease_owner.in_(dead))
        connection.execute(
            batches.update().where(batches.c.validated_by.in_(dead)).values(validated_by=None)
        )

    def made_before(self, once: Once) -> Batch | None:
        """The batch that an earlier request with this key has made. ApiError 422."""
        with self._database.read() as connection:
            made = recorded(connection, once, now=self.now())
            return None if made is None else _batch_of(_row(connection, made))

    def create(self, request: NewBatch, *, once: Once | None = None) -> Batch:
        """A batch that is to be validated. once: as of `FileStore.add`. ApiError 422, 429."""
        name, now = new_id("batch_"), self.now()
        with self._database.write() as connection:
            if once is not None:
                made = claim(self._database, connection, once, name, now=now)
                if made is not None:
                    return _batch_of(_row(connection, made))
            check_new_batch(self._database, connection, request, self._quota)
            values = {
                **asdict(request),
                "id": name,
                "status": Status.VALIDATING,
                "created_at": now,
                "expires_at": now + request.window_s,
                "times": {},
                "faults": [],
            }
            connection.execute(batches.insert().values(values))
            return _batch_of(_row(connection, name))

    def get(self, name: str, *, owner: str | None = None) -> Batch:
        """ApiError 404."""
        with self._database.read() as connection:
            return _batch_of(_row(connection, name, owner=owner))

    def page(
        self,
        *,
        owner: str | None,
        after: str | None,
        limit: int,
        before: str | None = None,
        endpoint: str | None = None,
    ) -> tuple[list[Batch], bool]:
        """At most `limit` batches older than `after`, or the next newer than `before`, newest
        first, and whether there are more. endpoint: None: of all. ApiError 404."""
        seq = batches.c.seq
        query = sa.select(batches)
        if owner is not None:
            query = query.where(batches.c.owner == owner)
        if endpoint is not None:
            query = query.where(batches.c.endpoint == endpoint)
        with self._database.read() as connection:
            if after is not None:
                query = query.where(seq < _row(connection, after, owner=owner).seq)
            if before is not None:
                query = query.where(seq > _row(connection, before, owner=owner).seq)
            order = seq.desc() if before is None else seq.asc()
            rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
        found = [_batch_of(row) for row in rows[:limit]]
        return found if before is None else found[::-1], len(rows) > limit

    def open(self) -> list[Batch]:
        """Those that have not ended, oldest first."""
        query = sa.select(batches).where(batches.c.status.in_(OPEN))
        return self._found(query.order_by(batches.c.seq))

    def latest_answered(self, *, limit: int) -> list[Batch]:
        """The newest of those that have ended with answers."""
        query = sa.select(batches).where(batches.c.status.not_in(OPEN), batches.c.completed > 0)
        return self._found(query.order_by(batches.c.seq.desc()).limit(limit))

    def _found(self, query: sa.Select[Any]) -> list[Batch]:
        with self._database.read() as connection:
            return [_batch_of(row) for row in connection.execute(query)]

    def num_taken(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Open batch -> its lines in flight, at all servers. names: None: of all."""
        asked = sa.true() if names is None else batches.c.id.in_(names)
        query = (
            sa.select(batches.c.id, sa.func.count())
            .join(lines, lines.c.batch == batches.c.seq)
            .where(asked, batches.c.status.in_(OPEN), lines.c.state == LineState.TAKEN)
            .group_by(batches.c.id)
        )
        with self._database.read() as connection:
            return {name: count for name, count in connection.execute(query)}

    def num_by_status(self) -> dict[str, int]:
        query = sa.select(batches.c.status, sa.func.count()).group_by(batches.c.status)
        with self._database.read() as connection:
            return {status: count for status, count in connection.execute(query)}

    def cancel(self, name: str, *, owner: str | None = None) -> Batch:
        """No further line is sent. ApiError 404; 409: the batch has ended or is about to."""
        with self._database.write() as connection:
            row = _row(connection, name, owner=owner, is_locked=True)
            if row.status in (Status.VALIDATING, Status.IN_PROGRESS):
                self._move(connection, row, Status.CANCELLING, ending=Status.CANCELLED)
            elif row.status != Status.CANCELLING:
                raise ApiError(f"cannot cancel a batch with status {str(row.status)!r}", status=409)
            return _batch_of(_row(connection, name))

    def expire_due(self) -> list[str]:
        """End the batches whose window has ended; no further line of them is sent."""
        due = sa.select(batches).where(
            batches.c.status.in_((Status.VALIDATING, Status.IN_PROGRESS)),
            batches.c.expires_at <= self.now(),
        )
        with self._database.read() as connection:
            if connection.execute(due.limit(1)).first() is None:
                return []
        with self._database.write() as connection:
            rows = connection.execute(due.order_by(batches.c.id).with_for_update()).all()
            for row in rows:
                self._move(connection, row, Status.FINALIZING, ending=Status.EXPIRED)
        return [row.id for row in rows]

    def begin_validation(self, name: str, *, server: str) -> bool:
        """Lease the validation of a batch; False if another live server has it. Lines of an
        interrupted validation are dropped."""
        with self._database.write() as connection:
            if not is_alive(connection, server):
                return False
            row = _row(connection, name, is_locked=True)
            if row.status != Status.VALIDATING or row.validated_by not in (None, server):
                return False
            connection.execute(lines.delete().where(lines.c.batch == row.seq))
            connection.execute(
                batches.update().where(batches.c.seq == row.seq).values(validated_by=server)
            )
            return True

    def add_lines(self, name: str, found: Sequence[NewLine], *, server: str) -> bool:
        """Add lines to a batch that this server validates; False if it no longer does."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if not _is_validated_by(row, server):
                return False
            if found:
                of_batch = {"batch": row.seq, "state": LineState.WAITING}
                connection.execute(lines.insert(), [asdict(line) | of_batch for line in found])
            return True

    def accept(self, name: str, *, server: str, ignored: Iterable[str] = ()) -> None:
        """All lines are added and valid. Does nothing if this server no longer validates it.
        ignored: fields of lines that have no effect, beside those of the batch."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if _is_validated_by(row, server):
                count = sa.select(sa.func.count()).where(lines.c.batch == row.seq)
                total = connection.execute(count).scalar_one()
                names = [*row.ignored, *sorted(ignored)]
                self._move(connection, row, Status.IN_PROGRESS, total=total, ignored=names)

    def reject(self, name: str, faults: Iterable[Fault], *, server: str) -> None:
        """The input file is invalid. Does nothing if this server no longer validates it."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if _is_validated_by(row, server):
                connection.execute(lines.delete().where(lines.c.batch == row.seq))
                self._move(connection, row, Status.FAILED, faults=list(map(asdict, faults)))
            ended = _batch_of(_row(connection, name))
        if ended.status is Status.FAILED:
            self._on_end(ended)

    def take(self, claim: Claim, *, max_bytes: int, server: str) -> list[tuple[str, Line]]:
        """Lease waiting lines, each with its batch: at most `claim.limit`, and after the first at
        most `max_bytes` together. None of a batch that is not in progress."""
        with self._database.write() as connection:
            if not is_alive(connection, server):
                return []
            names = [part.batch_id for part in claim.parts]
            query = sa.select(batches.c.id, batches.c.seq).where(
                batches.c.id.in_(names), batches.c.status == Status.IN_PROGRESS
            )
            seqs = {name: seq for name, seq in connection.execute(query)}
            found = Leases(connection, seqs, server=server)
            return found.take(claim, max_bytes=max_bytes, may_steal=self._database.is_shared)

    def release(self, name: str, *, server: str, numbers: Sequence[int] | None = None) -> None:
        """These lines of the batch, or all, are not in flight at this server any more."""
        which = sa.true() if numbers is None else lines.c.number.in_(numbers)
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            release(connection, row.seq, sa.and_(lines.c.lease_owner == server, which))

    def finish(self, finished: Sequence[Finished]) -> int:
        """Keep the results of lines; how many. A line that has a result keeps it, and results of
        deleted batches are dropped."""
        num_kept = 0
        by_batch: dict[str, list[Finished]] = defaultdict(list)
        for one in finished:
            by_batch[one.batch_id].append(one)
        with self._database.write() as connection:
            for name, group in sorted(by_batch.items()):
                query = sa.select(batches).where(batches.c.id == name).with_for_update()
                row = connection.execute(query).first()
                if row is None:
                    continue
                first_results = {one.number: one for one in reversed(group)}
                unfinished = sa.select(lines.c.number).where(
                    lines.c.batch == row.seq,
                    lines.c.number.in_(list(first_results)),
                    lines.c.state != LineState.DONE,
                )
                numbers = connection.scalars(unfinished.with_for_update()).all()
                kept = [first_results[number] for number in numbers]
                self._record(connection, row.seq, kept)
                num_kept += len(kept)
                row = _row(connection, name)
                if row.status == Status.IN_PROGRESS and row.completed + row.failed == row.total:
                    self._move(connection, row, Status.FINALIZING, ending=Status.COMPLETED)
        return num_kept

    def close_lines(self, name: str, *, limit: int) -> int:
        """Give up to `limit` waiting lines the error with which their batch ends; how many. Lines
        in flight are left."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if row.ending not in CLOSED:
                return 0
            # After an interrupted validation not all lines are known, and none was sent.
            if Status.IN_PROGRESS not in row.times:
                connection.execute(lines.delete().where(lines.c.batch == row.seq))
                return 0
            left = connection.execute(
                sa.select(lines.c.number, lines.c.custom_id)
                .where(lines.c.batch == row.seq, lines.c.state == LineState.WAITING)
                .limit(limit)
                .with_for_update()
            ).all()
            writer, failure = records_of(name), CLOSED[row.ending]
            closed = []
            for number, custom_id in left:
                line = RequestLine(number=number, custom_id=custom_id, url=row.endpoint, body=b"")
                data = writer.record(line, failure).data
                closed.append(Finished(batch_id=name, number=number, is_answer=False, data=data))
            self._record(connection, row.seq, closed, num_closed=len(closed))
            return len(closed)

    def is_done(self, name: str) -> bool:
        """Whether all lines of a batch have their final results."""
        with self._database.read() as connection:
            return not has_leftovers(connection, _row(connection, name).seq)

    def end(self, name: str, written: Mapping[bool, tuple[str, int]] = _NO_FILES) -> bool:
        """List the results and give the batch its final status; False while a line has no result.
        `written`: is_errors -> name and bytes of a file with results, which replaces their rows."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if row.ending is None:
                return row.status not in OPEN
            if has_leftovers(connection, row.seq):
                return False
            named: dict[str, Any] = {
                f"{kind}_file_id": self._add_results(connection, row, is_errors, written)
                for kind, is_errors in (("output", False), ("error", True))
            }
            connection.execute(lines.delete().where(lines.c.batch == row.seq))
            if Status.IN_PROGRESS not in row.times:
                named["faults"] = [unsent(row.ending)]
            self._move(connection, row, Status(row.ending), ending=None, **named)
            ended = _batch_of(_row(connection, name))
        self._on_end(ended)
        return True

    def remove_ended(self, *, kept_s: float) -> int:
        """Delete batches that ended longer ago than this, and their results; how many."""
        before = self.now() - kept_s
        with self._database.write() as connection:
            found = connection.execute(
                sa.select(batches.c.seq, batches.c.id, batches.c.status, batches.c.times).where(
                    batches.c.status.not_in(OPEN), batches.c.created_at < before
                )
            ).all()
            gone = [row for row in found if row.times[row.status] < before]
            for row in gone:
                _remove(connection, row)
        return len(gone)

    def delete(self, name: str, *, owner: str | None = None) -> None:
        """Delete a batch that has ended, and its results. ApiError 404."""
        with self._database.write() as connection:
            row = _row(connection, name, owner=owner, is_locked=True)
            assert row.status not in OPEN, f"{row.status=}"
            _remove(connection, row)

    def _add_results(
        self,
        connection: sa.Connection,
        row: Any,
        is_errors: bool,
        written: Mapping[bool, tuple[str, int]],
    ) -> str | None:
        """List a file with results of the batch; None: there are none."""
        which = sa.and_(results.c.batch == row.seq, results.c.is_errors == is_errors)
        if is_errors in written:
            file_id, num_bytes = written[is_errors]
            connection.execute(results.delete().where(which))
        else:
            size = sa.select(sa.func.sum(sa.func.length(results.c.data))).where(which)
            if (found := connection.execute(size).scalar()) is None:
                return None
            file_id, num_bytes = new_id("file-"), int(found)
        now, keep_s = self.now(), row.output_expires_after_s
        file = File(
            id=file_id,
            owner=row.owner,
            purpose="batch_output",
            filename=f"{row.id}_{'error' if is_errors else 'output'}.jsonl",
            num_bytes=num_bytes,
            created_at=now,
            expires_at=None if keep_s is None else now + keep_s,
            batch_id=row.id,
            is_errors=is_errors,
        )
        connection.execute(files.insert().values(**asdict(file)))
        return file.id

    def _record(
        self, connection: sa.Connection, seq: int, kept: Sequence[Finished], num_closed: int = 0
    ) -> None:
        """Keep the first results of lines, which are done then."""
        if not kept:
            return
        mark(connection, seq, [one.number for one in kept], LineState.DONE, None)
        found = [(one.number, not one.is_answer, one.data) for one in kept]
        names = ("batch", "number", "is_errors", "data")
        rows = [dict(zip(names, (seq, *values), strict=True)) for values in found]
        connection.execute(results.insert(), rows)
        count = Counter(one.is_answer for one in kept)
        added = {"completed": count[True], "failed": count[False], "closed": num_closed}
        added |= {name: sum(getattr(one, name) for one in kept) for name in _SUMS}
        connection.execute(
            batches.update()
            .where(batches.c.seq == seq)
            .values({name: batches.c[name] + number for name, number in added.items()})
        )

    def _move(self, connection: sa.Connection, row: Any, status: Status, **values: Any) -> None:
        connection.execute(
            batches.update()
            .where(batches.c.seq == row.seq)
            .values(status=status, times={**row.times, status.value: self.now()}, **values)
        )
        if self._callback_rules is not None and status not in OPEN:
            record_callbacks(connection, row, status, self._callback_rules, now=self.now())


def _row(
    connection: sa.Connection, name: str, *, owner: str | None = None, is_locked: bool = False
) -> Any:
    """is_locked: other transactions cannot change it before this one ends. ApiError 404."""
    of_owner = sa.true() if owner is None else batches.c.owner == owner
    query = sa.select(batches).where(batches.c.id == name, of_owner)
    row = connection.execute(query.with_for_update() if is_locked else query).first()
    if row is None:
        raise not_found("batch", name)
    return row


def _remove(connection: sa.Connection, row: Any) -> None:
    """A batch and its results."""
    connection.execute(files.delete().where(files.c.batch_id == row.id))
    connection.execute(results.delete().where(results.c.batch == row.seq))
    connection.execute(callbacks.delete().where(callbacks.c.batch_id == row.id))
    connection.execute(batches.delete().where(batches.c.seq == row.seq))


def _is_validated_by(row: Any, server: str) -> bool:
    return bool(row.status == Status.VALIDATING and row.validated_by == server)


def _batch_of(row: Any) -> Batch:
    found = {field.name: row._mapping[field.name] for field in fields(Batch)}
    found["status"] = Status(row.status)
    found["ending"] = None if row.ending is None else Status(row.ending)
    found["faults"] = tuple(Fault(**fault) for fault in row.faults)
    return Batch(**found)
