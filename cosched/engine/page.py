"""The page for browsers at ``/cosched``. It needs no SGLang, so it is tested without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from importlib.resources import files
from typing import Any

from fastapi.responses import Response

__all__ = ["add_page"]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}


def add_page(app: Any) -> None:
    """``/cosched`` is a page where a browser asks for it. Before the application starts.

    Outside of what checks keys: a browser that goes to an address cannot send one, and the page
    itself says nothing; what it asks for it asks with the key that it is given.
    """
    build = app.build_middleware_stack
    page = files("cosched.engine").joinpath("page.html").read_bytes()
    app.build_middleware_stack = lambda: _Page(build(), page)


class _Page:
    def __init__(self, app: _App, page: bytes) -> None:
        self._app = app
        self._answer = Response(page, media_type="text/html", headers=_HEADERS)

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        is_asked_for = (
            scope["type"] == "http"
            and scope["method"] == "GET"
            and scope["path"] == "/cosched"
            and b"text/html" in dict(scope["headers"]).get(b"accept", b"")
        )
        await (self._answer if is_asked_for else self._app)(scope, receive, send)
