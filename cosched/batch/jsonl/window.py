"""How many lines a job holds in memory, and in which order it writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cosched.batch.jsonl.records import Record


class Window:
    """Makes the reader wait: for lines being sent, for lines not yet written, for their bytes."""

    def __init__(self, *, max_sending: int, max_unwritten: int, max_bytes: int) -> None:
        self._max_sending = max_sending
        self._max_unwritten = max_unwritten
        self._max_bytes = max_bytes
        self._sending = self._sending_bytes = self._unwritten = 0
        self._room = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Wait for room for one more line. For one caller at a time."""
        while not self._has_room(num_bytes):
            self._room.clear()
            await self._room.wait()
        self._sending += 1
        self._sending_bytes += num_bytes
        self._unwritten += 1

    def _has_room(self, num_bytes: int) -> bool:
        if self._sending >= self._max_sending or self._unwritten >= self._max_unwritten:
            return False
        # One line always fits, however long it is.
        return not self._sending or self._sending_bytes + num_bytes <= self._max_bytes

    def sent(self, num_bytes: int) -> None:
        self._sending -= 1
        self._sending_bytes -= num_bytes
        self._room.set()

    def written(self) -> None:
        self._unwritten -= 1
        self._room.set()


class OrderedSink:
    """Holds records back until all before them were written."""

    def __init__(self, write: Callable[[Record], None]) -> None:
        self._write = write
        self._held: dict[int, Record] = {}
        self._next = 0

    def put(self, position: int, record: Record) -> None:
        """`position` counts the records of this call from 0, in the order of the input."""
        self._held[position] = record
        while (due := self._held.pop(self._next, None)) is not None:
            self._next += 1
            self._write(due)
