"""Runs a job line by line: reads lines, keeps a limited number at the server, writes results."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

from cosched.batch.config import BatchesConfig
from cosched.batch.jsonl.client import Client
from cosched.batch.jsonl.errors import first_error
from cosched.batch.jsonl.journal import Journal
from cosched.batch.jsonl.line_results import Answer, Failure, Outcome, Record
from cosched.batch.jsonl.lines import BadLine, RequestLine
from cosched.batch.jsonl.prefix_order import SORTED_TOGETHER, in_prefix_order, prefix_key
from cosched.batch.jsonl.report import Snapshot
from cosched.batch.jsonl.server import OwnServer, RunningServer
from cosched.batch.jsonl.source import Source

_MAX_SENDING_BYTES = 256 << 20  # 256 requests of 16 MiB would be 4 GiB
_ORDERED_WINDOW = 4  # times the concurrency: how far an ordered job may run ahead of its output
_MAX_SORTED_BYTES = 64 << 20
_SHOW_EVERY_S = 0.5
_SYNC_EVERY_S = 5.0


@dataclass(slots=True, kw_only=True)
class JobCounts:
    """What happened in this call (the journal counts the whole job)."""

    num_empty: int = 0
    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed_by_code: Counter[str] = field(default_factory=Counter)
    last_failure: str | None = None

    def note(self, outcome: Outcome | BadLine) -> None:
        if isinstance(outcome, Answer):
            self.prompt_tokens += outcome.prompt_tokens
            self.completion_tokens += outcome.completion_tokens
        else:
            self.note_failure(outcome.code, outcome.message)

    def note_failure(self, code: str, message: str) -> None:
        self.failed_by_code[code] += 1
        self.last_failure = message

    def note_written(self, record: Record) -> None:
        if record.is_answer:
            self.num_answered += 1
        else:
            self.num_failed += 1


class Job:
    """One call on one input. `run` returns when every line has its record."""

    def __init__(
        self,
        *,
        source: Source,
        journal: Journal,
        client: Client,
        server: OwnServer | RunningServer,
        concurrency: int,
        max_line_bytes: int,
        ordered: bool,
        show: Callable[[Snapshot], None],
    ) -> None:
        self.counts = JobCounts()
        self._source = source
        self._journal = journal
        self._client = client
        self._server = server
        self._max_line_bytes = max_line_bytes
        self._show = show
        self._sink = OrderedSink(self._write) if ordered else None
        self._most_sorted = min(max(concurrency * _ORDERED_WINDOW // 2, 1), SORTED_TOGETHER)
        self._media_places = asyncio.Semaphore(BatchesConfig().media_in_flight)
        self._window = Window(
            max_sending=concurrency,
            max_unwritten=concurrency * (_ORDERED_WINDOW if ordered else 1),
            max_bytes=_MAX_SENDING_BYTES,
        )

    async def run(self) -> None:
        """CoschedError if the job cannot continue; cancelling it cancels all requests in flight.
        What is written stays, so the same call resumes."""
        try:
            async with asyncio.TaskGroup() as group:
                upkeep = [
                    group.create_task(work())
                    for work in (self._show_often, self._sync_often, self._server.watch)
                ]
                async with asyncio.TaskGroup() as sends:
                    await self._feed(sends)
                for task in upkeep:
                    task.cancel()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self._show(self._snapshot())
        self._source.check_unchanged()

    async def _feed(self, sends: asyncio.TaskGroup) -> None:
        is_ready = False  # a job that has nothing left to send needs no server
        async with aclosing(self._lines() if self._sink is None else self._windows()) as lines:
            async for position, line in lines:
                num_bytes = len(line.body) if isinstance(line, RequestLine) else 0
                if num_bytes and not is_ready:
                    await self._server.ready()
                    is_ready = True
                await self._window.enter(num_bytes)
                if isinstance(line, RequestLine):
                    sends.create_task(self._send(line, position))
                else:
                    self._window.sent(0)
                    self._put(position, line, line)

    async def _lines(self) -> AsyncGenerator[tuple[int, RequestLine | BadLine], None]:
        """What is to be sent, in prefix order, with a place that has no meaning."""
        found = self._source.lines_in_prefix_order(
            max_line_bytes=self._max_line_bytes, is_done=self._journal.done.__contains__
        )
        async with aclosing(found) as lines:
            async for line in lines:
                if line is None:
                    self.counts.num_empty += 1
                else:
                    yield 0, line

    async def _windows(self) -> AsyncGenerator[tuple[int, RequestLine | BadLine], None]:
        """What is to be sent, with its place in the output: in prefix order within so many lines
        that the output waits for half of what it may."""
        held: list[tuple[int, RequestLine | BadLine]] = []
        positions, num_bytes = itertools.count(), 0
        async with aclosing(
            self._source.checked_lines(max_line_bytes=self._max_line_bytes)
        ) as lines:
            async for line in lines:
                if line is None:
                    self.counts.num_empty += 1
                elif line.number not in self._journal.done:
                    held.append((next(positions), line))
                    num_bytes += len(line.body) if isinstance(line, RequestLine) else 0
                    if len(held) >= self._most_sorted or num_bytes >= _MAX_SORTED_BYTES:
                        for one in in_prefix_order(held, _key_of):
                            yield one
                        held, num_bytes = [], 0
            for one in in_prefix_order(held, _key_of):
                yield one

    async def _send(self, line: RequestLine, position: int) -> None:
        async with self._media_places if line.has_media else nullcontext():
            outcome = await self._client.send(line)
        self._window.sent(len(line.body))
        self._put(position, line, outcome)

    def _put(self, position: int, line: RequestLine | BadLine, outcome: Outcome | BadLine) -> None:
        self.counts.note(outcome)
        result = outcome if isinstance(outcome, Answer | Failure) else None
        record = self._journal.records.record(line, result)
        if self._sink is None:
            self._write(record)
        else:
            self._sink.put(position, record)

    def _write(self, record: Record) -> None:
        self._journal.write(record)
        self.counts.note_written(record)
        self._window.written()

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            num_lines=self._source.num_lines - self.counts.num_empty,
            num_done=self._journal.num_done,
            num_failed=self._journal.num_failed,
            num_in_flight=self._client.num_in_flight,
            num_tokens=self.counts.prompt_tokens + self.counts.completion_tokens,
            trouble=self._client.trouble,
        )

    async def _show_often(self) -> None:
        while True:
            self._show(self._snapshot())
            await asyncio.sleep(_SHOW_EVERY_S)

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_EVERY_S)
            await asyncio.to_thread(self._journal.sync)


def _key_of(placed: tuple[int, RequestLine | BadLine]) -> bytes:
    line = placed[1]
    return prefix_key(line.body) if isinstance(line, RequestLine) else b""


class Window:
    """Makes the reader wait: for lines being sent, for lines not yet written, for their bytes."""

    def __init__(self, *, max_sending: int, max_unwritten: int, max_bytes: int) -> None:
        self._max_sending = max_sending
        self._max_unwritten = max_unwritten
        self._max_bytes = max_bytes
        self._sending = self._sending_bytes = self._unwritten = 0
        self._has_changed = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Wait until one more line fits. For one caller at a time."""
        while not self._fits(num_bytes):
            self._has_changed.clear()
            await self._has_changed.wait()
        self._sending += 1
        self._sending_bytes += num_bytes
        self._unwritten += 1

    def _fits(self, num_bytes: int) -> bool:
        if self._sending >= self._max_sending or self._unwritten >= self._max_unwritten:
            return False
        # One line always fits, however long it is.
        return not self._sending or self._sending_bytes + num_bytes <= self._max_bytes

    def sent(self, num_bytes: int) -> None:
        self._sending -= 1
        self._sending_bytes -= num_bytes
        self._has_changed.set()

    def written(self) -> None:
        self._unwritten -= 1
        self._has_changed.set()


class OrderedSink:
    """Holds records back until all before them are written."""

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
