"""ASGI middleware around SGLang's web application that needs nothing of SGLang."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from importlib.resources import files
from typing import Any

from fastapi.responses import Response

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}

_WITH_LARGE_BODIES = (
    "/v1/files",
    "/v1/messages/batches",
    "/update_weights",
    "/load_lora_adapter",
    "/add_external_corpus",
)
"""Beginnings of paths that take files or weights, with limits of their own or an admin key."""


class BodyLimit:
    """Answers 413 for a body that is too large, before it is read.

    limit   most bytes; called once requests come, when the model is known
    answer  the application that answers in the form of the endpoint, given the message
    """

    def __init__(
        self, app: Any, *, limit: Callable[[], int], answer: Callable[[Scope, str], Any]
    ) -> None:
        self.app = app
        self.limit = limit
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_WITH_LARGE_BODIES):
            await self.app(scope, receive, send)
            return
        limit = self.limit()
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            await self._refuse(scope, receive, send, f"the body has {int(announced)} bytes")
            return
        body = _Body(receive, limit)
        has_begun = False

        async def watch(message: Message) -> None:
            nonlocal has_begun
            # The application's answer to a body that it could not read is dropped.
            if has_begun or not body.is_too_large:
                has_begun = True
                await send(message)

        try:
            await self.app(scope, body, watch)
        except _TooLargeError:
            pass
        if body.is_too_large and not has_begun:
            await self._refuse(scope, receive, send, "the body goes on")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, what: str) -> None:
        message = f"{what}, above the limit of {self.limit()} bytes (limits.body_mb)"

        async def closing(part: Message) -> None:
            if part["type"] == "http.response.start":
                part["headers"] = [*part.get("headers", []), (b"connection", b"close")]
            await send(part)

        await (await self.answer(scope, message))(scope, receive, closing)


class _TooLargeError(Exception):
    """Ends the reading of a body."""


class _Body:
    """The messages of a body, counted."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit
        self.is_too_large = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self.is_too_large = True
                raise _TooLargeError
        return message


def add_outermost(app: Any, wrap: Callable[[App], App]) -> None:
    """Put a middleware around all others: those of earlier calls, and what SGLang adds later (its
    check of API keys). Called before the application starts."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: wrap(build())


def add_key_header(app: Any) -> None:
    """The API key of a request is also read from ``x-api-key``, which clients of Anthropic's API
    send: SGLang checks ``Authorization`` only. Called before the application starts."""
    add_outermost(app, _KeyHeader)


class _KeyHeader:
    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if b"authorization" not in headers and b"x-api-key" in headers:
                bearer = b"Bearer " + headers[b"x-api-key"].strip()
                scope = {**scope, "headers": [*scope["headers"], (b"authorization", bearer)]}
        await self._app(scope, receive, send)


def add_page(app: Any) -> None:
    """Serve ``/cosched`` as a page to browsers. Called before the application starts.

    It is served without an API key: a browser cannot send one when it opens an address. The page
    holds no data, and uses the key that the operator enters for its requests.
    """
    page = files("cosched.server").joinpath("page.html").read_bytes()
    add_outermost(app, lambda inner: _Page(inner, page))


class _Page:
    def __init__(self, app: App, page: bytes) -> None:
        self._app = app
        self._answer = Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_asked_for = (
            scope["type"] == "http"
            and scope["method"] == "GET"
            and scope["path"] == "/cosched"
            and b"text/html" in dict(scope["headers"]).get(b"accept", b"")
        )
        await (self._answer if is_asked_for else self._app)(scope, receive, send)
