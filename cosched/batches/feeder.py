"""The feeder: lines go from the store to the server as offline requests, results come back.

One task decides what is to be done (validate, send, end), one writes results, and each line under
way is a task that waits for its answer. All of the store's work is done in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cosched.batches.config import BatchesConfig
from cosched.batches.data import Batch, Finished, Line, Status
from cosched.batches.fairness import Demand, shares
from cosched.batches.files import FileStore
from cosched.batches.ingest import parse, validate
from cosched.batches.store import BatchStore, records_of
from cosched.jobs.client import Client
from cosched.jobs.lines import BadLine, RequestLine
from cosched.jobs.records import Answer, Failure
from cosched.jobs.source import RawLine

__all__ = ["Feeder"]

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often to look for windows that have ended, when nothing else happens."""
_SWEEP_S = 60.0
_RETRY_S = 1.0
_MAX_BYTES = 256 << 20
"""Of the lines under way together; one line always fits."""
_CLOSED_PER_TRANSACTION = 500
# The one server that has the store takes back all leases when it starts, so they need no renewal.
_LEASE_S = 10 * 365 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A line that was taken and whose result is not written yet."""

    task: asyncio.Task[None]
    num_bytes: int


class Feeder:
    """One per server; `run` until it is cancelled."""

    def __init__(
        self, *, store: BatchStore, files: FileStore, client: Client, config: BatchesConfig
    ) -> None:
        self._store = store
        self._files = files
        self._client = client
        self._config = config
        self._name = secrets.token_hex(8)
        self._wake = asyncio.Event()
        self._under_way: dict[str, dict[int, _UnderWay]] = defaultdict(dict)
        self._finished: list[Finished] = []
        self._has_finished = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._validation: asyncio.Task[None] | None = None
        self._endings: dict[str, asyncio.Task[None]] = {}

    @property
    def num_under_way(self) -> int:
        return sum(map(len, self._under_way.values()))

    def wake(self) -> None:
        """There is something new in the store."""
        self._wake.set()

    async def run(self) -> None:
        """Feed the server. When cancelled, what is finished is written, and what is under way is
        left to the next start."""
        try:
            await asyncio.to_thread(self._store.take_back_all)
            await self._client.wait_ready(max_wait_s=math.inf, check=lambda: None)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._decide())
                group.create_task(self._write())
                group.create_task(self._sweep())
        finally:
            left = [one.task for some in self._under_way.values() for one in some.values()]
            left += self._endings.values()
            left += [] if self._validation is None else [self._validation]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self._flush()

    async def _decide(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._step()
            except Exception:
                # A full disk or a database that is away: all is as it was, and is tried again.
                logger.exception("batches: cannot go on; trying again in %g s", _RETRY_S)
                await asyncio.sleep(_RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()

    async def _step(self) -> None:
        await asyncio.to_thread(self._store.expire_due)
        found = await asyncio.to_thread(self._store.open)
        for batch in found:
            if batch.ending is not None and batch.id not in self._endings:
                self._endings[batch.id] = asyncio.create_task(self._end(batch))
            elif batch.status is Status.VALIDATING and self._validation is None:
                self._validation = asyncio.create_task(self._validate(batch))
        await self._refill([batch for batch in found if batch.status is Status.IN_PROGRESS])

    async def _validate(self, batch: Batch) -> None:
        try:
            await asyncio.to_thread(
                validate, batch, store=self._store, files=self._files, config=self._config
            )
        except Exception:
            logger.exception("batches: cannot validate %s; trying again", batch.id)
            await asyncio.sleep(_RETRY_S)
        finally:
            self._validation = None
            self.wake()

    async def _end(self, batch: Batch) -> None:
        """Let go of what is under way, keep what is finished, close the rest."""
        try:
            tasks = [one.task for one in self._under_way[batch.id].values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._flush()
            del self._under_way[batch.id]
            while not await asyncio.to_thread(
                self._store.close_lines, batch.id, limit=_CLOSED_PER_TRANSACTION
            ):
                pass
            await asyncio.to_thread(self._store.end, batch.id)
            await asyncio.to_thread(self._files.sweep)
        except Exception:
            logger.exception("batches: cannot end %s; trying again", batch.id)
            await asyncio.sleep(_RETRY_S)
        finally:
            self._endings.pop(batch.id, None)
            self.wake()

    async def _refill(self, found: Sequence[Batch]) -> None:
        if self.num_under_way > self._config.low_watermark:
            return
        demands = []
        for batch in found:
            num_under_way = len(self._under_way.get(batch.id, ()))
            demands.append(
                Demand(
                    batch_id=batch.id,
                    tenant=(batch.request.owner, batch.request.tenant),
                    num_under_way=num_under_way,
                    num_waiting=batch.total - batch.completed - batch.failed - num_under_way,
                )
            )
        room = self._config.high_watermark - self.num_under_way
        by_id = {batch.id: batch for batch in found}
        for name, limit in shares(demands, room=room).items():
            batch = by_id[name]
            max_bytes = _MAX_BYTES - sum(
                one.num_bytes for some in self._under_way.values() for one in some.values()
            )
            if max_bytes <= 0:
                return
            for line in await asyncio.to_thread(self._take, batch, limit, max_bytes):
                self._under_way[batch.id][line.number] = _UnderWay(
                    task=asyncio.create_task(self._answer(batch, line)),
                    num_bytes=len(line.body) if isinstance(line, RequestLine) else 0,
                )

    def _take(self, batch: Batch, limit: int, max_bytes: int) -> list[RequestLine | BadLine]:
        """Lines of a batch, read from its input file."""
        taken = self._store.take(
            batch.id, limit=limit, max_bytes=max_bytes, lease_owner=self._name, lease_s=_LEASE_S
        )
        if not taken:
            return []
        try:
            with self._files.path(batch.request.input_file_id).open("rb") as content:
                found: list[RequestLine | BadLine] = []
                for line in taken:
                    content.seek(line.offset)
                    raw = RawLine(number=line.number, data=content.read(line.num_bytes))
                    read = parse(raw, self._config)
                    if isinstance(read, BadLine):  # it was right when it was validated
                        read = replace(read, custom_id=line.custom_id)
                    found.append(read)
                return found
        except OSError as error:
            return [_unreadable(line, error) for line in taken]

    async def _answer(self, batch: Batch, line: RequestLine | BadLine) -> None:
        """Send a line, and hand its result to the writer."""
        records = records_of(batch.id)
        tokens = (0, 0)
        if isinstance(line, BadLine):
            record = records.bad_line(line)
        else:
            try:
                outcome = await self._client.send(line)
            except Exception as error:
                logger.exception("batches: line %d of %s", line.number, batch.id)
                outcome = Failure(code="internal_error", message=repr(error))
            if isinstance(outcome, Answer):
                tokens = (outcome.prompt_tokens, outcome.completion_tokens)
            record = records.record(line, outcome)
        self._finished.append(
            Finished(
                batch_id=batch.id,
                number=line.number,
                is_answer=record.is_answer,
                data=record.data,
                input_tokens=tokens[0],
                output_tokens=tokens[1],
            )
        )
        self._has_finished.set()

    async def _write(self) -> None:
        while True:
            await self._has_finished.wait()
            self._has_finished.clear()
            try:
                await self._flush()
            except Exception:
                logger.exception("batches: cannot write results; trying again in %g s", _RETRY_S)
                await asyncio.sleep(_RETRY_S)
                self._has_finished.set()
            if self.num_under_way <= self._config.low_watermark:
                self.wake()

    async def _flush(self) -> None:
        """Write what has come in since the last time, as one transaction."""
        async with self._flushing:
            group = list(self._finished)
            if not group:
                return
            await asyncio.to_thread(self._store.finish, group)
            del self._finished[: len(group)]
            for one in group:
                self._under_way[one.batch_id].pop(one.number, None)

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._files.sweep)
            except Exception:
                logger.exception("batches: cannot let go of expired files")
            await asyncio.sleep(_SWEEP_S)


def _unreadable(line: Line, error: OSError) -> BadLine:
    message = f"the input file cannot be read: {error.strerror}"
    return BadLine(
        number=line.number,
        custom_id=line.custom_id,
        code="input_unreadable",
        message=message,
        param=None,
    )
