"""The Files and Batches of a server, as a client of them: what `run_batch` needs."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import BinaryIO, TypeVar

import httpx
import msgspec

from cosched.batch.jsonl.client import HttpClients, RetryRules
from cosched.batch.jsonl.errors import QuotaError, ServerGoneError, ServerRefusedError

T = TypeVar("T")

ENDED = ("completed", "failed", "expired", "cancelled")
QUOTA_CODE = "quota_exceeded"
"""Error code for more than the quota of a tenant."""
_BUSY_OR_DOWN = (429, 500, 502, 503, 504)
_PAGE = 100


class _Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class _Fault(msgspec.Struct, frozen=True):
    message: str
    line: int | None = None


class _Faults(msgspec.Struct, frozen=True):
    data: list[_Fault] = msgspec.field(default_factory=list)


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int = 0
    output_tokens: int = 0


class _Forecast(msgspec.Struct, frozen=True):
    finish_s: float | None = None
    miss_chance: float | None = None
    state: str = "measured"
    running: int = 0
    running_done: float = 0.0


class RemoteBatch(msgspec.Struct, frozen=True):
    """A batch as its server shows it, with cosched's own forecast."""

    id: str
    status: str
    input_file_id: str = ""
    request_counts: _Counts = _Counts()
    usage: _Usage = _Usage()
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: _Faults | None = None
    metadata: dict[str, str] | None = None
    cosched: _Forecast | None = None


class _File(msgspec.Struct, frozen=True):
    id: str


class _Page(msgspec.Struct, frozen=True):
    data: list[RemoteBatch]
    has_more: bool


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | None = None


class _ErrorReply(msgspec.Struct, frozen=True):
    error: _Error = _Error()


class NotFoundError(ServerRefusedError):
    """The server has no such file or batch."""


class _BusyError(httpx.TransportError):
    """The server is up and cannot take the request now."""


class BatchApi(HttpClients):
    """Each call is retried while the server is away or busy, for as long as `rules` allow; then it
    raises ServerGoneError. What the server refuses raises ServerRefusedError; a full quota its
    subclass QuotaError."""

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str | None,
        rules: RetryRules,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.base_url = base_url
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(600.0, connect=10.0),  # files may have 200 MB
            trust_env=False,
        )
        self.pools = (self._http,)
        self._rules = rules
        self._rng = rng or random.Random()
        self._clock = clock
        self._answered_s = float("-inf")

    async def has_batches(self) -> bool:
        """Whether the server has a Batch API; False also while it is away."""
        with suppress(httpx.RequestError, msgspec.DecodeError, UnicodeDecodeError):
            reply = await self._http.get("/v1/batches", params={"limit": 1})
            if reply.is_success:
                msgspec.json.decode(reply.content, type=_Page)
                return True
        return False

    async def upload(self, content: BinaryIO, *, filename: str) -> str:
        """The new file's id. A server that knows idempotency keys makes one file of all tries."""
        headers = {"idempotency-key": secrets.token_hex(16)}

        async def send() -> str:
            content.seek(0)
            reply = await self._http.post(
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": (filename, content)},
                headers=headers,
            )
            return _read(reply, _File).id

        return await self._retried(send)

    async def create(
        self, *, file_id: str, endpoint: str, window: str, metadata: dict[str, str]
    ) -> RemoteBatch:
        """A new batch, or the batch with this metadata that an earlier try has made."""
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": metadata,
        }
        is_retry = False

        async def send() -> RemoteBatch:
            nonlocal is_retry
            if is_retry:
                async for one in self._all():
                    if one.metadata == metadata:
                        return one
            is_retry = True
            return _read(await self._http.post("/v1/batches", json=body), RemoteBatch)

        return await self._retried(send)

    async def _all(self) -> AsyncIterator[RemoteBatch]:
        """Newest first."""
        after: dict[str, str] = {}
        while True:
            params = {"limit": str(_PAGE), **after}
            page = _read(await self._http.get("/v1/batches", params=params), _Page)
            for one in page.data:
                yield one
            if not page.has_more:
                return
            after = {"after": page.data[-1].id}

    async def with_metadata(self, key: str, value: str) -> list[RemoteBatch]:
        """The batches with this pair in their metadata, oldest first."""

        async def find() -> list[RemoteBatch]:
            return [one async for one in self._all() if (one.metadata or {}).get(key) == value]

        return (await self._retried(find))[::-1]

    async def get(self, batch_id: str) -> RemoteBatch:
        """NotFoundError."""

        async def send() -> RemoteBatch:
            return _read(await self._http.get(f"/v1/batches/{batch_id}"), RemoteBatch)

        return await self._retried(send)

    async def cancel(self, batch_id: str) -> None:
        """Does nothing if the batch has ended."""

        async def send() -> None:
            reply = await self._http.post(f"/v1/batches/{batch_id}/cancel")
            if reply.status_code != httpx.codes.CONFLICT:
                _read(reply, RemoteBatch)

        await self._retried(send)

    async def delete(self, file_id: str) -> None:
        """Does nothing if the file is gone."""

        async def send() -> None:
            with suppress(NotFoundError):
                _read(await self._http.delete(f"/v1/files/{file_id}"), _File)

        await self._retried(send)

    async def for_each_line(self, file_id: str, handle: Callable[[bytes], None]) -> None:
        """Call `handle` with each line of a file, with its line break. After an interruption it
        begins again with the first line."""

        async def read() -> None:
            async with self._http.stream("GET", f"/v1/files/{file_id}/content") as reply:
                if not reply.is_success:
                    await reply.aread()
                    _read(reply, _File)
                left = b""
                async for block in reply.aiter_bytes():
                    self._answered_s = self._clock()
                    *whole, left = (left + block).split(b"\n")
                    for line in whole:
                        handle(line + b"\n")

        await self._retried(read)

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        failing_since_s: float | None = None
        num_tries = 0
        while True:
            try:
                return await call()
            except httpx.RequestError as error:
                reason = f"{type(error).__name__}: {error}"
            now_s = self._clock()
            if failing_since_s is None or self._answered_s > failing_since_s:
                failing_since_s, num_tries = now_s, 0
            if now_s - failing_since_s >= self._rules.max_wait_s:
                raise ServerGoneError(
                    f"{self.base_url} answered nothing for {self._rules.max_wait_s:g} s "
                    f"(--max-wait); the last try: {reason}"
                )
            await asyncio.sleep(self._rules.wait_s(num_tries, self._rng))
            num_tries += 1


def _read(reply: httpx.Response, kind: type[T]) -> T:
    what = f"{reply.request.method} {reply.request.url.path}"
    if reply.status_code in _BUSY_OR_DOWN:
        error = _Error()
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            error = msgspec.json.decode(reply.content, type=_ErrorReply).error
        if error.code == QUOTA_CODE:
            raise QuotaError(f"{error.message}; run the same command again when the quota allows")
        raise _BusyError(f"HTTP {reply.status_code} {error.message}".rstrip())
    if not reply.is_success:
        is_missing = reply.status_code == httpx.codes.NOT_FOUND
        raise (NotFoundError if is_missing else ServerRefusedError)(
            f"{what}: HTTP {reply.status_code}: {reply.text[:500]}"
        )
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerRefusedError(f"{what}: unexpected answer: {error}") from None
