"""What the routes answer with when a client asks for what cannot be."""

from __future__ import annotations

from cosched.errors import CoschedError

__all__ = ["ApiError", "not_found"]


class ApiError(CoschedError):
    """An HTTP status, and what OpenAI's error object says. `param`: the field that is wrong."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def not_found(kind: str, name: str) -> ApiError:
    """Also what another owner's looks like."""
    return ApiError(f"no {kind} {name!r}", status=404, param="id", code="not_found")
