"""Files: uploaded ones, whose bytes lie in a folder, and results, whose lines are rows."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from cosched.batches.config import QuotaConfig
from cosched.batches.data import OPEN, File
from cosched.batches.database import Database, batches, files, results
from cosched.batches.errors import not_found
from cosched.batches.quota import check_new_file
from cosched.jobs.source import raw_lines

__all__ = ["FileStore", "file_of", "new_id"]

_BLOCK_BYTES = 1 << 20
_RESULTS_PER_PAGE = 200
_NO_QUOTA = QuotaConfig()
_PART = ".part"
_PART_S = 3600.0
"""An upload to which nothing was added for so long was cut short: its server ended."""


def new_id(kind: str) -> str:
    """``kind`` and 128 bits of chance."""
    return kind + secrets.token_hex(16)


def file_of(row: Any) -> File:
    fields = dict(row._mapping)
    del fields["seq"]
    return File(**fields)


class FileStore:
    """For any number of threads. Owners see their own files only; None is the server itself."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        *,
        clock: Callable[[], float],
        quota: QuotaConfig = _NO_QUOTA,
    ) -> None:
        self._database = database
        self._quota = quota
        self._folder = folder / "files"
        self._clock = clock
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        blocks: Iterable[bytes],
        *,
        owner: str,
        filename: str,
        purpose: str,
        expires_s: int | None,
    ) -> File:
        """Keep a file of these bytes; it is on the disk on return. ApiError 429."""
        name = new_id("file-")
        part = self._folder / (name + _PART)
        try:
            with part.open("xb") as copy:
                copy.writelines(blocks)
                copy.flush()
                os.fsync(copy.fileno())
            now = int(self._clock())
            file = File(
                id=name,
                owner=owner,
                purpose=purpose,
                filename=filename,
                num_bytes=part.stat().st_size,
                created_at=now,
                expires_at=None if expires_s is None else now + expires_s,
            )
            with self._database.write() as connection:
                check_new_file(self._database, connection, file, self._quota, now=now)
                connection.execute(files.insert().values(**_columns(file)))
                part.rename(self._folder / name)
                _sync_folder(self._folder)
        finally:
            part.unlink(missing_ok=True)
        return file

    def get(self, name: str, *, owner: str | None) -> File:
        """ApiError 404."""
        with self._database.read() as connection:
            row = connection.execute(self._visible(owner).where(files.c.id == name)).first()
        if row is None:
            raise not_found("file", name)
        return file_of(row)

    def page(
        self, *, owner: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[File], bool]:
        """At most `limit` files after that one, and whether there are more. ApiError 404."""
        query = self._visible(owner)
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        with self._database.read() as connection:
            if after is not None:
                seq = connection.execute(
                    sa.select(files.c.seq).where(files.c.id == after, files.c.owner == owner)
                ).scalar()
                if seq is None:
                    raise not_found("file", after)
                query = query.where(files.c.seq < seq if newest_first else files.c.seq > seq)
            order = files.c.seq.desc() if newest_first else files.c.seq
            rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
        return [file_of(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, name: str, *, owner: str) -> None:
        """ApiError 404. A batch that reads it goes on."""
        file = self.get(name, owner=owner)
        with self._database.write() as connection:
            _remove(connection, file)
        self.sweep()

    def path(self, name: str) -> Path:
        """Where the bytes of an uploaded file are. `name` is one that the store gave."""
        return self._folder / name

    def num_lines(self, name: str, *, max_line_bytes: int) -> int:
        """Of an uploaded file, without the empty ones. ApiError 404."""
        try:
            with self.path(name).open("rb") as content:
                found = raw_lines(content, max_line_bytes=max_line_bytes)
                return sum(not line.is_empty for line in found)
        except FileNotFoundError:
            raise not_found("file", name) from None

    def content(self, file: File) -> Iterator[bytes]:
        """Its bytes, a block at a time."""
        if file.batch_id is not None:
            yield from self._results(file)
            return
        try:
            with self.path(file.id).open("rb") as content:
                while block := content.read(_BLOCK_BYTES):
                    yield block
        except FileNotFoundError:
            raise not_found("file", file.id) from None

    def _results(self, file: File) -> Iterator[bytes]:
        number = 0
        while True:
            with self._database.read() as connection:
                rows = connection.execute(
                    sa.select(results.c.number, results.c.data)
                    .join(batches, batches.c.seq == results.c.batch)
                    .where(
                        batches.c.id == file.batch_id,
                        results.c.is_errors == file.is_errors,
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
        """Let go of files that have expired, and of bytes that nothing needs any more."""
        with self._database.write() as connection:
            # The bytes of a file are in the folder a moment before others see that it is listed.
            self._database.keep_others_from_adding_files(connection)
            expired = files.c.expires_at <= int(self._clock())
            for row in connection.execute(sa.select(files).where(expired)).all():
                _remove(connection, file_of(row))
            listed = set(connection.scalars(sa.select(files.c.id)))
            in_use = sa.select(batches.c.input_file_id).where(batches.c.status.in_(OPEN))
            listed.update(connection.scalars(in_use))
            for path in self._folder.iterdir():
                if path.suffix == _PART:
                    is_left = time.time() - _last_write_s(path) > _PART_S
                else:
                    is_left = path.name not in listed
                if is_left:
                    path.unlink(missing_ok=True)

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


def _last_write_s(path: Path) -> float:
    """Seconds of the epoch; now where it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _sync_folder(folder: Path) -> None:
    """A name in a folder is on the disk only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
