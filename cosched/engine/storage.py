"""KV in storage below host memory (``--hicache-storage-backend``, LMCache).

SGLang asks the storage about each request when it comes, and loads what it finds into host memory.
That suits online requests. Of offline requests 100,000 may wait, and their turn may come hours
later: the storage is asked about those that are next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cosched.engine import port
from cosched.engine.tracked import TrackedRequest
from cosched.pool.pool import OfflinePool

_MAX_NEXT = 8  # offline requests at the head of the pool


class StorageReads:
    """The reads of offline requests."""

    def __init__(self, scheduler: Any, pool: Callable[[], OfflinePool[TrackedRequest]]) -> None:
        """pool: the present pool of offline requests."""
        self._scheduler = scheduler
        self._pool = pool

    def due(self) -> Sequence[str]:
        """The requests to read for before the next plan."""
        due = []
        for request in itertools.islice(self._pool().order(), _MAX_NEXT):
            assert isinstance(request, TrackedRequest), f"{type(request)=}"
            if not request.is_read:
                due.append(request.rid)
        return due

    def begin(self, requests: Iterable[TrackedRequest]) -> None:
        """Ask the storage about these; the same on every rank."""
        for tracked in requests:
            tracked.is_read = True
            port.read_storage(self._scheduler, tracked.req)
