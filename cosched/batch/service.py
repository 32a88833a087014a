"""The Batch API of one server: its store, and the feeder while the server runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from cosched.batch.batch_records import OPEN, Batch, NewBatch
from cosched.batch.callback_rules import callback_rules
from cosched.batch.callback_sender import CallbackSender
from cosched.batch.callbacks import CallbackQueue
from cosched.batch.config import BatchesConfig
from cosched.batch.errors import ApiError, StoreUnavailableError
from cosched.batch.feeder import Feeder
from cosched.batch.files import FileStore
from cosched.batch.forecast import BatchOutlook
from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.once import Once
from cosched.batch.open_store import open_store
from cosched.batch.prometheus import Snapshot
from cosched.batch.rate import WorkProgress
from cosched.batch.storage import without_secrets
from cosched.batch.store import BatchStore
from cosched.batch.threads import FairSlots, FairThreads
from cosched.batch.uploads import Uploads
from cosched.limits.api_keys import ApiKeys
from cosched.limits.bounds import ANY_MODEL, Scope
from cosched.limits.claims import hex_digest, presented_key

if TYPE_CHECKING:
    from cosched.batch.tracing import BatchTracer

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

_SELF = "http://cosched"
"""Stands for the server itself in its requests to itself."""
_NUM_THREADS, _THREADS_PER_KEY, _MAX_WAITING = 6, 2, 64
"""For calls of clients; the database has connections for these and for the feeder's."""
_LOOK_S = 1.0
_ANSWER_S = 20.0
_REST_S = 0.02
"""Within which a call that moves no content is answered."""


async def _unknown() -> WorkProgress:
    return WorkProgress()


class BatchService:
    """One per server process that serves HTTP."""

    def __init__(
        self,
        config: BatchesConfig,
        *,
        clock: Callable[[], float] = time.time,
        keys: ApiKeys | None = None,
        tracer: BatchTracer | None = None,
    ) -> None:
        """Lock and open the store. ConfigError. `clock`: seconds of the epoch. `tracer`: None: no
        spans are made."""
        self._tracer = tracer
        self.config = config
        self.keys = keys or ApiKeys(weights=config.tenant_weights)
        self.callback_rules = callback_rules(config)
        """None: no callbacks are sent."""
        self._opened = open_store(config)
        quota, database = config.quota, self._opened.database
        self.files = FileStore(database, self._opened.storage, clock=clock, quota=quota)
        self.store = BatchStore(
            database,
            clock=clock,
            quota=quota,
            callback_rules=self.callback_rules,
            **({} if tracer is None else {"on_end": tracer.ended}),
        )
        self.callbacks = CallbackQueue(database, clock=clock)
        self._sender = (
            None
            if self.callback_rules is None
            else CallbackSender(self.callbacks, self.callback_rules, clock=time.monotonic)
        )
        slots = FairSlots(_NUM_THREADS, per_key=_THREADS_PER_KEY, max_waiting=_MAX_WAITING)
        self.threads = FairThreads("cosched-files", slots, answer_s=_ANSWER_S, rest_s=_REST_S)
        self.uploads = Uploads(config, self.files, self.threads)
        self._costs = FairThreads("cosched-costs", FairSlots(1, per_key=1))
        self._feeder: Feeder | None = None
        self.loop_lag_s: Callable[[], float] = lambda: 0.0
        """The longest of the last minute [s]."""
        self._writing: set[asyncio.Task[None]] = set()

    def summary(self) -> str:
        """The folder and the remaining work of earlier batches, for the log at the start."""
        place = without_secrets(self.config.folder or "")
        found = self.store.open()
        num_lines = sum(batch.num_left for batch in found)
        batches = "1 batch" if len(found) == 1 else f"{len(found)} batches"
        lines = "1 line" if num_lines == 1 else f"{num_lines:,} lines"
        if not found:
            return f"{place}, no open batches"
        verb = "shares" if self.config.is_shared else "resumed"
        return f"{place}, {verb} {batches} with {lines} to go"

    def wake(self) -> None:
        """There is something new for the feeder."""
        if self._feeder is not None:
            self._feeder.wake()

    def check_may_batch(self, headers: Mapping[str, str]) -> None:
        """ApiError 403 if the API key of a request may have no batches."""
        if not self.keys.may_be_offline(hex_digest(presented_key(headers))):
            raise ApiError(
                "this API key may have no offline requests (claims.keys: its max_offline is 0), so "
                "it may have no batches",
                status=403,
            )

    async def create(
        self, key: str, asked: NewBatch, *, headers: Mapping[str, str], once: Once | None = None
    ) -> Batch:
        """A new batch, as `BatchStore.create`. key: whose threads it takes; headers: of the
        request. Returns when `outlooks` knows it, but soon."""
        span = None if self._tracer is None else self._tracer.creation(headers)
        if span is not None:
            asked = replace(asked, traceparent=span.traceparent)
        batch = await self.threads.run(key, self.store.create, asked, once=once)
        if span is not None:
            span.made(batch)
        if self._feeder is not None:
            await self._feeder.look(_LOOK_S)
        return batch

    def log_failure(self, error: StoreUnavailableError) -> None:
        """Log why the store cannot be used, but not at every request."""
        if self._feeder is not None:
            self._feeder.failures.add(error, "a request was answered with 503")

    @property
    def num_servers(self) -> int:
        """Live servers that share the store."""
        return 1 if self._feeder is None else self._feeder.num_servers

    def outlooks(self, shown: Sequence[Batch]) -> Mapping[str, BatchOutlook]:
        """Of these batches, as the feeder knew them last. For any thread."""
        feeder = self._feeder
        if feeder is None:
            return {}
        try:
            names = [batch.id for batch in shown]
            return feeder.outlooks(shown, taken=self.store.num_taken(names))
        except StoreUnavailableError:  # the batches themselves can still be shown
            return {}

    def callbacks_of(
        self, shown: Sequence[Batch], *, only_own: bool
    ) -> Mapping[str, list[dict[str, Any]]]:
        """Of those of these batches that have ended, as people see them. only_own: those to URLs
        that the batch itself names. For any thread."""
        ended = [batch.id for batch in shown if batch.status not in OPEN]
        if not ended or self._sender is None:
            return {}
        return self.callbacks.of_batches(ended, only_own=only_own)

    def snapshot(self) -> Callable[[], Snapshot]:
        """For Prometheus: reads the feeder now; the result reads the store, in another thread."""
        feeder = self._feeder
        finished = {} if feeder is None else dict(feeder.finished)
        rate = None if feeder is None else feeder.rate
        sender = self._sender
        callbacks = None if sender is None else dict(sender.ended)
        num_servers, loop_lag_s = self.num_servers, self.loop_lag_s()

        def read() -> Snapshot:
            found, taken = self.store.open(), self.store.num_taken()
            return Snapshot(
                now=self.store.now(),
                num_by_status=self.store.num_by_status(),
                open=tuple(found),
                outlooks={} if feeder is None else feeder.outlooks(found, taken=taken),
                in_flight=taken,
                finished=finished,
                tokens_per_s=None if rate is None else rate.tokens_per_s,
                num_servers=num_servers,
                loop_lag_s=loop_lag_s,
                replicas_wanted=None if feeder is None else feeder.replicas_wanted(found),
                callbacks=callbacks,
                num_callbacks_waiting=0 if sender is None else self.callbacks.num_waiting(),
            )

        return read

    @asynccontextmanager
    async def feeding(
        self,
        app: App,
        *,
        api_key: str | None,
        state: Callable[..., Mapping[str, Any]],
        is_paused: Callable[[], bool] = lambda: False,
        progress: Callable[[], Awaitable[WorkProgress]] = _unknown,
        scope: Scope = ANY_MODEL,
    ) -> AsyncIterator[None]:
        """Send lines to `app` within the block, as the server's own requests.

        api_key    that `app` requires
        state      deadline from now on [s], owner, tenant, what is called with the cost of a
                   request that is aborted [s], and how many come after it -> its ``request.state``
        is_paused  whether the operator pauses offline work on this server
        progress   the progress of the schedulers
        scope      of the model, for the bounds of the fields of lines
        """
        client = Client(
            base_url=_SELF,
            concurrency=self.config.high_watermark,
            rules=RetryRules(max_wait_s=float("inf")),
            api_key=api_key,
            transport=InProcessTransport(app, state=state(None)),
        )

        def of_line(deadline_s: float, batch: Batch, num_behind: int) -> Mapping[str, Any]:
            aborted = partial(self._aborted, batch.id)
            return state(deadline_s, batch.owner, batch.tenant, aborted, num_behind)

        async with client:
            self._feeder = Feeder(
                store=self.store,
                files=self.files,
                client=client,
                config=self.config,
                keys=self.keys,
                state=of_line,
                is_paused=is_paused,
                progress=progress,
                scope=scope,
                clock=time.monotonic,
                tracer=self._tracer,
            )
            task = asyncio.create_task(self._feeder.run())
            task.add_done_callback(_log_end)
            tasks = [task]
            if self._sender is not None:
                tasks.append(asyncio.create_task(self._sender.run()))
            try:
                yield
            finally:
                self._feeder = None
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                self.close()

    def _aborted(self, batch: str, seconds: float) -> None:
        """A line under way was aborted, for instance because its batch was cancelled."""

        async def write() -> None:
            try:
                await self._costs.run_long(None, self._opened.database.add_cost, batch, seconds)
            except Exception as error:
                logger.warning("batches: the cost of a line of %s is lost: %r", batch, error)

        task = asyncio.create_task(write())
        self._writing.add(task)  # the loop keeps only weak references to tasks
        task.add_done_callback(self._writing.discard)

    def close(self) -> None:
        self.threads.close()
        self._costs.close()
        self._opened.close()


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("batches: no line is sent until the server is restarted", exc_info=error)


class InProcessTransport(httpx.AsyncBaseTransport):
    """Passes requests to an ASGI application.

    Like a connection, and unlike `httpx.ASGITransport`, it lets the application continue when the
    caller is cancelled, and sends it ``http.disconnect``: only then does SGLang abort the request.
    """

    def __init__(self, app: App, *, state: Mapping[str, Any]) -> None:
        """`state`: the initial `request.state`; the extension "state" of a request adds to it."""
        self._app = app
        self._state = state
        self._running: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        reply = _Reply()
        gone = asyncio.Event()
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        # The loop keeps only weak references to tasks.
        task = asyncio.ensure_future(self._app(self._scope(request), receive, reply.add))
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.shield(task)
        except Exception as error:
            # Starlette answers 500 and then raises.
            if reply.status is None:
                raise httpx.RemoteProtocolError(repr(error), request=request) from error
        finally:
            gone.set()
        if reply.status is None:
            raise httpx.RemoteProtocolError("no reply", request=request)
        return httpx.Response(reply.status, headers=reply.headers, content=bytes(reply.body))

    async def aclose(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _scope(self, request: httpx.Request) -> Message:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
            "state": {**self._state, **request.extensions.get("state", {})},
        }

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # read, otherwise asyncio logs it


class _Reply:
    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()

    async def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
