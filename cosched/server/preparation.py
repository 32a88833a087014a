"""Paces the preparation of offline requests by the lag of the event loop that serves chats.

Before the scheduler gets a request, this process parses, renders and tokenizes it: some 6 ms of
8,000 tokens. A batch sends hundreds of lines at once; without a pace every stream would stop until
the last one is tokenized, and no figure of the scheduler would show it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial

from cosched.batch.threads import FairSlots

PERIOD_S = 0.02
_WINDOW_S = 60.0
_MOST_LAG_S = 0.01
"""Above which the next offline request waits [s]: a token of a fast model takes about as long."""
_MOST_WAIT_S = 0.25
AT_ONCE = 4
"""Offline requests that are prepared at a time."""


class LoopLag:
    """How late the event loop is: what a chat waits here beside everything else."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.now_s = 0.0
        self._measured: deque[tuple[float, float]] = deque()
        """Of the last minute: when, and lags that none after it has reached."""

    def add(self, lag_s: float) -> None:
        now_s = self._clock()
        self.now_s = lag_s
        while self._measured and self._measured[-1][1] <= lag_s:
            self._measured.pop()
        self._measured.append((now_s, lag_s))
        while self._measured[0][0] < now_s - _WINDOW_S:
            self._measured.popleft()

    @property
    def most_s(self) -> float:
        """Of the last minute."""
        return self._measured[0][1] if self._measured else 0.0

    async def measure(self) -> None:
        """Until it is cancelled."""
        while True:
            began_s = self._clock()
            await asyncio.sleep(PERIOD_S)
            self.add(max(self._clock() - began_s - PERIOD_S, 0.0))

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.measure())
        try:
            yield
        finally:
            task.cancel()


class Ticket:
    """Of a request that is being prepared. `end` may be called again."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


TICKET_KEY = "cosched_ticket"
"""In `request.state`: ended with the request, if it was not before."""

_ticket: ContextVar[Ticket | None] = ContextVar("cosched_preparation", default=None)


def is_prepared() -> None:
    """The request of this task is tokenized."""
    if (ticket := _ticket.get()) is not None:
        ticket.end()


class PreparationGate:
    """Lets a few offline requests be prepared at a time, and none while the loop lags. API keys
    take turns: a thousand lines of one do not keep a line of another waiting."""

    def __init__(self, lag: LoopLag) -> None:
        self._lag = lag
        self._slots = FairSlots(AT_ONCE, per_key=AT_ONCE)
        self._turn = asyncio.Lock()

    async def enter(self, key: str) -> Ticket:
        """Wait for a place; it ends with `is_prepared` in the same task, or with the ticket. key:
        who pays for the request."""
        await self._slots.enter(key)
        ticket = Ticket(partial(self._slots.leave, key))
        try:
            async with self._turn:
                await self._until_free()
        except BaseException:
            ticket.end()
            raise
        _ticket.set(ticket)
        return ticket

    async def _until_free(self) -> None:
        await asyncio.sleep(0)  # one request in each turn of the loop
        # Not for longer than it lags: chats alone may keep the loop busy.
        if self._lag.now_s > _MOST_LAG_S:
            await asyncio.sleep(min(self._lag.now_s, _MOST_WAIT_S))
