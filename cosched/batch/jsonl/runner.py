"""Runs a job: reads lines, keeps as many at the server as allowed, writes what comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from cosched.batch.jsonl.client import Client
from cosched.batch.jsonl.ids import IdSet
from cosched.batch.jsonl.journal import Journal
from cosched.batch.jsonl.lines import BadLine, RequestLine, duplicate_of, parse_line
from cosched.batch.jsonl.progress import Snapshot
from cosched.batch.jsonl.records import Answer, Record
from cosched.batch.jsonl.source import Source, input_lines
from cosched.batch.jsonl.window import OrderedSink, Window
from cosched.errors import CoschedError

_READ_BUFFER_BYTES = 1 << 20
_MAX_SENDING_BYTES = 256 << 20  # 256 requests of 16 MiB would be 4 GiB
_ORDERED_WINDOW = 4  # times the concurrency: how far an ordered job may run ahead of its output
_YIELD_EVERY_LINES = 256
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


class Server(Protocol):
    """Where the requests go: one that runs already, or one of the job's own."""

    async def ready(self) -> None:
        """Return when it takes requests. Raises CoschedError when it does not get there."""

    async def watch(self) -> None:
        """Runs beside the job; raises ServerGoneError when the server has died."""


async def checked_lines(
    source: Source, *, max_line_bytes: int, counts: JobCounts
) -> AsyncGenerator[RequestLine | BadLine, None]:
    """Every line of the input, parsed and checked, in order. Counts the empty ones.

    A custom_id belongs to the first line that has it, also when that line is otherwise wrong.
    """
    ids = IdSet(max_ids=source.num_lines)
    with open(source.path, "rb", buffering=_READ_BUFFER_BYTES) as file:
        for raw in input_lines(file, max_line_bytes=max_line_bytes):
            if raw.number > source.num_lines:
                break  # the file has grown; `run` says so at the end
            if raw.number % _YIELD_EVERY_LINES == 0:
                await asyncio.sleep(0)  # signals are handled, progress is shown
            if raw.is_empty:
                counts.num_empty += 1
                continue
            line = parse_line(raw, max_line_bytes=max_line_bytes)
            if line.custom_id is not None and not ids.add(line.custom_id):
                line = duplicate_of(line)
            yield line


class Job:
    """One call on one input. `run` returns when every line has its record."""

    def __init__(
        self,
        *,
        source: Source,
        journal: Journal,
        client: Client,
        server: Server,
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
        self._window = Window(
            max_sending=concurrency,
            max_unwritten=concurrency * (_ORDERED_WINDOW if ordered else 1),
            max_bytes=_MAX_SENDING_BYTES,
        )

    async def run(self) -> None:
        """Raises CoschedError when the job cannot go on; cancelling it stops all that is in flight.

        What was written until then stays, so the same call goes on from there.
        """
        beside = (self._show_often, self._sync_often, self._server.watch)
        try:
            async with asyncio.TaskGroup() as group:
                upkeep = [group.create_task(work()) for work in beside]
                async with asyncio.TaskGroup() as sends:
                    await self._feed(sends)
                for task in upkeep:
                    task.cancel()
        except ExceptionGroup as errors:
            raise _first_error(errors) from errors
        finally:
            self._show(self.snapshot())
        self._source.check_unchanged()

    async def _feed(self, sends: asyncio.TaskGroup) -> None:
        positions = itertools.count()
        ready = False  # a job that has nothing left to send needs no server
        lines = checked_lines(self._source, max_line_bytes=self._max_line_bytes, counts=self.counts)
        async with aclosing(lines):
            async for line in lines:
                if line.number in self._journal.done:
                    continue
                num_bytes = len(line.body) if isinstance(line, RequestLine) else 0
                if num_bytes and not ready:
                    await self._server.ready()
                    ready = True
                await self._window.enter(num_bytes)
                position = next(positions)
                if isinstance(line, RequestLine):
                    sends.create_task(self._send(line, position))
                else:
                    self._window.sent(0)
                    self._note_failure(line.code, line.message)
                    self._put(position, self._journal.records.bad_line(line))

    async def _send(self, line: RequestLine, position: int) -> None:
        outcome = await self._client.send(line)
        self._window.sent(len(line.body))
        if isinstance(outcome, Answer):
            self.counts.prompt_tokens += outcome.prompt_tokens
            self.counts.completion_tokens += outcome.completion_tokens
        else:
            self._note_failure(outcome.code, outcome.message)
        self._put(position, self._journal.records.record(line, outcome))

    def _note_failure(self, code: str, message: str) -> None:
        self.counts.failed_by_code[code] += 1
        self.counts.last_failure = message

    def _put(self, position: int, record: Record) -> None:
        if self._sink is None:
            self._write(record)
        else:
            self._sink.put(position, record)

    def _write(self, record: Record) -> None:
        self._journal.write(record)
        self._window.written()
        if record.is_answer:
            self.counts.num_answered += 1
        else:
            self.counts.num_failed += 1

    def snapshot(self) -> Snapshot:
        return Snapshot(
            num_lines=self._source.num_lines - self.counts.num_empty,
            num_done=self._journal.num_done,
            num_failed=self._journal.num_failed,
            num_under_way=self._client.num_under_way,
            num_tokens=self.counts.prompt_tokens + self.counts.completion_tokens,
            trouble=self._client.trouble,
        )

    async def _show_often(self) -> None:
        while True:
            self._show(self.snapshot())
            await asyncio.sleep(_SHOW_EVERY_S)

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_EVERY_S)
            await asyncio.to_thread(self._journal.sync)


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    """The error a user can act on. All lines fail at once when the server goes; one says it."""
    found = group.subgroup(CoschedError)
    errors: BaseExceptionGroup[Exception] | Exception = found or group
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
