"""Operations on the model of a running server do not wait for the offline pool.

New weights wait for the requests in flight, and a LoRA adapter is unloaded when its requests have
ended. Requests in the offline pool may wait for longer than any operator. They hold no weights:
they begin after the operation, or are sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import SetInternalStateReq

from cosched.core.request import RequestClass
from cosched.engine.offline_gate import HOLD, adapter_to_message
from cosched.engine.port.model_lock import ModelLock, reads_offline
from cosched.limits.bodies import NATIVE
from cosched.wire import class_of_priority

logger = logging.getLogger(__name__)

_LET_GO_S = 0.5
"""Between two messages: requests may still be on their way to the pool."""


def use_model_lock(manager: Any) -> None:
    """Give the HTTP side of an engine the lock that does not count waiting offline requests."""

    async def hold(is_held: bool) -> bool:
        message = SetInternalStateReq(server_args={HOLD: int(is_held)})
        return all(await manager.set_internal_state(message))

    manager.model_update_lock = ModelLock(hold)


def is_about_to_read(priority: int | None) -> None:
    """This task takes the lock for a request of this priority next."""
    reads_offline.set(class_of_priority(priority) is RequestClass.OFFLINE)


async def refuse_waiting(manager: Any, *, within_s: float, message: str) -> None:
    """Answer requests that wait for an operation, or for the end of a pause, with 503."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            if isinstance(manager.model_update_lock, ModelLock):
                refusal = HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, message)
                await manager.model_update_lock.close(refusal)
            async with manager.is_pause_cond:
                manager.is_pause = False  # here only: the schedulers stay paused
                manager.is_pause_cond.notify_all()


@contextlib.asynccontextmanager
async def unloading(manager: Any, operation: Any) -> Any:
    """Within the block SGLang waits for the requests of an adapter, whose id it notes in
    `operation` once no new request can name it."""
    task = asyncio.create_task(_let_go(manager, operation))
    try:
        yield
    finally:
        task.cancel()


async def _let_go(manager: Any, operation: Any) -> None:
    while True:
        if operation.lora_id is not None:
            message = SetInternalStateReq(server_args=adapter_to_message(operation.lora_id))
            try:
                await manager.set_internal_state(message)
            except Exception:
                logger.exception("cosched: waiting offline requests keep a LoRA adapter")
        await asyncio.sleep(_LET_GO_S)


class StreamEndedError(ValueError):
    """A refusal within a stream: SGLang ends the stream with the text and the status."""

    def __init__(self, refusal: HTTPException) -> None:
        super().__init__(refusal.detail)
        self.status_code = refusal.status_code


def refusal_of(error: HTTPException, obj: Any, request: Any) -> Exception:
    """What to raise for it. A stream of /generate begins before anything is known: there an
    HTTPException would end the connection without an answer."""
    route = None if request is None else request.scope.get("route")
    is_begun = getattr(obj, "stream", False) and getattr(route, "path", "") in NATIVE
    return StreamEndedError(error) if is_begun else error
