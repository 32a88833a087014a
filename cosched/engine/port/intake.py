"""Requests that are answered outside the stream of outputs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from cosched.engine import port

__all__ = ["answer_with_error", "refuse"]


def refuse(scheduler: Any, received: Any, message: str) -> None:
    """Answer one that is received and not built with HTTP 400."""
    reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": message}
    answer = AbortReq(rid=received.rid, finished_reason=reason)
    port.send_abort(scheduler, answer, received)


def answer_with_error(scheduler: Any, req: Any, status: HTTPStatus, message: str) -> None:
    """Answer one that was built, and is neither queued nor running now."""
    port.send_abort(scheduler, port.error_answer(req, status, message), req)
