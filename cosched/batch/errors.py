"""Errors of the Batch API, as its clients see them."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosched.batch.batch_records import Status
from cosched.batch.jsonl.line_results import Failure
from cosched.errors import CoschedError

_STORE_RETRY_S = 5
_HIDDEN = "[path]"
_SOURCE = r"(?:/[\w.+@-]+)+\.(?:py|pyc|so|c|cc|cpp|cu|h|hpp|rs|jinja)\b(?::\d+)?"
"""Source files of programs, wherever they were built."""


CLOSED: dict[Status, Failure] = {
    Status.EXPIRED: Failure(
        code="batch_expired",
        message="this request could not be executed before the completion window expired",
    ),
    Status.CANCELLED: Failure(
        code="batch_cancelled",
        message="this request was not executed because the batch was cancelled",
    ),
}
"""Status with which a batch ends -> the error of its lines without a result."""


class ApiError(CoschedError):
    """An HTTP status and the fields of OpenAI's error object.

    param          the field with the error
    retry_after_s  when the same request may succeed [s]
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


class StoreUnavailableError(ApiError):
    """The database cannot be used now; its content has not changed."""

    def __init__(self, reason: str) -> None:
        """reason: for the operator's log only, as it may name hosts and paths."""
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


def unsent(ending: Status) -> dict[str, Any]:
    """Why a batch that ended in this way before all its lines were checked has no files."""
    message = "the batch ended while its lines were being checked: none was sent, no file was made"
    return {"code": CLOSED[ending].code, "message": message, "param": None, "line": None}


def not_found(kind: str, name: str) -> ApiError:
    """Also for files and batches of other owners."""
    return ApiError(f"no {kind} found with id {name!r}", status=404, param="id", code="not_found")


class Redaction:
    """Removes paths of this machine from texts that clients may read."""

    def __init__(self, folders: Iterable[str] = ()) -> None:
        """folders: of the server, beside those of its programs, its user and its work."""
        found = {*folders, sys.prefix, str(Path.home()), str(Path.cwd()), tempfile.gettempdir()}
        kept = sorted((one for one in found if len(one) > 1 and one[0] == "/"), reverse=True)
        known = "|".join(map(re.escape, kept))
        own = rf"(?:{known})(?![\w.-])[^\s\"'\\,;:()\[\]<>]*"
        self._paths = re.compile(rf"(?<![\w/.:-])(?:{_SOURCE}|{own})")

    def failure(self, failure: Failure) -> Failure:
        """The same without paths, in its message and in the server's answer."""
        body = failure.body
        if body is not None:
            body = self._paths.sub(_HIDDEN, body.decode()).encode()
        message = self._paths.sub(_HIDDEN, failure.message)
        return replace(failure, message=message, body=body)
