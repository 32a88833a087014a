"""Bodies that are too large are answered with 413 before they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["BodyLimit"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_WITH_LARGE_BODIES = (
    "/v1/files",
    "/v1/uploads",
    "/v1/audio",
    "/update_weights",
    "/load_lora_adapter",
    "/add_external_corpus",
)
"""Beginnings of paths that take files or weights, with limits of their own or an admin key."""


class BodyLimit:
    """ASGI middleware.

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
            # What the application says of a body that it could not read is not of interest.
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
