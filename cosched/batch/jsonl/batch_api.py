"""The Files and Batches of a server, as a client of them: what `run_batch` needs."""

from __future__ import annotations

import asyncio
import random
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
"""Of the error with which a server refuses more than a tenant may have."""
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


class RemoteBatch(msgspec.Struct, frozen=True):
    """A batch as its server shows it; `cosched` is what it expects of it."""

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


class _Named(msgspec.Struct, frozen=True):
    id: str


class _Page(msgspec.Struct, frozen=True):
    data: list[RemoteBatch]
    has_more: bool


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | None = None


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error = _Error()


class _BusyError(httpx.TransportError):
    """The server is there, and can do nothing now."""


class BatchApi(HttpClients):
    """Each call is tried again while the server is away or busy, for as long as `rules` allow; then
    it raises ServerGoneError. What the server refuses is a ServerRefusedError, of which a full
    quota is the QuotaError."""

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str | None,
        rules: RetryRules,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # A file of 200 MB takes its time.
        timeout = httpx.Timeout(600.0, connect=10.0)
        self.base_url = base_url
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout, trust_env=False
        )
        self.pools = (self._http,)
        self._rules = rules
        self._rng = rng
        self._clock = clock

    async def is_there(self) -> bool:
        """Whether the server has batches at all; False also while it is away."""
        with suppress(httpx.RequestError, msgspec.DecodeError, UnicodeDecodeError):
            reply = await self._http.get("/v1/batches", params={"limit": 1})
            if reply.is_success:
                msgspec.json.decode(reply.content, type=_Page)
                return True
        return False

    async def upload(self, content: BinaryIO, *, filename: str) -> str:
        """The new file's id."""

        async def send() -> str:
            content.seek(0)
            reply = await self._http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": (filename, content)}
            )
            return _read(reply, _Named).id

        return await self._patiently(send)

    async def create(
        self, *, file_id: str, endpoint: str, window: str, metadata: dict[str, str]
    ) -> RemoteBatch:
        """A batch, or the one with this metadata that an earlier try has made."""
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": metadata,
        }
        is_again = False

        async def send() -> RemoteBatch:
            nonlocal is_again
            if is_again:
                found = [one async for one in self.all() if one.metadata == metadata]
                if found:
                    return found[0]
            is_again = True
            return _read(await self._http.post("/v1/batches", json=body), RemoteBatch)

        return await self._patiently(send)

    async def all(self) -> AsyncIterator[RemoteBatch]:
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

    async def of_metadata(self, key: str, value: str) -> list[RemoteBatch]:
        """Those whose metadata say this, oldest first."""

        async def look() -> list[RemoteBatch]:
            return [one async for one in self.all() if (one.metadata or {}).get(key) == value]

        return (await self._patiently(look))[::-1]

    async def cancel(self, batch_id: str) -> None:
        """Does nothing to one that has ended."""

        async def send() -> None:
            reply = await self._http.post(f"/v1/batches/{batch_id}/cancel")
            if reply.status_code != httpx.codes.CONFLICT:
                _read(reply, RemoteBatch)

        await self._patiently(send)

    async def delete(self, file_id: str) -> None:
        """Does nothing to one that is gone."""

        async def send() -> None:
            reply = await self._http.delete(f"/v1/files/{file_id}")
            if reply.status_code != httpx.codes.NOT_FOUND:
                _read(reply, _Named)

        await self._patiently(send)

    async def lines(self, file_id: str) -> AsyncIterator[bytes]:
        """Of a file of results, line breaks included. An httpx.RequestError may come in the midst
        of it."""
        async with self._http.stream("GET", f"/v1/files/{file_id}/content") as reply:
            if not reply.is_success:
                await reply.aread()
                _read(reply, _Named)
            left = b""
            async for block in reply.aiter_bytes():
                *whole, left = (left + block).split(b"\n")
                for line in whole:
                    yield line + b"\n"

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        began_s, num_tries = self._clock(), 0
        while True:
            try:
                return await call()
            except httpx.RequestError as error:
                reason = f"{type(error).__name__}: {error}"
            if self._clock() - began_s >= self._rules.max_wait_s:
                raise ServerGoneError(
                    f"{self.base_url} answered nothing for {self._rules.max_wait_s:g} s "
                    f"(--max-wait); the last try: {reason}"
                )
            await asyncio.sleep(self._rules.wait_s(num_tries, self._rng))
            num_tries += 1


def _error_of(reply: httpx.Response) -> _Error:
    try:
        return msgspec.json.decode(reply.content, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Error()


def _read(reply: httpx.Response, kind: type[T]) -> T:
    if reply.status_code in _BUSY_OR_DOWN:
        error = _error_of(reply)
        if error.code == QUOTA_CODE:
            raise QuotaError(f"{error.message}; run the same command again when there is room")
        raise _BusyError(f"HTTP {reply.status_code} {error.message}".rstrip())
    if not reply.is_success:
        raise ServerRefusedError(
            f"{reply.request.method} {reply.request.url.path}: HTTP {reply.status_code}: "
            f"{reply.text[:500]}"
        )
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerRefusedError(
            f"{reply.request.method} {reply.request.url.path}: an answer of another kind: {error}"
        ) from None
