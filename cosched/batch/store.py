"""Batches, their lines and the results: the record of what is done, and of what is still to do.

Each change is one transaction. A line has its result, counts, and is never taken again from the
same moment on, so that a process that ends at any other moment loses and repeats nothing.

Servers that share a store say again and again that they live. What one has leased (lines, and the
validation of a batch) is anybody's again once it is silent. Should it live all the same, the first
result of a line stands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from cosched.batch.config import QuotaConfig
from cosched.batch.data import (
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
from cosched.batch.database import (
    Database,
    LineState,
    batches,
    files,
    lines,
    results,
    servers,
)
from cosched.batch.errors import ApiError, not_found
from cosched.batch.files import new_id
from cosched.batch.jsonl.lines import RequestLine
from cosched.batch.jsonl.records import Failure, RecordWriter
from cosched.batch.quota import check_new_batch

_NO_QUOTA = QuotaConfig()
_NOTHING: Mapping[bool, tuple[str, int]] = {}
_OUTPUT_PURPOSE = "batch_output"
_TOKENS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")
_CLOSED: dict[Status, Failure] = {
    Status.EXPIRED: Failure(
        code="batch_expired",
        message="this request could not be executed before the completion window expired",
    ),
    Status.CANCELLED: Failure(
        code="batch_cancelled",
        message="this request was not executed because the batch was cancelled",
    ),
}
"""What becomes of the lines that have no result when a batch ends so."""


def records_of(batch_id: str) -> RecordWriter:
    """What makes the lines of a batch's results."""
    return RecordWriter(digest=batch_id.removeprefix("batch_"))


class BatchStore:
    """For any number of threads. Owners see their own batches only; None sees all."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float],
        quota: QuotaConfig = _NO_QUOTA,
    ) -> None:
        self._database = database
        self._clock = clock
        self._quota = quota

    def join(self, server: str, *, lease_s: float) -> None:
        """A server begins. Where the store is not shared all others are dead."""
        with self._database.write() as connection:
            if not self._database.is_shared:
                self._bury(connection, sa.true())
            until = self._clock() + lease_s
            connection.execute(servers.insert().values(name=server, until=until))

    def beat(self, server: str, *, lease_s: float) -> int:
        """A server lives, and will for `lease_s` at least; how many do. Those that do not lose
        their leases. 0: this one was silent for too long and has lost its own; `join` again."""
        now = self._clock()
        with self._database.write() as connection:
            mine = servers.update().where(servers.c.name == server)
            if not connection.execute(mine.values(until=now + lease_s)).rowcount:
                return 0
        with self._database.write() as connection:
            self._bury(connection, servers.c.until < now)
            count = sa.select(sa.func.count()).select_from(servers)
            return connection.execute(count).scalar_one()

    def leave(self, server: str) -> None:
        """A server ends: others need not wait until its leases do."""
        with self._database.write() as connection:
            self._bury(connection, servers.c.name == server)

    def _bury(self, connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
        """Servers are dead: what they have leased is free."""
        dead = connection.scalars(sa.select(servers.c.name).where(which).with_for_update()).all()
        if not dead:
            return
        connection.execute(servers.delete().where(servers.c.name.in_(dead)))
        found = sa.select(batches.c.seq).where(batches.c.status.in_(OPEN)).order_by(batches.c.id)
        for seq in connection.scalars(found.with_for_update()).all():
            _release(connection, seq, lines.c.lease_owner.in_(dead))
        connection.execute(
            batches.update().where(batches.c.validated_by.in_(dead)).values(validated_by=None)
        )

    def create(self, request: NewBatch) -> Batch:
        """A batch that is to be validated. ApiError 429."""
        name, now = new_id("batch_"), self.now()
        with self._database.write() as connection:
            check_new_batch(self._database, connection, request, self._quota)
            connection.execute(
                batches.insert().values(
                    id=name,
                    owner=request.owner,
                    tenant=request.tenant,
                    endpoint=request.endpoint,
                    input_file_id=request.input_file_id,
                    completion_window=request.window,
                    window_s=request.window_s,
                    metadata=None if request.metadata is None else dict(request.metadata),
                    output_expires_after_s=request.output_expires_after_s,
                    num_bytes=request.num_bytes,
                    num_lines=request.num_lines,
                    status=Status.VALIDATING,
                    created_at=now,
                    expires_at=now + request.window_s,
                    times={},
                    faults=[],
                )
            )
            return _batch_of(_row(connection, name))

    def get(self, name: str, *, owner: str | None = None) -> Batch:
        """ApiError 404."""
        with self._database.read() as connection:
            return _batch_of(_row(connection, name, owner=owner))

    def page(self, *, owner: str | None, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """At most `limit` batches older than that one, newest first, and whether there are more.
        ApiError 404."""
        query = sa.select(batches)
        if owner is not None:
            query = query.where(batches.c.owner == owner)
        with self._database.read() as connection:
            if after is not None:
                query = query.where(batches.c.seq < _row(connection, after, owner=owner).seq)
            rows = connection.execute(query.order_by(batches.c.seq.desc()).limit(limit + 1)).all()
        return [_batch_of(row) for row in rows[:limit]], len(rows) > limit

    def open(self) -> list[Batch]:
        """Those that have not ended, oldest first."""
        query = sa.select(batches).where(batches.c.status.in_(OPEN)).order_by(batches.c.seq)
        with self._database.read() as connection:
            return [_batch_of(row) for row in connection.execute(query)]

    def latest_answered(self, *, limit: int) -> list[Batch]:
        """The newest of those that have ended with answers."""
        query = sa.select(batches).where(batches.c.status.not_in(OPEN), batches.c.completed > 0)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(batches.c.seq.desc()).limit(limit))
            return [_batch_of(row) for row in rows]

    def num_taken(self) -> dict[str, int]:
        """Open batch -> its lines that are under way, at whichever server."""
        query = (
            sa.select(batches.c.id, sa.func.count())
            .join(lines, lines.c.batch == batches.c.seq)
            .where(batches.c.status.in_(OPEN), lines.c.state == LineState.TAKEN)
            .group_by(batches.c.id)
        )
        with self._database.read() as connection:
            return {name: count for name, count in connection.execute(query)}

    def num_by_status(self) -> dict[str, int]:
        query = sa.select(batches.c.status, sa.func.count()).group_by(batches.c.status)
        with self._database.read() as connection:
            return {status: count for status, count in connection.execute(query)}

    def cancel(self, name: str, *, owner: str | None = None) -> Batch:
        """Nothing more of it is sent. ApiError: 404, or 409 when it has ended or is about to."""
        with self._database.write() as connection:
            row = _row(connection, name, owner=owner, is_locked=True)
            if row.status in (Status.VALIDATING, Status.IN_PROGRESS):
                self._move(connection, row, Status.CANCELLING, ending=Status.CANCELLED)
            elif row.status != Status.CANCELLING:
                raise ApiError(f"a batch that is {row.status} cannot be cancelled", status=409)
            return _batch_of(_row(connection, name))

    def expire_due(self) -> list[str]:
        """The batches whose window has ended now; nothing more of them is sent."""
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
        """Whether this server validates the batch: none that lives does. What another one has added
        is forgotten."""
        with self._database.write() as connection:
            if not _lives(connection, server):
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
        """Add lines to a batch that this server validates; False when it no longer does."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if not _is_validated_by(row, server):
                return False
            if found:
                connection.execute(
                    lines.insert(),
                    [
                        {
                            "batch": row.seq,
                            "number": line.number,
                            "custom_id": line.custom_id,
                            "start": line.offset,
                            "num_bytes": line.num_bytes,
                            "prefix_key": line.prefix_key,
                            "state": LineState.WAITING,
                        }
                        for line in found
                    ],
                )
            return True

    def accept(self, name: str, *, server: str) -> None:
        """All lines are there and right. Does nothing when it is no longer validated by this
        server."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if _is_validated_by(row, server):
                count = sa.select(sa.func.count()).where(lines.c.batch == row.seq)
                total = connection.execute(count).scalar_one()
                self._move(connection, row, Status.IN_PROGRESS, total=total)

    def reject(self, name: str, faults: Iterable[Fault], *, server: str) -> None:
        """The input file is wrong. Does nothing when it is no longer validated by this server."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if _is_validated_by(row, server):
                connection.execute(lines.delete().where(lines.c.batch == row.seq))
                told = [asdict(fault) for fault in faults]
                self._move(connection, row, Status.FAILED, faults=told)

    def take(
        self, name: str, *, limit: int, max_bytes: int, server: str, num_ahead: int = 0
    ) -> list[Line]:
        """Waiting lines, now leased: at most `limit`, and after the first at most `max_bytes`
        together. None of a batch that is not in progress.

        In prefix order: first those that were set aside for this server, then free ones, with
        `num_ahead` more set aside for its next time, so that lines that begin alike are taken by
        one server. When there are no others, the last ones of those set aside for other servers.
        """
        with self._database.write() as connection:
            row = _row(connection, name)
            if row.status != Status.IN_PROGRESS or not _lives(connection, server):
                return []
            owner = lines.c.lease_owner
            found = _waiting(connection, row.seq, owner == server, limit=limit)
            if len(found) < limit:
                free_limit = limit - len(found) + num_ahead
                found += _waiting(connection, row.seq, owner.is_(None), limit=free_limit)
            if not found and self._database.is_shared:
                found = _waiting(connection, row.seq, owner != server, limit=limit, is_last=True)
            taken: list[Line] = []
            num_bytes = 0
            for number, custom_id, start, size in found[:limit]:
                num_bytes += size
                if taken and num_bytes > max_bytes:
                    break
                taken.append(Line(number=number, custom_id=custom_id, offset=start, num_bytes=size))
            ahead = [number for number, *_ in found[len(taken) :]] if num_ahead else []
            for numbers, state in (
                ([line.number for line in taken], LineState.TAKEN),
                (ahead, LineState.WAITING),
            ):
                if numbers:
                    connection.execute(
                        lines.update()
                        .where(lines.c.batch == row.seq, lines.c.number.in_(numbers))
                        .values(state=state, lease_owner=server)
                    )
            return taken

    def release(self, name: str, *, server: str) -> None:
        """Nothing of the batch is under way at this server any more."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            _release(connection, row.seq, lines.c.lease_owner == server)

    def finish(self, finished: Sequence[Finished]) -> int:
        """Keep the results of lines; how many. A line that has one, or that was closed, keeps what
        it has, whoever comes second with another; of a batch that is gone nothing is kept."""
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
                open_lines = _unfinished(connection, row.seq, [one.number for one in group])
                kept = []
                for one in group:
                    if one.number in open_lines:
                        open_lines.remove(one.number)
                        kept.append(one)
                self._record(connection, row.seq, kept)
                num_kept += len(kept)
                row = _row(connection, name)
                if row.status == Status.IN_PROGRESS and row.completed + row.failed == row.total:
                    self._move(connection, row, Status.FINALIZING, ending=Status.COMPLETED)
        return num_kept

    def close_lines(self, name: str, *, limit: int) -> int:
        """Give some lines that wait the error with which their batch ends; how many. Those that are
        under way are left."""
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if row.ending not in _CLOSED:
                return 0
            # Of a batch whose validation was cut short nobody knows all lines: none was sent.
            if "in_progress" not in row.times:
                connection.execute(lines.delete().where(lines.c.batch == row.seq))
                return 0
            left = connection.execute(
                sa.select(lines.c.number, lines.c.custom_id)
                .where(lines.c.batch == row.seq, lines.c.state == LineState.WAITING)
                .limit(limit)
                .with_for_update()
            ).all()
            writer, failure = records_of(name), _CLOSED[row.ending]
            closed = []
            for number, custom_id in left:
                line = RequestLine(number=number, custom_id=custom_id, url=row.endpoint, body=b"")
                data = writer.record(line, failure).data
                closed.append(Finished(batch_id=name, number=number, is_answer=False, data=data))
            self._record(connection, row.seq, closed)
            return len(closed)

    def is_done(self, name: str) -> bool:
        """Whether all lines of a batch have their results: none comes or changes any more."""
        with self._database.read() as connection:
            return _is_done(connection, _row(connection, name).seq)

    def end(self, name: str, written: Mapping[bool, tuple[str, int]] = _NOTHING) -> bool:
        """List the results files, and give the batch its last status; whether it has ended. Not as
        long as a line has no result.

        written  whether it has the errors -> name and bytes of a file of the batch's results, whose
                 rows are not needed any more
        """
        with self._database.write() as connection:
            row = _row(connection, name, is_locked=True)
            if row.ending is None:
                return row.status not in OPEN
            if not _is_done(connection, row.seq):
                return False
            named = {
                f"{kind}_file_id": self._add_results(
                    connection, row, is_errors=is_errors, written=written.get(is_errors)
                )
                for kind, is_errors in (("output", False), ("error", True))
            }
            connection.execute(lines.delete().where(lines.c.batch == row.seq))
            self._move(connection, row, Status(row.ending), ending=None, **named)
            return True

    def remove_ended(self, *, kept_s: float) -> int:
        """Let go of batches that ended longer ago than this, and of their results; how many."""
        with self._database.write() as connection:
            found = connection.execute(
                sa.select(batches.c.seq, batches.c.id, batches.c.status, batches.c.times).where(
                    batches.c.status.not_in(OPEN), batches.c.created_at < self.now() - kept_s
                )
            ).all()
            gone = [row for row in found if row.times[row.status] < self.now() - kept_s]
            for row in gone:
                connection.execute(files.delete().where(files.c.batch_id == row.id))
                connection.execute(results.delete().where(results.c.batch == row.seq))
                connection.execute(batches.delete().where(batches.c.seq == row.seq))
        return len(gone)

    def _add_results(
        self,
        connection: sa.Connection,
        row: Any,
        *,
        is_errors: bool,
        written: tuple[str, int] | None,
    ) -> str | None:
        """A file of the batch's results; None: there are none."""
        which = sa.and_(results.c.batch == row.seq, results.c.is_errors == is_errors)
        if written is None:
            size = sa.select(sa.func.sum(sa.func.length(results.c.data))).where(which)
            file_id, num_bytes = new_id("file-"), connection.execute(size).scalar()
            if num_bytes is None:
                return None
        else:
            file_id, num_bytes = written
            connection.execute(results.delete().where(which))
        now, keep_s = self.now(), row.output_expires_after_s
        file = File(
            id=file_id,
            owner=row.owner,
            purpose=_OUTPUT_PURPOSE,
            filename=f"{row.id}_{'error' if is_errors else 'output'}.jsonl",
            num_bytes=int(num_bytes),
            created_at=now,
            expires_at=None if keep_s is None else now + keep_s,
            batch_id=row.id,
            is_errors=is_errors,
        )
        connection.execute(files.insert().values(**asdict(file)))
        return file.id

    def _record(self, connection: sa.Connection, seq: int, kept: Sequence[Finished]) -> None:
        """Results of lines that have none, whose lines are done then."""
        if not kept:
            return
        connection.execute(
            lines.update()
            .where(lines.c.batch == seq, lines.c.number.in_([one.number for one in kept]))
            .values(state=LineState.DONE, lease_owner=None)
        )
        connection.execute(
            results.insert(),
            [
                {
                    "batch": seq,
                    "number": one.number,
                    "is_errors": not one.is_answer,
                    "data": one.data,
                }
                for one in kept
            ],
        )
        count = Counter(one.is_answer for one in kept)
        connection.execute(
            batches.update()
            .where(batches.c.seq == seq)
            .values(
                completed=batches.c.completed + count[True],
                failed=batches.c.failed + count[False],
                **{
                    name: batches.c[name] + sum(getattr(one, name) for one in kept)
                    for name in _TOKENS
                },
            )
        )

    def _move(self, connection: sa.Connection, row: Any, status: Status, **values: Any) -> None:
        connection.execute(
            batches.update()
            .where(batches.c.seq == row.seq)
            .values(status=status, times={**row.times, status.value: self.now()}, **values)
        )

    def now(self) -> int:
        """Seconds of the epoch."""
        return int(self._clock())


def _row(
    connection: sa.Connection, name: str, *, owner: str | None = None, is_locked: bool = False
) -> Any:
    """is_locked: nobody else changes it before this transaction ends. ApiError 404."""
    query = sa.select(batches).where(batches.c.id == name)
    if owner is not None:
        query = query.where(batches.c.owner == owner)
    row = connection.execute(query.with_for_update() if is_locked else query).first()
    if row is None:
        raise not_found("batch", name)
    return row


def _lives(connection: sa.Connection, server: str) -> bool:
    """Whether a server may lease; nobody finds it dead before this transaction ends."""
    query = sa.select(servers.c.name).where(servers.c.name == server)
    return connection.execute(query.with_for_update(read=True)).first() is not None


def _is_validated_by(row: Any, server: str) -> bool:
    return bool(row.status == Status.VALIDATING and row.validated_by == server)


def _is_done(connection: sa.Connection, seq: int) -> bool:
    """Whether all lines of a batch have a result."""
    left = sa.select(lines.c.number).where(
        lines.c.batch == seq, lines.c.state.in_((LineState.WAITING, LineState.TAKEN))
    )
    return connection.execute(left.limit(1)).first() is None


def _waiting(
    connection: sa.Connection,
    seq: int,
    of: sa.ColumnElement[bool],
    *,
    limit: int,
    is_last: bool = False,
) -> list[Any]:
    """Number, custom_id, start and bytes of the first lines that wait, or of the last ones, in
    prefix order. Those that another server takes just now are left out."""
    # The owner is there for PostgreSQL, which would sort all that have none instead of going along
    # the index.
    order: list[Any] = [lines.c.lease_owner, lines.c.prefix_key, lines.c.number]
    query = (
        sa.select(lines.c.number, lines.c.custom_id, lines.c.start, lines.c.num_bytes)
        .where(lines.c.batch == seq, lines.c.state == LineState.WAITING, of)
        .order_by(*([column.desc() for column in order] if is_last else order))
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    found = list(connection.execute(query).all())
    return found[::-1] if is_last else found


def _release(connection: sa.Connection, seq: int, of: sa.ColumnElement[bool]) -> None:
    """Leased lines of a batch wait for anybody."""
    connection.execute(
        lines.update()
        .where(
            lines.c.batch == seq,
            lines.c.state.in_((LineState.WAITING, LineState.TAKEN)),
            of,
        )
        .values(state=LineState.WAITING, lease_owner=None)
    )


def _unfinished(connection: sa.Connection, seq: int, numbers: Sequence[int]) -> set[int]:
    """Which of the lines have no result; nobody else gives them one before this transaction
    ends."""
    query = sa.select(lines.c.number).where(
        lines.c.batch == seq, lines.c.number.in_(numbers), lines.c.state != LineState.DONE
    )
    return set(connection.scalars(query.with_for_update()))


def _batch_of(row: Any) -> Batch:
    return Batch(
        id=row.id,
        request=NewBatch(
            owner=row.owner,
            tenant=row.tenant,
            endpoint=row.endpoint,
            input_file_id=row.input_file_id,
            window=row.completion_window,
            window_s=row.window_s,
            metadata=row._mapping["metadata"],
            output_expires_after_s=row.output_expires_after_s,
            num_bytes=row.num_bytes,
            num_lines=row.num_lines,
        ),
        status=Status(row.status),
        ending=None if row.ending is None else Status(row.ending),
        created_at=row.created_at,
        expires_at=row.expires_at,
        times=row.times,
        faults=tuple(Fault(**fault) for fault in row.faults),
        total=row.total,
        completed=row.completed,
        failed=row.failed,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        cached_tokens=row.cached_tokens,
        reasoning_tokens=row.reasoning_tokens,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        validated_by=row.validated_by,
    )
