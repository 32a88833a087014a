"""What the routes answer with when a client asks for what cannot be."""

from __future__ import annotations

from cosched.errors import CoschedError

_STORE_RETRY_S = 5


class ApiError(CoschedError):
    """An HTTP status, and what OpenAI's error object says.

    param          the field that is wrong
    retry_after_s  when to ask again, for what may be there by then [s]
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class StoreAwayError(ApiError):
    """The database cannot be used now; all that it holds is as it was."""

    def __init__(self, reason: str) -> None:
        """reason: for the operator's log; clients are not told, as it may name hosts and paths."""
        super().__init__(
            "the store of batches cannot be used now; try again",
            status=503,
            code="store_away",
            retry_after_s=_STORE_RETRY_S,
        )
        self.reason = reason

    @property
    def for_log(self) -> str:
        return f"the store of batches cannot be used now: {self.reason}"


def not_found(kind: str, name: str) -> ApiError:
    """Also what another owner's looks like."""
    return ApiError(f"no {kind} {name!r}", status=404, param="id", code="not_found")
