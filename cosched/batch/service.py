"""The Batch API of one server: its store, and the feeder while it runs."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cosched.batch.config import BatchesConfig
from cosched.batch.errors import StoreAwayError
from cosched.batch.exposition import Snapshot
from cosched.batch.feeder import Feeder
from cosched.batch.files import FileStore
from cosched.batch.forecast import Outlook
from cosched.batch.in_process import App, InProcessTransport
from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.opening import open_store
from cosched.batch.rate import Progress
from cosched.batch.storage import without_secrets
from cosched.batch.store import BatchStore
from cosched.limits.table import ANY_MODEL, Scope

logger = logging.getLogger(__name__)

_SELF = "http://cosched"
"""Stands for the server itself in its requests to itself."""


async def _unknown() -> Progress:
    return Progress()


class BatchService:
    """One per server process that serves HTTP."""

    def __init__(self, config: BatchesConfig, *, clock: Callable[[], float] = time.time) -> None:
        """Take the folder, and open the store; ConfigError when one cannot be. clock: seconds of
        the epoch, for windows and what is kept for how long."""
        self.config = config
        self._opened = open_store(config)
        quota, database = config.quota, self._opened.database
        self.files = FileStore(database, self._opened.storage, clock=clock, quota=quota)
        self.store = BatchStore(database, clock=clock, quota=quota)
        self._feeder: Feeder | None = None

    def summary(self) -> str:
        """Where files are kept, and what is still to be done of earlier batches."""
        place = without_secrets(self.config.folder or "")
        found = self.store.open()
        num_lines = sum(batch.total - batch.completed - batch.failed for batch in found)
        batches = "1 batch" if len(found) == 1 else f"{len(found)} batches"
        lines = "1 line" if num_lines == 1 else f"{num_lines:,} lines"
        if not found:
            return f"{place}, no open batches"
        verb = "shares" if self.config.is_shared else "resumed"
        return f"{place}, {verb} {batches} with {lines} to go"

    def wake(self) -> None:
        """Tell the feeder of something new."""
        if self._feeder is not None:
            self._feeder.wake()

    def tell(self, error: StoreAwayError) -> None:
        """Log why the store cannot be used, not at every request."""
        if self._feeder is not None:
            self._feeder.tell(error, "a request was answered with 503")

    @property
    def num_servers(self) -> int:
        """That live and share the store, as of a moment ago."""
        return 1 if self._feeder is None else self._feeder.num_servers

    def outlooks(self) -> Mapping[str, Outlook]:
        """Of the batches that have not ended, as far as anything is known; for any thread."""
        feeder = self._feeder
        if feeder is None:
            return {}
        try:
            return feeder.outlooks(self.store.open(), taken=self.store.num_taken())
        except StoreAwayError:  # what they are to be shown with is known, and is answered
            return {}

    def snapshot(self) -> Callable[[], Snapshot]:
        """For Prometheus. What the feeder knows is read now; the rest by what is returned, for
        another thread."""
        feeder = self._feeder
        finished = {} if feeder is None else dict(feeder.finished)
        rate = None if feeder is None else feeder.rate
        num_servers = self.num_servers

        def read() -> Snapshot:
            found, taken = self.store.open(), self.store.num_taken()
            return Snapshot(
                now=self.store.now(),
                num_by_status=self.store.num_by_status(),
                open=tuple(found),
                outlooks={} if feeder is None else feeder.outlooks(found, taken=taken),
                under_way=taken,
                finished=finished,
                tokens_per_s=None if rate is None else rate.tokens_per_s,
                num_servers=num_servers,
            )

        return read

    @asynccontextmanager
    async def feeding(
        self,
        app: App,
        *,
        api_key: str | None,
        state: Callable[[float | None], Mapping[str, Any]],
        is_paused: Callable[[], bool] = lambda: False,
        progress: Callable[[], Awaitable[Progress]] = _unknown,
        scope: Scope = ANY_MODEL,
    ) -> AsyncIterator[None]:
        """Send lines to `app` within the block, as the server's own requests.

        api_key    that `app` asks for
        state      what a request has in ``request.state``, by its deadline from now on [s]
        is_paused  whether the operator keeps offline work from running on this server
        progress   what the schedulers say of their work
        scope      of the model, for the bounds of the fields of lines
        """
        client = Client(
            base_url=_SELF,
            concurrency=self.config.high_watermark,
            rules=RetryRules(max_wait_s=float("inf")),
            rng=random.Random(),
            clock=time.monotonic,
            api_key=api_key,
            transport=InProcessTransport(app, state=state(None)),
        )
        async with client:
            self._feeder = Feeder(
                store=self.store,
                files=self.files,
                client=client,
                config=self.config,
                state=state,
                is_paused=is_paused,
                progress=progress,
                scope=scope,
                clock=time.monotonic,
            )
            task = asyncio.create_task(self._feeder.run())
            task.add_done_callback(_tell)
            try:
                yield
            finally:
                self._feeder = None
                task.cancel()
                await asyncio.wait([task])
                self.close()

    def close(self) -> None:
        """Give the store back."""
        self._opened.close()


def _tell(task: asyncio.Task[None]) -> None:
    """A feeder that ends by itself must not end in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("batches: no line is sent until the server is restarted", exc_info=error)
