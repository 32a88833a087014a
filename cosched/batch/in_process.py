"""HTTP requests of the server to itself, without a network between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import httpx

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class InProcessTransport(httpx.AsyncBaseTransport):
    """Hands requests to an ASGI application.

    As a connection does, and unlike `httpx.ASGITransport`, it lets the application go on when the
    caller is cancelled, and tells it that the client has hung up: SGLang takes back a request only
    where it learns that.
    """

    def __init__(self, app: App, *, state: Mapping[str, Any]) -> None:
        """`state`: what `request.state` begins with; a request may add to it, as its extension of
        that name."""
        self._app = app
        self._state = state
        self._running: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        reply = _Reply()
        gone = asyncio.Event()
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        # A weak reference is all that the loop keeps of a task.
        task = asyncio.ensure_future(self._app(self._scope(request), receive, reply.add))
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.shield(task)
        except Exception as error:
            # Starlette answers 500 and raises all the same.
            if reply.status is None:
                raise httpx.RemoteProtocolError(repr(error), request=request) from error
        finally:
            gone.set()
        if reply.status is None:
            raise httpx.RemoteProtocolError("no reply", request=request)
        return httpx.Response(reply.status, headers=reply.headers, content=bytes(reply.body))

    async def aclose(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _scope(self, request: httpx.Request) -> Message:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
            "state": {**self._state, **request.extensions.get("state", {})},
        }

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, or asyncio complains


class _Reply:
    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()

    async def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
