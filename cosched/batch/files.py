"""Files: uploads and results of batches.

The bytes of uploads are in a folder or at a URL. Results are rows of the database while their batch
is open; after that they stay rows if files are in a folder, and become files at a URL.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import Any, BinaryIO

import sqlalchemy as sa

from cosched.batch.batch_records import OPEN, File
from cosched.batch.config import NO_QUOTA, BatchesConfig, QuotaConfig
from cosched.batch.database import Database, batches, files, results
from cosched.batch.errors import ApiError, not_found
from cosched.batch.jsonl.file_kinds import fault_of_file
from cosched.batch.jsonl.lines import raw_lines
from cosched.batch.jsonl.parquet import ParquetRows, TooLargeError, is_parquet
from cosched.batch.once import Once, claim, recorded, remove_stale
from cosched.batch.quota import (
    FILE_BYTES,
    beyond_stored,
    check_new_file,
    most_stored,
    stored_bytes,
)
from cosched.batch.storage import FilesUnavailableError, Storage
from cosched.errors import CoschedError

_RESULTS_PER_PAGE = 200
_BLOCK_BYTES = 1 << 20
_MAX_NAME = 255
_DECODER_MB, _TIMES_FILE = 128, 4
"""Memory to decode a Parquet file that may be accepted: of lines of 1 MB, pyarrow makes one page,
which is there compressed and decompressed, and its values are copied."""


def new_id(prefix: str) -> str:
    """`prefix` and 128 random bits."""
    return prefix + secrets.token_hex(16)


def upload_blocks(
    content: BinaryIO, *, config: BatchesConfig, room: int | None = None
) -> Iterator[bytes]:
    """What is kept of an upload: its bytes, or row N of a Parquet file as line N. room: bytes that
    the quota leaves, as `FileStore.room`. ApiError 400, 413, 429, also after some blocks: the
    Parquet file is damaged or too large."""
    if not is_parquet(content):
        block = content.read(_BLOCK_BYTES)
        if (fault := fault_of_file(block)) is not None:
            raise ApiError(f"file: {fault}", param="file")
        while block:
            yield block
            block = content.read(_BLOCK_BYTES)
        return
    try:
        memory_mb = _DECODER_MB + _TIMES_FILE * math.ceil(config.max_file_mb)
        with ParquetRows(content, memory_mb=memory_mb) as rows:
            yield from _decoded(rows, config, room)
    except TooLargeError as error:
        raise ApiError(str(error), status=413, param="file") from None
    except ApiError:
        raise
    except CoschedError as error:
        raise ApiError(str(error), param="file") from None


def _decoded(rows: ParquetRows, config: BatchesConfig, room: int | None) -> Iterator[bytes]:
    if rows.num_rows > config.max_lines:
        raise ApiError(
            f"a batch may have {config.max_lines} lines (batches.max_lines), and the Parquet "
            f"file has {rows.num_rows} rows",
            param="file",
        )
    num_left, number, num_bytes = config.max_file_bytes, 1, FILE_BYTES
    while block := rows.read(_BLOCK_BYTES):
        number += block.count(b"\n", 0, num_left)
        num_left -= len(block)
        num_bytes += len(block)
        if num_left < 0:
            raise too_large(config, f"; as JSONL, row {number} exceeds that")
        if room is not None and num_bytes > room:
            raise beyond_stored(room, num_bytes)
        yield block


def checked_name(filename: str) -> str:
    """ApiError 400: lists of files show it."""
    if len(filename) > _MAX_NAME:
        raise ApiError(
            f"file: its name has {len(filename)} characters; the limit is {_MAX_NAME}", param="file"
        )
    return filename


def too_large(config: BatchesConfig, more: str = "") -> ApiError:
    message = f"a file may have {config.max_file_bytes} bytes (batches.max_file_mb){more}"
    return ApiError(message, status=413, param="file")


class FileStore:
    """For any number of threads. Owners see only their own files; None sees all."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        *,
        clock: Callable[[], float],
        quota: QuotaConfig = NO_QUOTA,
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
        once: Once | None = None,
    ) -> File:
        """Keep a file of these bytes; it is durable on return. once: what an earlier request with
        this key has kept is returned instead. ApiError 422, 429, 503."""
        if once is not None and (earlier := self.made_before(once)) is not None:
            return earlier
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
                if once is not None:
                    made = claim(self._database, connection, once, name, now=now)
                    if made is not None:  # by a request at the same time
                        return _file_of(self._row(connection, made))
                check_new_file(self._database, connection, file, self._quota, now=now)
                connection.execute(files.insert().values(**asdict(file)))
                self._storage.publish(name)
                is_published = True
        finally:
            if not is_published:
                self._storage.discard(name)
        return file

    def made_before(self, once: Once) -> File | None:
        """The file that an earlier request with this key has made. ApiError 422."""
        with self._database.read() as connection:
            made = recorded(connection, once, now=int(self._clock()))
            return None if made is None else _file_of(self._row(connection, made))

    def room(self, owner: str) -> int | None:
        """Bytes that the quota leaves for new files; None: there is no limit."""
        if self._quota.max_stored_mb is None:
            return None
        with self._database.read() as connection:
            num_stored = stored_bytes(connection, owner, now=int(self._clock()))
        return most_stored(self._quota.max_stored_mb) - num_stored

    def get(self, name: str, *, owner: str | None) -> File:
        """ApiError 404."""
        with self._database.read() as connection:
            return _file_of(self._row(connection, name, owner=owner))

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
                of_owner = sa.true() if owner is None else files.c.owner == owner
                found = sa.select(files.c.seq).where(files.c.id == after, of_owner)
                seq = connection.execute(found).scalar()
                if seq is None:
                    raise not_found("file", after)
                query = query.where(files.c.seq < seq if newest_first else files.c.seq > seq)
            order = files.c.seq.desc() if newest_first else files.c.seq
            rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
        return [_file_of(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, name: str, *, owner: str | None) -> None:
        """ApiError 404. A batch that reads the file can finish. Its bytes are removed now or by a
        later sweep."""
        file = self.get(name, owner=owner)
        with self._database.write() as connection:
            _remove(connection, file)
        self._storage.forget(name)
        with suppress(FilesUnavailableError):
            self.sweep()

    def open(self, name: str) -> BinaryIO:
        """An uploaded file, seekable. FileNotFoundError; ApiError 503."""
        return self._storage.open(name)

    def num_lines(self, name: str, *, max_line_bytes: int) -> int:
        """Lines of an uploaded file that are not empty. ApiError 404, 503."""
        try:
            with self.open(name) as content:
                found = raw_lines(content, max_line_bytes=max_line_bytes)
                return sum(not line.is_empty for line in found)
        except FileNotFoundError:
            raise not_found("file", name) from None

    def content(self, file: File) -> Iterator[bytes]:
        """The bytes, a block at a time. ApiError 404, 503."""
        if file.batch_id is not None and not self._storage.is_remote:
            yield from self._results(file.batch_id, is_errors=file.is_errors)
            return
        try:
            yield from self._storage.read(file.id)
        except FileNotFoundError:
            raise not_found("file", file.id) from None

    def write_results(self, batch_id: str) -> dict[bool, tuple[str, int]]:
        """Write the results of a batch whose lines are all done as files, which are not listed yet:
        is_errors -> name and bytes. {} if results stay rows. ApiError 503."""
        made: dict[bool, tuple[str, int]] = {}
        for is_errors in (False, True) if self._storage.is_remote else ():
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
        """Pages of about a block, each from a connection of its own: clients may read slowly."""
        number = 0
        seq = sa.select(batches.c.seq).where(batches.c.id == batch_id).scalar_subquery()
        while True:
            left = sa.and_(
                results.c.batch == seq,
                results.c.is_errors == is_errors,
                results.c.number > number,
            )
            sizes = sa.select(results.c.number, sa.func.length(results.c.data)).where(left)
            with self._database.read() as connection:
                num_bytes = 0
                for found, size in connection.execute(
                    sizes.order_by(results.c.number).limit(_RESULTS_PER_PAGE)
                ).all():
                    if num_bytes and num_bytes + size > _BLOCK_BYTES:
                        break
                    number, num_bytes = found, num_bytes + size
                if not num_bytes:
                    return
                page = sa.select(results.c.data).where(left, results.c.number <= number)
                block = b"".join(connection.scalars(page.order_by(results.c.number)))
            yield block

    def sweep(self) -> None:
        """Remove files that have expired, bytes that nothing needs, and idempotency keys that no
        longer hold. ApiError 503."""
        now = int(self._clock())
        with self._database.write() as connection:
            # The bytes of a file are in the folder a moment before others see its row.
            self._database.keep_others_from_adding_files(connection)
            expired = files.c.expires_at <= now
            gone = [_file_of(row) for row in connection.execute(sa.select(files).where(expired))]
            for file in gone:
                _remove(connection, file)
            remove_stale(connection, now=now)
            listed = set(connection.scalars(sa.select(files.c.id)))
            query = sa.select(batches.c.input_file_id).where(batches.c.status.in_(OPEN))
            in_use = set(connection.scalars(query))
            if not self._storage.is_remote:
                self._storage.sweep(listed | in_use, in_use=in_use)
        # Without the lock, which a slow store would hold for long; it goes by time instead.
        if self._storage.is_remote:
            for file in gone:
                self._storage.forget(file.id)
            self._storage.sweep(listed | in_use, in_use=in_use)

    def _row(self, connection: sa.Connection, name: str, *, owner: str | None = None) -> Any:
        """ApiError 404."""
        row = connection.execute(self._visible(owner).where(files.c.id == name)).first()
        if row is None:
            raise not_found("file", name)
        return row

    def _visible(self, owner: str | None) -> Any:
        now = int(self._clock())
        query = sa.select(files).where(
            sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now)
        )
        return query if owner is None else query.where(files.c.owner == owner)


def _file_of(row: Any) -> File:
    fields = dict(row._mapping)
    del fields["seq"]
    return File(**fields)


def _remove(connection: sa.Connection, file: File) -> None:
    connection.execute(files.delete().where(files.c.id == file.id))
    if file.batch_id is not None:
        seq = sa.select(batches.c.seq).where(batches.c.id == file.batch_id).scalar_subquery()
        connection.execute(
            results.delete().where(results.c.batch == seq, results.c.is_errors == file.is_errors)
        )
