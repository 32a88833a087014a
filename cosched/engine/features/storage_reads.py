"""KV in storage below host memory (``--hicache-storage-backend``, LMCache).

SGLang asks the storage about each request when it comes, and loads what it finds into host memory.
That suits online requests. Of offline requests 100,000 may wait, and their turn may come hours
later: the storage is asked about those that are next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from cosched.engine import port
from cosched.engine.feature import Feature
from cosched.engine.tracked import TrackedRequest
from cosched.engine.waiting import WaitingQueue

_MAX_NEXT = 8  # offline requests at the head of the pool


class StorageReads(Feature):
    """The reads of offline requests."""

    place = "storage"

    def __init__(self, scheduler: Any, waiting: WaitingQueue) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self.asked: WeakSet[Any] = WeakSet()
        """Requests (SGLang's) about which the storage was asked."""

    @classmethod
    def of(cls, controller: Any) -> StorageReads | None:
        scheduler = controller.scheduler
        return cls(scheduler, controller.waiting) if port.reads_storage(scheduler) else None

    def to_share(self) -> Sequence[str]:
        """The requests to read for before the next plan."""
        due = []
        for request in itertools.islice(self._waiting.offline.order(), _MAX_NEXT):
            assert isinstance(request, TrackedRequest), f"{type(request)=}"
            if request.req not in self.asked:
                due.append(request.rid)
        return due

    def on_shared(self, given: Sequence[str]) -> None:
        for rid in given:
            tracked = self._waiting.get(rid)
            if tracked is not None:
                self.asked.add(tracked.req)
                port.read_storage(self._scheduler, tracked.req)
