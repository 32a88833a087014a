"""Files: uploaded ones, whose bytes lie in a folder or at a URL, and results, whose lines are rows
until the batch ends, and after it where the files are in a folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO

import sqlalchemy as sa

from cosched.batch.config import QuotaConfig
from cosched.batch.data import OPEN, File
from cosched.batch.database import Database, batches, files, results
from cosched.batch.errors import not_found
from cosched.batch.jsonl.lines import raw_lines
from cosched.batch.quota import check_new_file
from cosched.batch.storage import FilesAwayError, Storage

_RESULTS_PER_PAGE = 200
_NO_QUOTA = QuotaConfig()


def new_id(kind: str) -> str:
    """``kind`` and 128 bits of chance."""
    return kind + secrets.token_hex(16)


def file_of(row: Any) -> File:
    fields = dict(row._mapping)
    del fields["seq"]
    return File(**fields)


class FileStore:
    """For any number of threads. Owners see their own files only; None sees all."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        *,
        clock: Callable[[], float],
        quota: QuotaConfig = _NO_QUOTA,
    ) -> None:
        self._database = database
        self._quota = quota
        self._storage = storage
        self._clock = clock

    def add(
        self,
        blocks: Iterable[bytes],
        *,
        owner: str,
        filename: str,
        purpose: str,
        expires_s: int | None,
    ) -> File:
        """Keep a file of these bytes; it is there for good on return. ApiError 429, 503."""
        name = new_id("file-")
        is_published = False
        try:
            num_bytes = self._storage.write(name, blocks)
            now = int(self._clock())
            file = File(
                id=name,
                owner=owner,
                purpose=purpose,
                filename=filename,
                num_bytes=num_bytes,
                created_at=now,
                expires_at=None if expires_s is None else now + expires_s,
            )
            with self._database.write() as connection:
                check_new_file(self._database, connection, file, self._quota, now=now)
                connection.execute(files.insert().values(**_columns(file)))
                self._storage.publish(name)
                is_published = True
        finally:
            if not is_published:
                self._storage.discard(name)
        return file

    def get(self, name: str, *, owner: str | None) -> File:
        """ApiError 404."""
        with self._database.read() as connection:
            row = connection.execute(self._visible(owner).where(files.c.id == name)).first()
        if row is None:
            raise not_found("file", name)
        return file_of(row)

    def page(
        self,
        *,
        owner: str | None,
        purpose: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> tuple[list[File], bool]:
        """At most `limit` files after that one, and whether there are more. ApiError 404."""
        query = self._visible(owner)
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        with self._database.read() as connection:
            if after is not None:
                asked = sa.select(files.c.seq).where(files.c.id == after)
                if owner is not None:
                    asked = asked.where(files.c.owner == owner)
                seq = connection.execute(asked).scalar()
                if seq is None:
                    raise not_found("file", after)
                query = query.where(files.c.seq < seq if newest_first else files.c.seq > seq)
            order = files.c.seq.desc() if newest_first else files.c.seq
            rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
        return [file_of(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, name: str, *, owner: str | None) -> None:
        """ApiError 404. A batch that reads it goes on. Where its place is away it is gone all the
        same, and its bytes go later."""
        file = self.get(name, owner=owner)
        with self._database.write() as connection:
            _remove(connection, file)
        self._storage.forget(name)
        with suppress(FilesAwayError):
            self.sweep()

    def open(self, name: str) -> BinaryIO:
        """An uploaded file, to be read here and there. FileNotFoundError; ApiError 503."""
        return self._storage.open(name)

    def num_lines(self, name: str, *, max_line_bytes: int) -> int:
        """Of an uploaded file, without the empty ones. ApiError 404, 503."""
        try:
            with self.open(name) as content:
                found = raw_lines(content, max_line_bytes=max_line_bytes)
                return sum(not line.is_empty for line in found)
        except FileNotFoundError:
            raise not_found("file", name) from None

    def content(self, file: File) -> Iterator[bytes]:
        """Its bytes, a block at a time. ApiError 404, 503."""
        if file.batch_id is not None and not self._storage.is_far:
            yield from self._results(file.batch_id, is_errors=file.is_errors)
            return
        try:
            yield from self._storage.read(file.id)
        except FileNotFoundError:
            raise not_found("file", file.id) from None

    def write_results(self, batch_id: str) -> dict[bool, tuple[str, int]]:
        """The results of a batch, all of whose lines are done, as files that nobody has listed yet:
        whether it is the one of the errors -> its name and bytes. {} where results stay rows.
        ApiError 503."""
        made: dict[bool, tuple[str, int]] = {}
        if not self._storage.is_far:
            return made
        for is_errors in (False, True):
            blocks = self._results(batch_id, is_errors=is_errors)
            if (first := next(blocks, None)) is None:
                continue
            name = new_id("file-")
            try:
                made[is_errors] = name, self._storage.write(name, chain([first], blocks))
            except BaseException:
                self._storage.discard(name)
                raise
        return made

    def _results(self, batch_id: str, *, is_errors: bool) -> Iterator[bytes]:
        number = 0
        while True:
            with self._database.read() as connection:
                rows = connection.execute(
                    sa.select(results.c.number, results.c.data)
                    .join(batches, batches.c.seq == results.c.batch)
                    .where(
                        batches.c.id == batch_id,
                        results.c.is_errors == is_errors,
                        results.c.number > number,
                    )
                    .order_by(results.c.number)
                    .limit(_RESULTS_PER_PAGE)
                ).all()
            if not rows:
                return
            number = rows[-1].number
            yield b"".join(row.data for row in rows)

    def sweep(self) -> None:
        """Let go of files that have expired, and of bytes that nothing needs any more. ApiError
        503."""
        with self._database.write() as connection:
            # The bytes of a file are in the folder a moment before others see that it is listed.
            self._database.keep_others_from_adding_files(connection)
            expired = files.c.expires_at <= int(self._clock())
            gone = [file_of(row) for row in connection.execute(sa.select(files).where(expired))]
            for file in gone:
                _remove(connection, file)
            listed = set(connection.scalars(sa.select(files.c.id)))
            query = sa.select(batches.c.input_file_id).where(batches.c.status.in_(OPEN))
            in_use = set(connection.scalars(query))
            if not self._storage.is_far:
                self._storage.sweep(listed | in_use, in_use=in_use)
        # Nobody waits for a place that answers when it likes, which goes by time instead.
        if self._storage.is_far:
            for file in gone:
                self._storage.forget(file.id)
            self._storage.sweep(listed | in_use, in_use=in_use)

    def _visible(self, owner: str | None) -> Any:
        now = int(self._clock())
        query = sa.select(files).where(
            sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now)
        )
        return query if owner is None else query.where(files.c.owner == owner)


def _columns(file: File) -> dict[str, Any]:
    return {name: getattr(file, name) for name in File.__dataclass_fields__}


def _remove(connection: sa.Connection, file: File) -> None:
    connection.execute(files.delete().where(files.c.id == file.id))
    if file.batch_id is not None:
        seq = sa.select(batches.c.seq).where(batches.c.id == file.batch_id).scalar_subquery()
        connection.execute(
            results.delete().where(results.c.batch == seq, results.c.is_errors == file.is_errors)
        )
