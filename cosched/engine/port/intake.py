"""Requests that the scheduler receives and does not build."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from cosched.engine import port

__all__ = ["refuse"]


def refuse(scheduler: Any, received: Any, message: str) -> None:
    """Answer it with HTTP 400."""
    reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": message}
    answer = AbortReq(rid=received.rid, finished_reason=reason)
    port.send_abort(scheduler, answer, received)
