"""The body of an upload: how many there are at a time, how large and how slow each may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from tempfile import TemporaryFile
from typing import IO, Any

from fastapi import Request
from starlette.formparsers import MultiPartException, MultiPartParser

from cosched.batch.config import BatchesConfig
from cosched.batch.errors import ApiError
from cosched.batch.files import FileStore, too_large
from cosched.batch.quota import beyond_stored
from cosched.batch.storage import FilesUnavailableError
from cosched.batch.threads import FairSlots, FairThreads

_AT_ONCE, _PER_KEY, _MAX_WAITING = 16, 4, 16
_WAIT_S = 20.0
"""For one of these places."""
_SILENCE_S = 30.0
"""Between two parts of a body."""
_LEAST_RATE = 4000
"""Of a body, once it has had `_SILENCE_S` [bytes/s]."""
_FORM_BYTES = 1 << 20
"""Of a form, beside its file."""
_MAX_FIELDS = 20


class Uploads:
    """Reads the forms of uploads. The limits are looked at before a body is read, and while it is;
    what exceeds them is not spooled to the disk first."""

    def __init__(self, config: BatchesConfig, files: FileStore, threads: FairThreads) -> None:
        self._config = config
        self._files = files
        self._threads = threads
        self._slots = FairSlots(_AT_ONCE, per_key=_PER_KEY, max_waiting=_MAX_WAITING)

    @asynccontextmanager
    async def form(
        self, request: Request, *, key: str, owner: str, is_repeated: bool = False
    ) -> AsyncIterator[tuple[Any, int | None]]:
        """The form, whose file is spooled to the disk, and the bytes that the quota leaves (None:
        there is none). is_repeated: its file is there, so no quota is left for it. ApiError 400,
        408, 413, 429, 503."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise ApiError("upload a file as multipart/form-data")
        async with self._slot(key):
            room = None
            if not is_repeated:
                room = await self._threads.run(key, self._files.room, owner)
            form = await self._parsed(request, room)
            try:
                yield form, room
            finally:
                await form.close()

    @asynccontextmanager
    async def body(self, request: Request, *, key: str, owner: str) -> AsyncIterator[IO[bytes]]:
        """A body that is no form, spooled to the disk; else as `form`."""
        async with self._slot(key):
            room = await self._threads.run(key, self._files.room, owner)
            with TemporaryFile() as spooled:
                async for part in self._body(request, room):
                    with _disk_errors():
                        spooled.write(part)
                spooled.seek(0)
                yield spooled

    @asynccontextmanager
    async def _slot(self, key: str) -> AsyncIterator[None]:
        """ApiError 429."""
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._slots.enter(key)
        except TimeoutError:
            raise ApiError(
                f"{_AT_ONCE} uploads are under way, {_PER_KEY} of one API key: try again when some "
                "have ended",
                status=429,
                code="too_many_uploads",
                retry_after_s=int(_WAIT_S),
            ) from None
        try:
            yield
        finally:
            self._slots.leave(key)

    async def _parsed(self, request: Request, room: int | None) -> Any:
        body = self._body(request, room)
        parser = MultiPartParser(request.headers, body, max_files=1, max_fields=_MAX_FIELDS)
        try:
            with _disk_errors():
                return await parser.parse()
        except (MultiPartException, KeyError) as error:
            raise ApiError(f"the form cannot be read: {error}") from None

    async def _body(self, request: Request, room: int | None) -> AsyncGenerator[bytes, None]:
        """room: bytes that the quota leaves; None: there is none."""

        def check(num_bytes: int) -> None:
            if room is not None and num_bytes > room + _FORM_BYTES:
                raise beyond_stored(room, num_bytes)
            if num_bytes > self._config.max_file_bytes + _FORM_BYTES:
                raise too_large(self._config)

        announced = request.headers.get("content-length", "")
        check(int(announced) if announced.isdecimal() else 0)
        num_bytes = 0
        clock = asyncio.get_running_loop().time
        began_s = clock()
        parts = aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise _too_slow(f"nothing came for {_SILENCE_S:g} s") from None
            num_bytes += len(part)
            check(num_bytes)
            took_s = clock() - began_s
            if took_s > _SILENCE_S and num_bytes < took_s * _LEAST_RATE:
                raise _too_slow(f"{num_bytes} bytes in {took_s:.0f} s; least: {_LEAST_RATE} per s")
            yield part


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Of the disk with the temporary files: FilesUnavailableError."""
    try:
        yield
    except OSError as error:
        raise FilesUnavailableError(
            f"an upload cannot be kept: {error.strerror or error}"
        ) from error


def _too_slow(what: str) -> ApiError:
    return ApiError(f"the upload is too slow: {what}", status=408, param="file")
