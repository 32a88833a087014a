"""Batches, their lines and the results: the record of what is done, and of what is still to do.

Each change is one transaction. A line has its result, counts, and is never taken again from the
same moment on, so that a process that ends at any other moment loses and repeats nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from cosched.batches.data import (
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
from cosched.batches.database import Database, LineState, batches, files, lines, results
from cosched.batches.errors import ApiError, not_found
from cosched.batches.files import new_id
from cosched.jobs.lines import RequestLine
from cosched.jobs.records import Failure, RecordWriter

__all__ = ["BatchStore", "records_of"]

_OUTPUT_PURPOSE = "batch_output"
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
    """For any number of threads. Owners see their own batches only; None is the server itself."""

    def __init__(self, database: Database, *, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def create(self, request: NewBatch) -> Batch:
        """A batch that is to be validated."""
        name, now = new_id("batch_"), self._now()
        with self._database.write() as connection:
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

    def page(self, *, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """At most `limit` batches older than that one, newest first, and whether there are more.
        ApiError 404."""
        query = sa.select(batches).where(batches.c.owner == owner)
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

    def cancel(self, name: str, *, owner: str | None = None) -> Batch:
        """Nothing more of it is sent. ApiError: 404, or 409 when it has ended or is about to."""
        with self._database.write() as connection:
            row = _row(connection, name, owner=owner)
            if row.status in (Status.VALIDATING, Status.IN_PROGRESS):
                self._move(connection, row, Status.CANCELLING, ending=Status.CANCELLED)
            elif row.status != Status.CANCELLING:
                raise ApiError(f"a batch that is {row.status} cannot be cancelled", status=409)
            return _batch_of(_row(connection, name))

    def expire_due(self) -> list[str]:
        """The batches whose window has ended now; nothing more of them is sent."""
        due = sa.select(batches).where(
            batches.c.status.in_((Status.VALIDATING, Status.IN_PROGRESS)),
            batches.c.expires_at <= self._now(),
        )
        with self._database.read() as connection:
            if connection.execute(due.limit(1)).first() is None:
                return []
        with self._database.write() as connection:
            rows = connection.execute(due).all()
            for row in rows:
                self._move(connection, row, Status.FINALIZING, ending=Status.EXPIRED)
        return [row.id for row in rows]

    def add_lines(self, name: str, found: Sequence[NewLine]) -> bool:
        """Add lines to a batch that is validated; False when it no longer is."""
        with self._database.write() as connection:
            row = _row(connection, name)
            if row.status != Status.VALIDATING:
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

    def drop_lines(self, name: str) -> None:
        """Forget what an interrupted validation has added."""
        with self._database.write() as connection:
            row = _row(connection, name)
            assert row.status == Status.VALIDATING, f"{row.status=}"
            connection.execute(lines.delete().where(lines.c.batch == row.seq))

    def accept(self, name: str) -> None:
        """All lines are there and right. Does nothing when the batch is no longer validated."""
        with self._database.write() as connection:
            row = _row(connection, name)
            if row.status == Status.VALIDATING:
                count = sa.select(sa.func.count()).where(lines.c.batch == row.seq)
                total = connection.execute(count).scalar_one()
                self._move(connection, row, Status.IN_PROGRESS, total=total)

    def reject(self, name: str, faults: Iterable[Fault]) -> None:
        """The input file is wrong. Does nothing when the batch is no longer validated."""
        with self._database.write() as connection:
            row = _row(connection, name)
            if row.status == Status.VALIDATING:
                connection.execute(lines.delete().where(lines.c.batch == row.seq))
                told = [asdict(fault) for fault in faults]
                self._move(connection, row, Status.FAILED, faults=told)

    def take(
        self, name: str, *, limit: int, max_bytes: int, lease_owner: str, lease_s: int
    ) -> list[Line]:
        """Waiting lines in prefix order, now leased: at most `limit`, and after the first at most
        `max_bytes` together. None of a batch that is not in progress."""
        with self._database.write() as connection:
            row = _row(connection, name)
            if row.status != Status.IN_PROGRESS:
                return []
            found = connection.execute(
                sa.select(lines.c.number, lines.c.custom_id, lines.c.start, lines.c.num_bytes)
                .where(lines.c.batch == row.seq, lines.c.state == LineState.WAITING)
                .order_by(lines.c.prefix_key, lines.c.number)
                .limit(limit)
                .with_for_update(skip_locked=True)
            ).all()
            taken: list[Line] = []
            num_bytes = 0
            for number, custom_id, start, size in found:
                num_bytes += size
                if taken and num_bytes > max_bytes:
                    break
                taken.append(Line(number=number, custom_id=custom_id, offset=start, num_bytes=size))
            if taken:
                connection.execute(
                    lines.update()
                    .where(
                        lines.c.batch == row.seq,
                        lines.c.number.in_([line.number for line in taken]),
                    )
                    .values(
                        state=LineState.TAKEN,
                        lease_owner=lease_owner,
                        lease_until=self._now() + lease_s,
                    )
                )
            return taken

    def take_back_all(self) -> None:
        """End all leases. For a server that starts and has the store to itself."""
        with self._database.write() as connection:
            connection.execute(
                lines.update()
                .where(lines.c.state == LineState.TAKEN)
                .values(state=LineState.WAITING, lease_owner=None, lease_until=None)
            )

    def finish(self, finished: Sequence[Finished]) -> int:
        """Keep the results of lines that were taken; how many. A line that has one, or that was
        closed, keeps what it has."""
        num_kept = 0
        by_batch: dict[str, list[Finished]] = defaultdict(list)
        for one in finished:
            by_batch[one.batch_id].append(one)
        with self._database.write() as connection:
            for name, group in by_batch.items():
                seq = _row(connection, name).seq
                open_lines = _taken(connection, seq, [one.number for one in group])
                kept = []
                for one in group:
                    if one.number in open_lines:
                        open_lines.remove(one.number)
                        kept.append(one)
                self._record(connection, seq, kept)
                num_kept += len(kept)
                row = _row(connection, name)
                if row.status == Status.IN_PROGRESS and row.completed + row.failed == row.total:
                    self._move(connection, row, Status.FINALIZING, ending=Status.COMPLETED)
        return num_kept

    def close_lines(self, name: str, *, limit: int) -> bool:
        """Give some lines without a result the error with which their batch ends; whether none is
        left. Nothing of the batch may be under way."""
        with self._database.write() as connection:
            row = _row(connection, name)
            left = connection.execute(
                sa.select(lines.c.number, lines.c.custom_id)
                .where(
                    lines.c.batch == row.seq,
                    lines.c.state.in_((LineState.WAITING, LineState.TAKEN)),
                )
                .limit(limit)
            ).all()
            if not left or row.ending not in _CLOSED:
                return True
            # Of a batch whose validation was cut short nobody knows all lines: none was sent.
            if "in_progress" not in row.times:
                connection.execute(lines.delete().where(lines.c.batch == row.seq))
                return True
            writer, failure = records_of(name), _CLOSED[row.ending]
            closed = []
            for number, custom_id in left:
                line = RequestLine(number=number, custom_id=custom_id, url=row.endpoint, body=b"")
                data = writer.record(line, failure).data
                closed.append(Finished(batch_id=name, number=number, is_answer=False, data=data))
            self._record(connection, row.seq, closed)
            return False

    def end(self, name: str) -> None:
        """Make the results files, and give the batch its last status. Its lines are all closed."""
        with self._database.write() as connection:
            row = _row(connection, name)
            if row.ending is None:
                return
            named = {
                "output_file_id": self._add_results(connection, row, is_errors=False),
                "error_file_id": self._add_results(connection, row, is_errors=True),
            }
            connection.execute(lines.delete().where(lines.c.batch == row.seq))
            self._move(connection, row, Status(row.ending), ending=None, **named)

    def _add_results(self, connection: sa.Connection, row: Any, *, is_errors: bool) -> str | None:
        """A file of the batch's results; None: there are none."""
        num_bytes = connection.execute(
            sa.select(sa.func.sum(sa.func.length(results.c.data))).where(
                results.c.batch == row.seq, results.c.is_errors == is_errors
            )
        ).scalar()
        if num_bytes is None:
            return None
        now, keep_s = self._now(), row.output_expires_after_s
        file = File(
            id=new_id("file-"),
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
            .values(state=LineState.DONE, lease_owner=None, lease_until=None)
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
                input_tokens=batches.c.input_tokens + sum(one.input_tokens for one in kept),
                output_tokens=batches.c.output_tokens + sum(one.output_tokens for one in kept),
            )
        )

    def _move(self, connection: sa.Connection, row: Any, status: Status, **values: Any) -> None:
        connection.execute(
            batches.update()
            .where(batches.c.seq == row.seq)
            .values(status=status, times={**row.times, status.value: self._now()}, **values)
        )

    def _now(self) -> int:
        return int(self._clock())


def _row(connection: sa.Connection, name: str, *, owner: str | None = None) -> Any:
    query = sa.select(batches).where(batches.c.id == name)
    if owner is not None:
        query = query.where(batches.c.owner == owner)
    row = connection.execute(query).first()
    if row is None:
        raise not_found("batch", name)
    return row


def _taken(connection: sa.Connection, seq: int, numbers: Sequence[int]) -> set[int]:
    """Which of the lines are under way; nobody else can end them before this transaction ends."""
    query = sa.select(lines.c.number).where(
        lines.c.batch == seq, lines.c.number.in_(numbers), lines.c.state == LineState.TAKEN
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
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
    )
