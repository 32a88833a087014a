"""SGLang's lock of the model, for which operations on the weights do not wait for the offline pool.

In SGLang a request holds the lock for reading until it has its last token. An operation that
replaces weights takes it for writing: it waits for all requests, and new ones wait for it. Offline
requests may wait in the pool for hours, or for as long as the operator pauses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from sglang.srt.utils.aio_rwlock import RWLock

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_AGAIN_S = 1.0  # after a failure
_HOLD_S = 30.0  # in which a scheduler says whether offline requests run

reads_offline: ContextVar[bool] = ContextVar("reads_offline", default=False)
"""Whether the request that this task serves next is offline."""


class ModelLock(RWLock):  # type: ignore[misc]
    """Stands for `TokenizerManager.model_update_lock`.

    A writer waits for online requests and for offline requests that have begun; those in the pool
    begin after it.
    """

    def __init__(self, hold: Callable[[bool], Awaitable[bool]]) -> None:
        """hold: tells the schedulers to begin no offline request (True), or to begin them again
        (False); returns whether none runs"""
        super().__init__()
        self._readers = self._waiting_writers = 0
        self._writer_active = False
        self._hold = hold
        self._num_offline = 0
        self._is_held = False
        self._refusal: Exception | None = None

    async def close(self, refusal: Exception) -> None:
        """Raise `refusal` in requests that wait for the lock, and in those that come."""
        async with self._lock:
            self._refusal = refusal
            self._cond.notify_all()

    @property
    def reader_lock(self) -> Any:
        return _Reader(self, is_offline=reads_offline.get())

    async def acquire_for(self, *, is_offline: bool) -> None:
        async with self._lock:
            while self._refusal is None and (self._writer_active or self._waiting_writers):
                await self._cond.wait()
            if self._refusal is not None:
                raise self._refusal
            if is_offline:
                self._num_offline += 1
            else:
                self._readers += 1

    async def release_of(self, *, is_offline: bool) -> None:
        if not is_offline:
            await self.release_reader()
            return
        async with self._lock:
            self._num_offline -= 1
            self._cond.notify_all()

    async def acquire_writer(self) -> None:
        async with self._lock:
            self._waiting_writers += 1
            try:
                while self._writer_active or not await self._is_free():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await self._cond.wait()
                self._writer_active = True
            finally:
                self._waiting_writers -= 1
                if not self._writer_active:  # cancelled
                    await self._begin_again()
                    self._cond.notify_all()

    async def release_writer(self) -> None:
        async with self._lock:
            self._writer_active = False
            if not self._waiting_writers:
                await self._begin_again()
            self._cond.notify_all()

    async def is_locked(self) -> bool:
        async with self._lock:
            return self._writer_active or self._readers > 0 or self._num_offline > 0

    async def _is_free(self) -> bool:
        """Whether no request has begun. Online requests end while no offline one begins."""
        if not self._num_offline:
            return self._readers == 0
        self._is_held = True
        return await self._tell(True) and self._readers == 0

    async def _begin_again(self) -> None:
        if self._is_held:
            self._is_held = False
            await self._tell(False)

    async def _tell(self, is_held: bool) -> bool:
        try:
            async with asyncio.timeout(_HOLD_S):
                return await self._hold(is_held)
        except Exception as error:
            logger.warning(
                "cosched: no scheduler says whether offline requests run: %r; asking again", error
            )
            await asyncio.sleep(_AGAIN_S)
            return False


class _Reader:
    def __init__(self, lock: ModelLock, *, is_offline: bool) -> None:
        self._lock = lock
        self._is_offline = is_offline

    async def __aenter__(self) -> _Reader:
        await self._lock.acquire_for(is_offline=self._is_offline)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._lock.release_of(is_offline=self._is_offline)
