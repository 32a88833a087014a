"""The feeder: lines go from the store to the server as offline requests, results come back.

One task decides what is to be done (validate, send, end), one writes results, and each line under
way is a task that waits for its answer. All of the store's work is done in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from cosched.batch.config import BatchesConfig
from cosched.batch.data import Batch, Finished, Line, Status
from cosched.batch.errors import StoreAwayError
from cosched.batch.fairness import Demand, shares
from cosched.batch.files import FileStore
from cosched.batch.forecast import Forecast, Outlook, OutlookState, forecasts_of, tenant_of
from cosched.batch.ingest import LineRules, validate
from cosched.batch.jsonl.client import Client
from cosched.batch.jsonl.lines import BadLine, RawLine, RequestLine
from cosched.batch.jsonl.records import Answer, Failure
from cosched.batch.models import ServedModels
from cosched.batch.privacy import Redaction
from cosched.batch.rate import Progress, Rate, RateMeter, past_rate
from cosched.batch.replies import Ended
from cosched.batch.storage import FilesAwayError
from cosched.batch.store import BatchStore, records_of
from cosched.limits.table import Scope

logger = logging.getLogger(__name__)

_INTERNAL = "the server failed on this line; its log says why"
_LOOK_S = 1.0
"""How often to look for windows that have ended, when nothing else happens."""
_PROGRESS_S = 2.0
"""How often to ask the schedulers how far they are."""
_SWEEP_S = 60.0
_RETRY_S = 1.0
_TELL_S = 60.0
_MAX_BYTES = 256 << 20
"""Of the lines under way together; one line always fits."""
_CLOSED_PER_TRANSACTION = 500
_LEAST_DEADLINE_S = 1.0
_BEATS_PER_LEASE = 3
_MAX_AHEAD = 512
_RECALLED = 8
_WITH_LINES = (Status.VALIDATING, Status.IN_PROGRESS)
_SHARES_AHEAD = 4
"""Where servers share the store, one sets aside for itself a run of lines that begin alike: a
quarter of its part of what is left, so that all end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A line that was taken and whose result is not written yet."""

    task: asyncio.Task[None]
    num_bytes: int


class Feeder:
    """One per server; `run` until it is cancelled."""

    def __init__(
        self,
        *,
        store: BatchStore,
        files: FileStore,
        client: Client,
        config: BatchesConfig,
        state: Callable[[float | None], Mapping[str, Any]],
        is_paused: Callable[[], bool],
        progress: Callable[[], Awaitable[Progress]],
        scope: Scope,
        clock: Callable[[], float],
    ) -> None:
        """state, is_paused, progress, scope  as in `BatchService.feeding`
        clock  seconds since any moment"""
        self._state = state
        self._is_paused = is_paused
        self._progress = progress
        self._meter = RateMeter(clock)
        self._rate: Rate | None = None
        self._past_rate: Rate | None = None
        self._forecasts: Mapping[str, Forecast] = {}
        self._store = store
        self._files = files
        self._client = client
        self._config = config
        self._rules = LineRules(config, scope=scope)
        self._redaction = Redaction([] if config.folder is None else [config.folder])
        self._name = secrets.token_hex(8)
        self.num_servers = 1
        """That live and share the store."""
        self._wake = asyncio.Event()
        self.finished: Counter[str] = Counter()
        """Since the start: answered and failed lines, input and output tokens."""
        self._under_way: dict[str, dict[int, _UnderWay]] = defaultdict(dict)
        self._finished: list[Finished] = []
        self._has_finished = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._validation: asyncio.Task[None] | None = None
        self._not_validated: set[str] = set()
        """Batches whose validation went wrong: others come before them."""
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._is_store_away = False
        self._clock = clock
        self._next_told_s = float("-inf")

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
            await self._recall()
            await self._client.wait_ready(max_wait_s=math.inf)
            await self._join()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._decide())
                group.create_task(self._follow())
                group.create_task(self._write())
                group.create_task(self._sweep())
        finally:
            left = [one.task for some in self._under_way.values() for one in some.values()]
            left += self._endings.values()
            left += [] if self._validation is None else [self._validation]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            try:
                await self._flush()
                await asyncio.to_thread(self._store.leave, self._name)
            except StoreAwayError as error:
                logger.warning("batches: %s; lines without a result are sent again", error.for_log)

    async def _join(self) -> None:
        lease_s = self._config.lease_s
        while True:
            try:
                await asyncio.to_thread(self._store.join, self._name, lease_s=lease_s)
                return
            except Exception as error:
                self.tell(error, "cannot begin")
                await asyncio.sleep(_RETRY_S)

    async def _recall(self) -> None:
        """How fast batches were of late, in case nothing is measured yet."""
        try:
            ended = await asyncio.to_thread(self._store.latest_answered, limit=_RECALLED)
            self._past_rate = past_rate(ended)
        except StoreAwayError as error:
            self.tell(error, "the rate of earlier batches is not known")

    async def _beat(self) -> None:
        """Tell the other servers of a shared store that this one lives."""
        lease_s = self._config.lease_s
        while True:
            try:
                living = await asyncio.to_thread(self._store.beat, self._name, lease_s=lease_s)
                if not living:
                    logger.warning(
                        "batches: nothing was heard of this server for batches.lease_s (%g s); "
                        "others have its lines now",
                        lease_s,
                    )
                    await self._let_go(list(self._under_way))
                    await self._join()
                self.num_servers = max(living, 1)
            except Exception as error:
                self.tell(error, "the store cannot be told that this server lives")
            await asyncio.sleep(lease_s / _BEATS_PER_LEASE)

    async def _let_go(self, names: Sequence[str]) -> None:
        """Of batches: nothing is under way after it, and what is finished is written."""
        tasks = [one.task for name in names for one in self._under_way.get(name, {}).values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._flush()
        for name in names:
            self._under_way.pop(name, None)

    async def _decide(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._step()
                if self._is_store_away:
                    logger.warning("batches: the store is back")
                    self._is_store_away = False
            except Exception as error:
                # A full disk or a database that is away: all is as it was, and is tried again.
                self.tell(error, "cannot go on")
                await asyncio.sleep(_RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()

    def tell(self, error: Exception, what: str) -> None:
        """What failed is tried again. A database that is away is told of once, files that are away
        now and then."""
        if not isinstance(error, StoreAwayError):
            logger.error("batches: %s; trying again", what, exc_info=error)
        elif isinstance(error, FilesAwayError):
            # Whether it is back is not known as long as nothing new is asked of it.
            if self._clock() >= self._next_told_s:
                logger.warning("batches: %s; trying again until it can: %s", what, error.for_log)
                self._next_told_s = self._clock() + _TELL_S
        elif not self._is_store_away:
            logger.warning("batches: %s; trying again until it can: %s", what, error.for_log)
            self._is_store_away = True

    async def _follow(self) -> None:
        """Ask how far the lines are that are under way."""
        while True:
            try:
                if self.num_under_way:
                    self._meter.progressed(await self._progress())
            except Exception:
                logger.exception("batches: the schedulers do not tell how far they are")
                await asyncio.sleep(_SWEEP_S)
            await asyncio.sleep(_PROGRESS_S)

    async def _step(self) -> None:
        await asyncio.to_thread(self._store.expire_due)
        found = await asyncio.to_thread(self._store.open)
        self._not_validated.intersection_update(batch.id for batch in found)
        for batch in sorted(found, key=lambda batch: batch.id in self._not_validated):
            if batch.ending is not None and batch.id not in self._endings:
                self._endings[batch.id] = asyncio.create_task(self._end(batch))
            elif self._is_to_validate(batch):
                self._validation = asyncio.create_task(self._validate(batch))
        self._forecasts = self._forecasts_of(found)
        await self._refill([batch for batch in found if batch.status is Status.IN_PROGRESS])
        self._meter.look(0 if self._is_paused() else self.num_under_way)
        self._rate = self._meter.rate()

    def _is_to_validate(self, batch: Batch) -> bool:
        return (
            batch.status is Status.VALIDATING
            and self._validation is None
            and batch.validated_by in (None, self._name)
        )

    def outlooks(self, found: Sequence[Batch], *, taken: Mapping[str, int]) -> dict[str, Outlook]:
        """Of batches with lines to send. For any thread.

        taken  batch -> lines that are under way
        """
        state = OutlookState.MEASURED
        if self._is_paused() and self.num_servers == 1:
            state = OutlookState.PAUSED
        told = {} if state is OutlookState.PAUSED else self._forecasts_of(found)
        if not told and state is OutlookState.MEASURED:
            state = OutlookState.ESTIMATING
        return {
            batch.id: Outlook(
                state=state, num_running=taken.get(batch.id, 0), forecast=told.get(batch.id)
            )
            for batch in found
            if batch.status in _WITH_LINES
        }

    def _forecasts_of(self, found: Sequence[Batch]) -> dict[str, Forecast]:
        """Of batches that have not ended; none where no rate is known."""
        rate = self._rate_of_all()
        if rate is None:
            return {}
        sizes = {
            name: [one.num_bytes for one in list(lines.values())]
            for name, lines in list(self._under_way.items())
        }
        return forecasts_of(
            [batch for batch in found if batch.status in _WITH_LINES],
            now=self._store.now(),
            sizes=sizes,
            meter=self._meter,
            rate=rate,
            num_servers=self.num_servers,
            weight=self._weight,
            margin_s=self._config.late_margin_s,
        )

    def _rate_of_all(self) -> Rate | None:
        """Of all servers of the store: what this one has measured, as the others are taken to be as
        fast; before that what batches had that have ended."""
        if self._rate is None:
            return self._past_rate
        return replace(self._rate, tokens_per_s=self._rate.tokens_per_s * self.num_servers)

    @property
    def rate(self) -> Rate | None:
        """Measured, as of a second ago."""
        return self._rate

    async def _look_at_models(self) -> None:
        """Adapters come and go while the server runs."""
        content = await self._client.models()
        models = None if content is None else ServedModels.of_listing(content)
        if models is not None:
            self._rules = replace(self._rules, models=models)

    async def _validate(self, batch: Batch) -> None:
        try:
            await self._look_at_models()
            await asyncio.to_thread(
                validate,
                batch,
                store=self._store,
                files=self._files,
                rules=self._rules,
                server=self._name,
            )
            self._not_validated.discard(batch.id)
        except Exception as error:
            self._not_validated.add(batch.id)
            self.tell(error, f"cannot validate {batch.id}")
            await asyncio.sleep(_RETRY_S)
        finally:
            self._validation = None
            self.wake()

    async def _end(self, batch: Batch) -> None:
        """Let go of what is under way, keep what is finished, close the rest. Lines that are under
        way elsewhere are let go there: the last server to do so ends the batch."""
        try:
            await self._let_go([batch.id])
            await asyncio.to_thread(self._store.release, batch.id, server=self._name)
            while await asyncio.to_thread(
                self._store.close_lines, batch.id, limit=_CLOSED_PER_TRANSACTION
            ):
                pass
            if await asyncio.to_thread(self._finish, batch.id):
                await self._recall()
                with suppress(FilesAwayError):  # is swept again and again
                    await asyncio.to_thread(self._files.sweep)
            else:
                await asyncio.sleep(_LOOK_S)
        except Exception as error:
            self.tell(error, f"cannot end {batch.id}")
            await asyncio.sleep(_RETRY_S)
        finally:
            self._endings.pop(batch.id, None)
            self.wake()

    def _finish(self, name: str) -> bool:
        """Whether a batch has ended; not as long as lines of it are under way elsewhere."""
        if not self._store.is_done(name):
            return False
        return self._store.end(name, self._files.write_results(name))

    async def _refill(self, found: Sequence[Batch]) -> None:
        if self.num_under_way > self._config.low_watermark:
            return
        demands = []
        taken = await asyncio.to_thread(self._store.num_taken)
        for batch in found:
            num_under_way = max(len(self._under_way.get(batch.id, ())), taken.get(batch.id, 0))
            demands.append(
                Demand(
                    batch_id=batch.id,
                    tenant=tenant_of(batch),
                    num_under_way=num_under_way,
                    num_waiting=batch.total - batch.completed - batch.failed - num_under_way,
                    weight=self._weight(batch),
                    due=batch.expires_at if self._is_late(batch) else None,
                )
            )
        room = self._config.high_watermark - self.num_under_way
        by_id = {batch.id: batch for batch in found}
        if found:
            await self._look_at_models()
        away: FilesAwayError | None = None
        for name, limit in shares(demands, room=room).items():
            batch = by_id[name]
            max_bytes = _MAX_BYTES - sum(
                one.num_bytes for some in self._under_way.values() for one in some.values()
            )
            if max_bytes <= 0:
                return
            try:
                taken_now = await asyncio.to_thread(self._take, batch, limit, max_bytes)
            except FilesAwayError as error:
                away = error  # others may have been read already
                continue
            for line in taken_now:
                self._under_way[batch.id][line.number] = _UnderWay(
                    task=asyncio.create_task(self._answer(batch, line)),
                    num_bytes=len(line.body) if isinstance(line, RequestLine) else 0,
                )
        if away is not None:
            raise away

    def _weight(self, batch: Batch) -> float:
        return self._config.tenant_weights.get(batch.request.tenant, 1.0)

    def _is_late(self, batch: Batch) -> bool:
        forecast = self._forecasts.get(batch.id)
        return forecast is not None and forecast.is_late

    def _deadline_s(self, batch: Batch) -> float:
        """Until when a line that is sent now should be finished, for the lines behind it to be in
        time too [s]: what the window leaves them, and the time of those under way. A late one's is
        near enough for the scheduler to put it before other offline work."""
        left_s = max(batch.expires_at - self._store.now(), _LEAST_DEADLINE_S)
        forecast = self._forecasts.get(batch.id)
        if forecast is None:
            return left_s
        num_left = _num_left(batch)
        ahead = min(self._config.high_watermark * self.num_servers, num_left) / num_left
        deadline_s = ahead * forecast.work_s + max(forecast.slack_s, 0.0)
        if forecast.is_late:
            deadline_s = min(deadline_s, self._config.late_margin_s)
        return min(max(deadline_s, _LEAST_DEADLINE_S), left_s)

    def _take(self, batch: Batch, limit: int, max_bytes: int) -> list[RequestLine | BadLine]:
        """Lines of a batch, read from its input file. None is taken where that is away."""
        num_ahead = 0
        if self.num_servers > 1:
            left = batch.total - batch.completed - batch.failed
            num_ahead = min(left // (_SHARES_AHEAD * self.num_servers), _MAX_AHEAD)
        with ExitStack() as stack:
            content: BinaryIO | OSError
            try:
                content = stack.enter_context(self._files.open(batch.request.input_file_id))
            except OSError as error:
                content = error
            taken = self._store.take(
                batch.id, limit=limit, max_bytes=max_bytes, server=self._name, num_ahead=num_ahead
            )
            try:
                if isinstance(content, OSError):
                    raise content
                return [self._read(line, content) for line in taken]
            except OSError as error:
                return [_unreadable(line, error) for line in taken]

    def _read(self, line: Line, content: BinaryIO) -> RequestLine | BadLine:
        content.seek(line.offset)
        raw = RawLine(number=line.number, data=content.read(line.num_bytes))
        read = self._rules.parse_to_send(raw)
        if isinstance(read, BadLine):  # its id was right when it was validated
            read = replace(read, custom_id=line.custom_id)
        return read

    async def _answer(self, batch: Batch, line: RequestLine | BadLine) -> None:
        """Send a line, and hand its result to the writer."""
        records = records_of(batch.id)
        answer: Answer | None = None
        if isinstance(line, BadLine):
            record = records.record(line)
        else:
            try:
                state = self._state(self._deadline_s(batch))
                outcome = await self._client.send(line, extensions={"state": state})
            except Exception:
                logger.exception("batches: line %d of %s", line.number, batch.id)
                outcome = Failure(code="internal_error", message=_INTERNAL)
            if isinstance(outcome, Failure):
                outcome = self._private(outcome, batch, line)
            else:
                answer = outcome
                ended = Ended(answer.prompt_tokens, answer.completion_tokens)
                self._meter.finished(ended, num_bytes=len(line.body))
            record = records.record(line, outcome)
        self._finished.append(
            Finished(
                batch_id=batch.id,
                number=line.number,
                is_answer=record.is_answer,
                data=record.data,
                input_tokens=answer.prompt_tokens if answer else 0,
                output_tokens=answer.completion_tokens if answer else 0,
                cached_tokens=answer.cached_tokens if answer else 0,
                reasoning_tokens=answer.reasoning_tokens if answer else 0,
            )
        )
        self._has_finished.set()

    def _private(self, failure: Failure, batch: Batch, line: RequestLine) -> Failure:
        """As the client may read it; what it may not is logged."""
        shown = self._redaction.failure(failure)
        if shown != failure:
            logger.warning("batches: line %d of %s: %s", line.number, batch.id, failure.message)
        return shown

    async def _write(self) -> None:
        while True:
            await self._has_finished.wait()
            self._has_finished.clear()
            try:
                await self._flush()
            except Exception as error:
                self.tell(error, "cannot write results")
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
                self.finished["answered" if one.is_answer else "failed"] += 1
                self.finished["input"] += one.input_tokens
                self.finished["output"] += one.output_tokens
                self._under_way[one.batch_id].pop(one.number, None)

    async def _sweep(self) -> None:
        while True:
            try:
                if self._config.keep_ended_days is not None:
                    kept_s = self._config.keep_ended_days * 86400
                    await asyncio.to_thread(self._store.remove_ended, kept_s=kept_s)
                await asyncio.to_thread(self._files.sweep)
            except Exception as error:
                self.tell(error, "cannot let go of what has expired")
            await asyncio.sleep(_SWEEP_S)


def _num_left(batch: Batch) -> int:
    """Lines without a result, at least 1."""
    return max(batch.total - batch.completed - batch.failed, 1)


def _unreadable(line: Line, error: OSError) -> BadLine:
    message = f"the input file cannot be read: {error.strerror}"
    return BadLine(
        number=line.number,
        custom_id=line.custom_id,
        code="input_unreadable",
        message=message,
        param=None,
    )
