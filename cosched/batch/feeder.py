"""The feeder: sends lines from the store to the server as offline requests, and stores the results.

One task decides what is to be done (validate, send, end), one writes results, and each line in
flight is a task that waits for its answer. All work of the store is done in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from cosched.batch.batch_records import WITH_LINES, Batch, Finished, Status
from cosched.batch.config import BatchesConfig
from cosched.batch.errors import Redaction, StoreUnavailableError
from cosched.batch.files import FileStore
from cosched.batch.forecast import BatchOutlook, Forecast, forecasts_of, outlooks_of
from cosched.batch.free_places import FreePlaces, Here
from cosched.batch.in_flight import LinesInFlight
from cosched.batch.ingest import LineRules, ServedModels, ValidationTurns, take_lines, validate
from cosched.batch.jsonl.client import Client
from cosched.batch.jsonl.line_results import Answer, Failure
from cosched.batch.jsonl.lines import BadLine, RequestLine
from cosched.batch.rate import EndedLine, Rate, RateMeter, WorkProgress, past_rate
from cosched.batch.scaling import needed_ratio, replicas_wanted
from cosched.batch.storage import FailureLog, FilesUnavailableError
from cosched.batch.store import BatchStore, records_of
from cosched.batch.threads import FairSlots, FairThreads
from cosched.limits.api_keys import ApiKeys
from cosched.limits.bounds import Scope

if TYPE_CHECKING:
    from cosched.batch.tracing import BatchTracer

logger = logging.getLogger(__name__)

_INTERNAL_ERROR = Failure(
    code="internal_error", message="the server failed on this line; its log says why"
)
_STEP_S = 1.0
"""Between two steps when nothing happens: windows may have ended."""
_PROGRESS_S = 2.0
"""Between two requests for the progress of the schedulers."""
_IDLE_TURNS = 5
"""Of which one asks where no line is in flight."""
_SWEEP_S = 60.0
_RETRY_S = 1.0
_MAX_BYTES = 256 << 20
"""Of all lines in flight together; one line always fits."""
_CLOSED_PER_TRANSACTION = 500
_MIN_DEADLINE_S = 1.0
_BEATS_PER_LEASE = 3
_PAST_BATCHES = 8
_NUM_THREADS, _THREADS_PER_WORK = 6, 2


class Feeder:
    """One per server; `run` until it is cancelled."""

    def __init__(
        self,
        *,
        store: BatchStore,
        files: FileStore,
        client: Client,
        config: BatchesConfig,
        keys: ApiKeys,
        state: Callable[..., Mapping[str, Any]],
        is_paused: Callable[[], bool],
        progress: Callable[[], Awaitable[WorkProgress]],
        scope: Scope,
        clock: Callable[[], float],
        tracer: BatchTracer | None = None,
    ) -> None:
        """state: deadline from now on [s] and batch of a line -> its ``request.state``; is_paused,
        progress, scope: as in `BatchService.feeding`"""
        self._tracer = tracer
        self._state = state
        self._is_paused = is_paused
        self._progress = progress
        self._meter = RateMeter(clock)
        self.rate: Rate | None = None
        """Measured up to the last step."""
        self._past_rate: Rate | None = None
        self._forecasts: Mapping[str, Forecast] = {}
        self._store = store
        self._files = files
        self._client = client
        self._config = config
        self._keys = keys
        self._rules = LineRules(config, scope=scope)
        self._places = FreePlaces(store, config, keys.share)
        self._redaction = Redaction([] if config.folder is None else [config.folder])
        self._name = secrets.token_hex(8)
        self.num_servers = 1
        """Live servers that share the store."""
        self._wake = asyncio.Event()
        self._lookers: list[asyncio.Future[None]] = []
        self.finished: Counter[str] = Counter()
        """Since the start: answered and failed lines, input and output tokens."""
        self._in_flight = LinesInFlight()
        self._num_behind = 0
        """Lines of all batches that are not sent yet, a server's part of them."""
        self._finished: list[Finished] = []
        self._has_finished = asyncio.Event()
        self._flushing, self._starting = asyncio.Lock(), asyncio.Lock()
        self._media_places = asyncio.Semaphore(config.media_in_flight)
        self._validation: asyncio.Task[None] | None = None
        self._not_validated: set[str] = set()
        """Batches whose validation raised an error: others come before them."""
        self._turns = ValidationTurns()
        self._endings: dict[str, asyncio.Task[None]] = {}
        self.failures = FailureLog(clock)
        slots = FairSlots(_NUM_THREADS, per_key=_THREADS_PER_WORK)
        self._run = FairThreads("cosched-feeder", slots).run  # by kind of work

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def wake(self) -> None:
        """There is something new in the store."""
        self._wake.set()

    async def look(self, most_s: float) -> None:
        """There is something new in the store. Returns when forecasts know it, or then [s]."""
        looked = asyncio.get_running_loop().create_future()
        self._lookers.append(looked)
        self.wake()
        await asyncio.wait([looked], timeout=most_s)

    async def run(self) -> None:
        """Feed the server. When cancelled, write what is finished; lines in flight are sent again
        after the next start."""
        try:
            await self._load_past_rate()
            await self._client.wait_ready(max_wait_s=math.inf)
            await self._join()
            async with asyncio.TaskGroup() as group:
                for work in (self._beat, self._decide, self._follow, self._write, self._sweep):
                    group.create_task(work())
        finally:
            left = self._in_flight.tasks()
            left += self._endings.values()
            left += [] if self._validation is None else [self._validation]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            try:
                await self._flush()
                await self._run("end", self._store.leave, self._name)
            except StoreUnavailableError as error:
                logger.warning("batches: %s; lines without a result are sent again", error.for_log)

    async def _join(self) -> None:
        while True:
            try:
                lease_s = self._config.lease_s
                await self._run("beat", self._store.join, self._name, lease_s=lease_s)
                return
            except Exception as error:
                self.failures.add(error, "cannot begin")
                await asyncio.sleep(_RETRY_S)

    async def _load_past_rate(self) -> None:
        """The rate of recent batches, for as long as nothing is measured."""
        try:
            ended = await self._run("step", self._store.latest_answered, limit=_PAST_BATCHES)
            self._past_rate = past_rate(ended)
        except StoreUnavailableError as error:
            self.failures.add(error, "the rate of earlier batches is not known")

    async def _beat(self) -> None:
        """Send heartbeats to the other servers of a shared store."""
        lease_s = self._config.lease_s
        while True:
            try:
                num_alive = await self._run("beat", self._store.beat, self._name, lease_s=lease_s)
                if not num_alive:
                    logger.warning(
                        "batches: this server sent no heartbeat for batches.lease_s (%g s); others "
                        "have its lines now",
                        lease_s,
                    )
                    await self._drop(list(self._in_flight.by_batch()))
                    await self._join()
                self.num_servers = max(num_alive, 1)
            except Exception as error:
                self.failures.add(error, "cannot send a heartbeat")
            await asyncio.sleep(lease_s / _BEATS_PER_LEASE)

    async def _drop(self, names: Sequence[str]) -> None:
        """Cancel the lines of batches in flight, and write what is finished."""
        await self._in_flight.cancel(names)
        await self._flush()
        self._in_flight.forget(names)

    async def _decide(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._step()
                self.failures.over()
            except Exception as error:
                # For example a full disk: nothing has changed, and it is tried again.
                self.failures.add(error, "cannot continue")
                await asyncio.sleep(_RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STEP_S):
                    await self._wake.wait()

    async def _follow(self) -> None:
        """Ask for the progress of the lines in flight, and now and then for what chat needs."""
        for turn in count():
            try:
                if self.num_in_flight or turn % _IDLE_TURNS == 0:
                    self._meter.progressed(await self._progress())
            except Exception:
                logger.exception("batches: the schedulers do not report their progress")
                await asyncio.sleep(_SWEEP_S)
            await asyncio.sleep(_PROGRESS_S)

    async def _step(self) -> None:
        lookers, self._lookers = self._lookers, []
        await self._run("step", self._store.expire_due)
        found = await self._run("step", self._store.open)
        self._not_validated.intersection_update(batch.id for batch in found)
        waiting = []
        for batch in found:
            if batch.ending is not None and batch.id not in self._endings:
                self._endings[batch.id] = asyncio.create_task(self._end(batch))
            elif batch.status is Status.VALIDATING and batch.validated_by in (None, self._name):
                waiting.append(batch)
        if waiting and self._validation is None:
            # Those that raised an error come last.
            fresh = [batch for batch in waiting if batch.id not in self._not_validated]
            self._validation = asyncio.create_task(
                self._validate(self._turns.next(fresh or waiting))
            )
        self._forecasts = await self._run("step", self._forecasts_of, found)
        for looked in lookers:
            looked.set_result(None)
        await self._refill([batch for batch in found if batch.status is Status.IN_PROGRESS])
        self._meter.look(0 if self._is_paused() else self.num_in_flight)
        self.rate = self._meter.rate()

    def outlooks(self, found: Sequence[Batch], taken: Mapping[str, int]) -> dict[str, BatchOutlook]:
        """Of batches with lines to send. For any thread. `taken`: batch -> lines in flight."""
        return outlooks_of(
            found,
            # Of the last step: to look at all open batches takes long where there are many.
            None if self._is_paused() and self.num_servers == 1 else self._forecasts,
            taken=taken,
            done=self._meter.progress.done_of(self.num_in_flight),
        )

    def replicas_wanted(self, found: Sequence[Batch]) -> float | None:
        """None: nothing is known of chat. found: open batches. For any thread."""
        saturation = self._meter.progress.saturation
        if saturation is None:
            return None
        now, margin_s = self._store.now(), self._config.late_margin_s
        known = [] if self._is_paused() else found
        return replicas_wanted(
            saturation, needed_ratio(known, self._forecasts, now=now, margin_s=margin_s)
        )

    def _forecasts_of(self, found: Sequence[Batch]) -> dict[str, Forecast]:
        """Of batches that have not ended; {} if no rate is known."""
        rate = self._past_rate
        if self.rate is not None:  # the other servers are assumed to be as fast
            rate = replace(self.rate, tokens_per_s=self.rate.tokens_per_s * self.num_servers)
        if rate is None:
            return {}
        return forecasts_of(
            [batch for batch in found if batch.status in WITH_LINES],
            now=self._store.now(),
            sizes=self._in_flight.sizes(),
            meter=self._meter,
            rate=rate,
            num_servers=self.num_servers,
            share=self._keys.share,
            margin_s=self._config.late_margin_s,
        )

    async def _update_models(self) -> None:
        """Adapters are loaded and unloaded while the server runs."""
        content = await self._client.models()
        models = None if content is None else ServedModels.of_listing(content)
        if models is not None:
            self._rules = replace(self._rules, models=models)

    async def _validate(self, batch: Batch) -> None:
        try:
            await self._update_models()
            read = partial(validate, store=self._store, files=self._files, server=self._name)
            await self._run("validate", read, batch, rules=self._rules)
            self._not_validated.discard(batch.id)
        except Exception as error:
            self._not_validated.add(batch.id)
            self.failures.add(error, f"cannot validate {batch.id}")
            await asyncio.sleep(_RETRY_S)
        finally:
            self._validation = None
            self.wake()

    async def _end(self, batch: Batch) -> None:
        """Cancel what is in flight here, keep what is finished, close the rest. Each server does
        this with its lines; the last one ends the batch."""
        try:
            await self._drop([batch.id])
            await self._run("end", self._store.release, batch.id, server=self._name)
            while await self._run(
                "end", self._store.close_lines, batch.id, limit=_CLOSED_PER_TRANSACTION
            ):
                pass
            if await self._run("end", self._finish, batch.id):
                await self._load_past_rate()
                with suppress(FilesUnavailableError):  # a later sweep removes them
                    await self._run("end", self._files.sweep)
            else:
                await asyncio.sleep(_STEP_S)
        except Exception as error:
            self.failures.add(error, f"cannot end {batch.id}")
            await asyncio.sleep(_RETRY_S)
        finally:
            self._endings.pop(batch.id, None)
            self.wake()

    def _finish(self, name: str) -> bool:
        """Whether a batch has ended: no lines are in flight at other servers."""
        return self._store.is_done(name) and self._store.end(name, self._files.write_results(name))

    async def _refill(self, found: Sequence[Batch]) -> None:
        found = [batch for batch in found if self._keys.may_have_batches(batch.owner)]
        in_flight = self._in_flight.by_batch()
        if not found:
            return
        progress = self._meter.progress
        here = Here(
            in_flight=in_flight,
            num_finished=self.finished["answered"] + self.finished["failed"],
            num_running=len(progress.running) if progress.num_iterations else None,
            num_servers=self.num_servers,
            late={batch.id for batch in found if self._is_late(batch)},
        )
        is_due = self._places.are_due(self.num_in_flight, found, in_flight)
        claims = await self._run("step", self._places.next, found, here) if is_due else []
        if not claims:
            await self._give_back(found, here)
            return
        by_id = {batch.id: batch for batch in found}
        num_waiting = sum(batch.num_left for batch in found) - self.num_in_flight
        await self._update_models()
        away: FilesUnavailableError | None = None
        for claim in claims:
            max_bytes = _MAX_BYTES - self._in_flight.num_bytes
            if max_bytes <= 0:
                return
            take = partial(take_lines, store=self._store, files=self._files, server=self._name)
            lines, missing = await self._run(
                "step", take, by_id, claim, rules=self._rules, max_bytes=max_bytes
            )
            away = missing or away  # files of other batches may be copied here already
            num_waiting -= len(lines)
            self._num_behind = max(num_waiting, 0) // self.num_servers
            for batch, line in lines:
                num_bytes = len(line.body) if isinstance(line, RequestLine) else 0
                task = asyncio.create_task(self._answer(batch, line))
                self._in_flight.add(batch.id, line.number, task, num_bytes=num_bytes)
        if away is not None:
            raise away

    async def _give_back(self, found: Sequence[Batch], here: Here) -> None:
        """Lines that other servers have places for."""
        if here.num_servers > 1:
            surplus = await self._run("step", self._places.surplus, found, here)
            for name, numbers in (await self._in_flight.cancel_last(surplus)).items():
                release = partial(self._store.release, server=self._name, numbers=numbers)
                await self._run("step", release, name)

    def _is_late(self, batch: Batch) -> bool:
        forecast = self._forecasts.get(batch.id)
        return forecast is not None and forecast.is_late

    def _deadline_s(self, batch: Batch) -> float:
        """The deadline of a line that is sent now, from now on [s]."""
        left_s = max(batch.expires_at - self._store.now(), _MIN_DEADLINE_S)
        forecast = self._forecasts.get(batch.id)
        if forecast is None:
            return left_s
        num_left = max(batch.num_left, 1)
        ahead = min(self._config.high_watermark * self.num_servers, num_left) / num_left
        deadline_s = forecast.line_deadline_s(ahead, margin_s=self._config.late_margin_s)
        return min(max(deadline_s, _MIN_DEADLINE_S), left_s)

    async def _answer(self, batch: Batch, line: RequestLine | BadLine) -> None:
        """Send a line, and pass its result to the writer."""
        outcome: Answer | Failure | None = None
        usage: dict[str, Any] = {}
        if isinstance(line, RequestLine):
            try:
                async with self._media_places if line.has_media else nullcontext():
                    outcome = await self._send(batch, line)
            except Exception:
                logger.exception("batches: line %d of %s", line.number, batch.id)
                outcome = _INTERNAL_ERROR
        if isinstance(outcome, Failure):
            shown = self._redaction.failure(outcome)
            if shown != outcome:
                logger.warning("batches: line %d of %s: %s", line.number, batch.id, outcome.message)
            outcome = shown
        elif isinstance(outcome, Answer):
            assert isinstance(line, RequestLine)
            ended = EndedLine(outcome.prompt_tokens, outcome.completion_tokens)
            self._meter.finished(ended, num_bytes=len(line.body))
            usage = outcome.usage()
        record = records_of(batch.id).record(line, outcome)
        self._finished.append(
            Finished(
                batch_id=batch.id,
                number=line.number,
                is_answer=record.is_answer,
                data=record.data,
                **usage,
            )
        )
        self._has_finished.set()

    async def _send(self, batch: Batch, line: RequestLine) -> Answer | Failure:
        state = self._state(self._deadline_s(batch), batch, self._num_behind)
        async with self._starting:
            await asyncio.sleep(0)  # one line in each turn of the loop, which serves chats
        send = partial(self._client.send, line, extensions={"state": state})
        return await (send() if self._tracer is None else self._tracer.traced(batch, line, send))

    async def _write(self) -> None:
        while True:
            await self._has_finished.wait()
            self._has_finished.clear()
            try:
                await self._flush()
            except Exception as error:
                self.failures.add(error, "cannot write results")
                await asyncio.sleep(_RETRY_S)
                self._has_finished.set()
            if self._places.are_due(self.num_in_flight):
                self.wake()

    async def _flush(self) -> None:
        """Write all finished lines in one transaction."""
        async with self._flushing:
            group = list(self._finished)
            if not group:
                return
            await self._run("results", self._store.finish, group)
            del self._finished[: len(group)]
            for one in group:
                self.finished["answered" if one.is_answer else "failed"] += 1
                self.finished["input"] += one.input_tokens
                self.finished["output"] += one.output_tokens
                self._in_flight.remove(one.batch_id, one.number)

    async def _sweep(self) -> None:
        while True:
            try:
                if self._config.keep_ended_days is not None:
                    kept_s = self._config.keep_ended_days * 86400
                    await self._run("sweep", self._store.remove_ended, kept_s=kept_s)
                await self._run("sweep", self._files.sweep)
            except Exception as error:
                self.failures.add(error, "cannot remove what has expired")
            await asyncio.sleep(_SWEEP_S)
