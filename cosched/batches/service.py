"""The Batch API of one server: its store, and the feeder while it runs."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cosched.batches.config import BatchesConfig
from cosched.batches.database import Database
from cosched.batches.feeder import Feeder
from cosched.batches.files import FileStore
from cosched.batches.in_process import App, InProcessTransport
from cosched.batches.lock import lock_folder
from cosched.batches.store import BatchStore
from cosched.jobs.client import Client, RetryRules

__all__ = ["BatchService"]

logger = logging.getLogger(__name__)

_SELF = "http://cosched"
"""Stands for the server itself in its requests to itself."""


class BatchService:
    """One per server process that serves HTTP."""

    def __init__(self, config: BatchesConfig) -> None:
        """Take the folder; ConfigError when it cannot be, or another server has it."""
        assert config.folder is not None
        self.config = config
        folder = Path(config.folder)
        self._lock = lock_folder(folder)
        self._database = Database(config.url or f"sqlite:///{folder / 'batches.sqlite'}")
        self.files = FileStore(self._database, folder, clock=time.time)
        self.store = BatchStore(self._database, clock=time.time)
        self._feeder: Feeder | None = None

    def wake(self) -> None:
        """Tell the feeder of something new."""
        if self._feeder is not None:
            self._feeder.wake()

    @asynccontextmanager
    async def feeding(
        self, app: App, *, api_key: str | None, state: Mapping[str, Any]
    ) -> AsyncIterator[None]:
        """Send lines to `app` within the block, as the server's own requests.

        api_key  that `app` asks for
        state    what its requests have in ``request.state``
        """
        client = Client(
            base_url=_SELF,
            concurrency=self.config.high_watermark,
            rules=RetryRules(max_wait_s=float("inf")),
            rng=random.Random(),
            clock=time.monotonic,
            api_key=api_key,
            transport=InProcessTransport(app, state=state),
        )
        async with client:
            self._feeder = Feeder(
                store=self.store, files=self.files, client=client, config=self.config
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
        """Give the folder back."""
        self._database.close()
        self._lock.close()


def _tell(task: asyncio.Task[None]) -> None:
    """A feeder that ends by itself must not end in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("batches: no line is sent until the server is restarted", exc_info=error)
