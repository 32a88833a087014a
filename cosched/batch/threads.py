"""Threads for work that blocks, shared fairly among API keys.

SGLang prepares chats in the default executor of asyncio, so nothing of ours may run there: a
database that does not answer would keep chats waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import ParamSpec, TypeVar

from cosched.batch.errors import ApiError, StoreUnavailableError

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
Key = str | None

_RETRY_S = 5


class FairSlots:
    """A number of slots. Each key has a share of them at most, and waits for its own: others pass.
    A slot that is free goes to the key that got one least recently."""

    def __init__(self, num_slots: int, *, per_key: int, max_waiting: int | None = None) -> None:
        """max_waiting: of one key; None: no limit."""
        self.num_slots, self.per_key = num_slots, per_key
        self._num_free = num_slots
        self._max_waiting = max_waiting
        self._taken: Counter[Key] = Counter()
        self._waiting: OrderedDict[Key, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, key: Key) -> None:
        """Wait for a slot; `leave` must follow. ApiError 429: too many calls of this key wait."""
        line = self._waiting.setdefault(key, deque())
        if self._max_waiting is not None and len(line) >= self._max_waiting:
            raise ApiError(
                f"this API key has {self.per_key} such calls under way, and {len(line)} that wait: "
                "try again when some have ended",
                status=429,
                code="too_many_calls",
                retry_after_s=_RETRY_S,
            )
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(key)
            elif turn in line:
                line.remove(turn)
            raise

    def leave(self, key: Key) -> None:
        self._num_free += 1
        self._taken[key] -= 1
        self._grant()

    def _grant(self) -> None:
        while self._num_free and (key := self._next()) is not None:
            turn = self._waiting[key[0]].popleft()
            self._waiting.move_to_end(key[0])
            if not turn.done():  # otherwise its caller is gone
                turn.set_result(None)
                self._num_free -= 1
                self._taken[key[0]] += 1
        for found in [key for key, line in self._waiting.items() if not line]:
            if not self._taken[found]:
                del self._waiting[found], self._taken[found]

    def _next(self) -> tuple[Key] | None:
        """The key whose turn it is, in a tuple, as it may be None."""
        for key, line in self._waiting.items():
            if line and self._taken[key] < self.per_key:
                return (key,)
        return None


class FairThreads:
    """A pool of threads with `FairSlots`: a key whose calls take long keeps only itself waiting."""

    def __init__(
        self,
        name: str,
        slots: FairSlots,
        *,
        answer_s: float | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """A thread for each slot. answer_s: the most that `run` takes; None: no limit [s]. rest_s:
        a slot of an API key is free that long after a call of `run` [s], so that a client that
        asks without pause leaves the processor to chats."""
        self._slots = slots
        self._answer_s = answer_s
        self._rest_s = rest_s
        self._executor = ThreadPoolExecutor(slots.num_slots, thread_name_prefix=name)

    async def run(
        self, key: Key, call: Callable[_Args, _Result], *args: _Args.args, **more: _Args.kwargs
    ) -> _Result:
        """As `run_long`. StoreUnavailableError: there is no result after `answer_s`, of which the
        time that the call waits for a thread is a part."""
        return await self._run(key, self._rest_s, partial(call, *args, **more))

    async def _run(self, key: Key, rest_s: float, call: Callable[[], _Result]) -> _Result:
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._in_thread(key, rest_s, call)
        except TimeoutError:
            raise StoreUnavailableError(f"no answer within {self._answer_s:g} s") from None

    async def run_long(
        self, key: Key, call: Callable[_Args, _Result], *args: _Args.args, **more: _Args.kwargs
    ) -> _Result:
        """The result of a call in a thread. It goes on if the caller is cancelled, and so long it
        keeps its slot. ApiError 429: too many calls of this key wait."""
        return await self._in_thread(key, 0.0, partial(call, *args, **more))

    async def _in_thread(self, key: Key, rest_s: float, call: Callable[[], _Result]) -> _Result:
        await self._slots.enter(key)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._executor, call)
        except BaseException:
            self._slots.leave(key)
            raise
        work.add_done_callback(partial(self._ended, key, rest_s))
        return await asyncio.shield(work)

    async def each(self, key: Key, found: Iterator[_Result]) -> AsyncIterator[_Result]:
        """The items of an iterator that blocks."""
        while items := await self._run(key, 0.0, lambda: list(islice(found, 1))):
            yield items[0]

    def close(self) -> None:
        """Let calls that have begun end; the others are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _ended(self, key: Key, rest_s: float, work: asyncio.Future[_Result]) -> None:
        if rest_s and key is not None:
            work.get_loop().call_later(rest_s, self._slots.leave, key)
        else:
            self._slots.leave(key)
        if not work.cancelled():
            work.exception()  # read, otherwise asyncio logs it
