"""What stands in for ``Scheduler.waiting_queue``: online queue and offline pool as one list.

SGLang counts, aborts, flushes and reports through its waiting queue. With this object in its place,
all of that sees every waiting request, online and offline, without a patch of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from sortedcontainers import SortedList

from cosched.core.request import RequestClass, num_tokens_of
from cosched.core.view import OfflineLimits
from cosched.engine import port
from cosched.engine.clock import Clock
from cosched.engine.feature import Feature, Features
from cosched.engine.guard import Guard
from cosched.engine.intake import Intake
from cosched.engine.tracked import TrackedRequest
from cosched.pool.pool import ArrivalQueue, OfflinePool
from cosched.wire import class_of_priority


class WaitingQueue:
    """A list of `Req` in the order of arrival, as far as SGLang uses one.

    `append` accepts new requests and those that go back (preempted, retracted, paused): the latter
    keep class, arrival time and place. Positions and ids are looked up in O(log n).
    """

    def __init__(
        self,
        *,
        pool: OfflinePool[TrackedRequest],
        clock: Clock,
        guard: Guard | None = None,
        intake: Intake | None = None,
    ) -> None:
        """guard: if the pool fails, the order of arrival takes its place; None: errors are raised.
        intake: None: without bounds and tiers."""
        self.online: ArrivalQueue[TrackedRequest] = ArrivalQueue()
        self.offline = pool
        self.clock = clock
        self.num_tokens = 0
        """Prompt and generated tokens of all waiting requests."""
        self.num_behind = 0
        """Offline requests that will come after the newest, as its sender said."""
        self.aborted: Counter[RequestClass] = Counter()
        """Requests that were taken out and will not run."""
        self.cancelled: Counter[RequestClass] = Counter()
        """Requests in `aborted` that their client cancelled."""
        self.offline_limits = OfflineLimits()
        """What the operator allows."""
        self._guard = guard or Guard(is_strict=True)
        self.features = Features(self._guard)
        """Hear of new and of waiting requests."""
        self._intake = intake or Intake()
        self._all: ArrivalQueue[TrackedRequest] = ArrivalQueue()
        self._rids: SortedList[str] = SortedList()
        self._preempted: dict[str, TrackedRequest] = {}
        """Requests with output tokens, by rid."""
        self._seq = itertools.count()
        self._newest_seq = -1

    def advance(self, now_s: float) -> None:
        """Requests have been received, and the next iteration is planned."""
        self.looked(now_s)
        with self._pool() as pool:
            pool.advance(now_s)

    def looked(self, now_s: float) -> None:
        """Requests have been received."""
        if self._intake.arrivals is not None:
            self._intake.arrivals.looked(now_s)

    def ended(self, tracked: TrackedRequest) -> None:
        """A request that was admitted has ended."""
        if tracked.request_class is RequestClass.OFFLINE:
            first_s, last_s = tracked.first_token_s, tracked.last_token_s
            seconds = 0.0 if first_s is None or last_s is None else last_s - first_s
            with self._pool() as pool:
                pool.ended(num_tokens_of(tracked), seconds, tracked.rid)

    @property
    def may_admit(self) -> bool:
        """True if any waiting request may be admitted. Paused offline requests do not count."""
        if len(self.online):
            return True
        return len(self.offline) > 0 and self.offline_limits.most_running != 0

    def append(self, req: Any) -> None:
        tracked = self.track(req)
        self._all.add(tracked)
        self._rids.add(tracked.rid)
        if tracked.num_output_tokens:
            self._preempted[tracked.rid] = tracked
        if tracked.request_class is RequestClass.ONLINE:
            self.online.add(tracked)
        else:
            if tracked.arrival_seq > self._newest_seq:
                self._newest_seq = tracked.arrival_seq
                self.num_behind = tracked.num_behind
            with self._pool() as pool:
                pool.add(tracked)
        self.features.tell(Feature.on_queued, tracked)
        tracked.num_queued_tokens = req.seqlen
        self.num_tokens += tracked.num_queued_tokens

    def extend(self, reqs: Iterable[Any]) -> None:
        for req in reqs:
            self.append(req)

    def track(self, req: Any) -> TrackedRequest:
        """What is kept of a request, since it first came."""
        tracked = TrackedRequest.of(req)
        if tracked is None:
            now_s, intake = self.clock.now_s(), self._intake
            arrivals = intake.arrivals
            tracked = TrackedRequest(
                req,
                arrival_s=now_s if arrivals is None else arrivals.came_s(req, now_s),
                arrival_seq=next(self._seq),
                bounds=intake.bounds,
                tiers=intake.tiers,
            )
            self.features.tell(Feature.on_arrival, tracked)
        return tracked

    def remove_rid(self, rid: str) -> TrackedRequest:
        """Take out a request that is admitted. KeyError when it does not wait."""
        tracked = self._take(rid)
        if tracked.request_class is RequestClass.ONLINE:
            self.online.remove(rid)
            with self._pool() as pool:
                pool.promote(tracked)
        else:
            with self._pool() as pool:
                pool.remove(rid)
        self.features.tell(Feature.on_unqueued, tracked)
        return tracked

    def cancel_rid(self, rid: str) -> TrackedRequest:
        """Take out a request that its client cancels. KeyError when it does not wait."""
        tracked = self.abort_rid(rid)
        self.cancelled[tracked.request_class] += 1
        return tracked

    def abort_rid(self, rid: str) -> TrackedRequest:
        """Take out a request that will not run. KeyError when it does not wait."""
        tracked = self._take(rid)
        self.aborted[tracked.request_class] += 1
        self.features.tell(Feature.on_aborted, tracked)
        if tracked.request_class is RequestClass.ONLINE:
            self.online.abort(rid)
        else:
            with self._pool() as pool:
                pool.abort(rid)
        self.features.tell(Feature.on_unqueued, tracked)
        return tracked

    def turned_away(self, tracked: TrackedRequest) -> None:
        """A preempted request will not be queued again."""
        self.features.tell(Feature.on_aborted, tracked)

    def use_arrival_order(self) -> None:
        """Put all waiting offline requests into a plain queue: the pool has failed."""
        queue: ArrivalQueue[TrackedRequest] = ArrivalQueue()
        for tracked in self._all:
            if tracked.request_class is RequestClass.OFFLINE:
                queue.add(tracked)
        self.offline = queue
        self.features.tell(Feature.on_pool_failed)

    @contextlib.contextmanager
    def _pool(self) -> Iterator[OfflinePool[TrackedRequest]]:
        try:
            yield self.offline
        except Exception as error:
            if self._guard.is_strict:
                raise
            self._guard.note("pool", error)
            self.use_arrival_order()

    def _take(self, rid: str) -> TrackedRequest:
        tracked = self._all.remove(rid)
        self._rids.remove(rid)
        self._preempted.pop(rid, None)
        self.num_tokens -= tracked.num_queued_tokens
        return tracked

    @property
    def preempted(self) -> Iterable[TrackedRequest]:
        """Waiting requests that have output tokens already."""
        return self._preempted.values()

    def get(self, rid: str) -> TrackedRequest | None:
        return self._all.get(rid)

    def beginning_with(self, prefix: str) -> list[Any]:
        """Requests whose ids begin with `prefix`, in the order of arrival. O(log n + found)."""
        rids = itertools.takewhile(
            lambda rid: rid.startswith(prefix), self._rids.irange(minimum=prefix)
        )
        found = [tracked for rid in rids if (tracked := self.get(rid)) is not None]
        return [tracked.req for tracked in sorted(found, key=attrgetter("arrival_seq"))]

    def remove(self, req: Any) -> None:
        self.abort_rid(req.rid)

    def pop(self, index: int) -> Any:
        return self.abort_rid(self._all.at(index).rid).req

    def __getitem__(self, index: int) -> Any:
        return self._all.at(index).req

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        return map(attrgetter("req"), self._all)

    def __contains__(self, req: Any) -> bool:
        tracked = TrackedRequest.of(req)
        return tracked is not None and self.get(tracked.rid) is tracked


class WaitingSummary:
    """The same queue for load reports: its length, and one item with the total length.

    SGLang adds up the lengths of all waiting requests at every prefill; with 100,000 in the pool
    that alone takes longer than the iteration.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[port.WaitingTotal]:
        yield port.WaitingTotal(self._waiting.num_tokens)


def online_requests(queue: Iterable[Any]) -> list[Any]:
    """The online requests of a waiting queue, cosched's or SGLang's own list."""
    if isinstance(queue, WaitingQueue):
        return [tracked.req for tracked in queue.online]
    return [req for req in queue if class_of_priority(req.priority) is RequestClass.ONLINE]
