"""How many lines of which batches a server takes next.

Free places go by `shares`: to keys and tenants by their weights, then to late batches, and equally
to the others. What the batches of a tenant get together they take document by document
(`cosched.batch.documents`), so one with few lines on a document gets fewer places than its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from cosched.batch.batch_records import Batch, Status
from cosched.batch.config import BatchesConfig
from cosched.batch.documents import Claim, Part
from cosched.batch.forecast import Demand, shares
from cosched.batch.store import BatchStore
from cosched.core.shares import Share

_BEGUN_S = 3.0
"""In which a server takes no more than its part of a batch: the others look once in a step."""
_MAX_AHEAD = 512
_MOST_TOGETHER = 16
"""Batches of a tenant in a claim: each costs it a few queries."""
_HALF_LIFE, _PRIOR = 1024.0, 32.0
"""Finished lines of all servers, by which the speed of one is known."""
_PER_RUNNING = 1.25
"""Lines at a server for each that it runs, so that it can choose and none of its slots is free."""
_SPARE = 4
"""Lines that a server may have beyond its part of the last ones."""
_LEAST_PAGE, _PAGES_LEFT = 8, 2
"""Least lines that a server takes at a time near the end, and pages in which it takes its part."""
_LEAST_SURPLUS = 0.25
"""A server gives lines back only where they are so many of its own: speeds are uncertain."""
_SHARES_AHEAD = 4
"""On a shared store a server sets aside a quarter of its part of the rest: all end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The lines at the scheduler of one server.

    in_flight     batch -> their number
    num_finished  lines that have a result, since the start of the server
    num_running   requests that have begun, of lines and others; None: not known
    num_servers   live servers that share the store
    late          batches that go before others of their tenant
    """

    in_flight: Mapping[str, int]
    num_finished: int = 0
    num_running: int | None = None
    num_servers: int = 1
    late: Container[str] = ()

    @property
    def num(self) -> int:
        return sum(self.in_flight.values())


class FreePlaces:
    """Of one server. Reads the store only; `next` is for one thread at a time."""

    def __init__(
        self, store: BatchStore, config: BatchesConfig, share: Callable[[str, str], Share]
    ) -> None:
        """share: owner and tenant of a batch -> its share"""
        self._store = store
        self._config = config
        self._share = share
        self._speed = _Speed()
        self._most = config.high_watermark
        self._page = config.high_watermark - config.low_watermark

    def are_due(
        self, num_in_flight: int, found: Sequence[Batch] = (), in_flight: Mapping[str, int] = {}
    ) -> bool:
        """Whether so few lines are at the scheduler that more are taken: a page at a time. With
        `found` (as for `next`) and batch -> lines at the scheduler: also where an owner has none
        there and a place is free."""
        if num_in_flight <= max(self._most - self._page, self._config.low_watermark):
            return True
        return num_in_flight < self._most and _waits_for_first(found, in_flight)

    def next(self, found: Sequence[Batch], here: Here) -> list[Claim]:
        """found: batches in progress, oldest first"""
        taken = self._store.num_taken()
        demands = [self._demand(batch, here, taken.get(batch.id, 0)) for batch in found]
        self._divide(found, here, num_taken=sum(taken.values()))
        num_free = self._most - here.num
        if num_free < min(self._page, self._most) and not _waits_for_first(found, here.in_flight):
            num_free = 0
        limits = shares(demands, num_free=max(num_free, 0))
        num_left = {batch.id: batch.num_left for batch in found}
        tenants: dict[tuple[str, ...], list[Demand]] = {}
        for one in sorted(demands, key=lambda it: math.inf if it.due is None else it.due):
            if limits.get(one.batch_id) or here.in_flight.get(one.batch_id):
                tenants.setdefault(one.share.path, []).append(one)
        claims = []
        for mine in tenants.values():
            for start in range(0, len(mine), _MOST_TOGETHER):
                some = mine[start : start + _MOST_TOGETHER]
                limit = sum(limits.get(one.batch_id, 0) for one in some)
                left = sum(num_left[one.batch_id] for one in some)
                if limit:
                    parts = tuple(_part(one, here) for one in some)
                    num_ahead = _num_ahead(left, here.num_servers)
                    claims.append(Claim(parts=parts, limit=limit, num_ahead=num_ahead))
        return claims

    def surplus(self, found: Sequence[Batch], here: Here) -> int:
        """How many lines this server gives back, where it has more than its part, more than it
        runs, and no server finds any in the store: another one has joined, or is faster."""
        num_taken = sum(self._store.num_taken().values())
        num_left = sum(batch.num_left for batch in found)
        if here.num_running is None or num_left - num_taken > 0:
            return 0
        self._divide(found, here, num_taken=num_taken)
        excess = here.num - self._part(found, here)
        least = max(_LEAST_PAGE, _LEAST_SURPLUS * here.num)
        return min(math.floor(excess), here.num - here.num_running) if excess >= least else 0

    def _part(self, found: Sequence[Batch], here: Here) -> int:
        """Of the lines without a result, by the speed of this server."""
        num_left = sum(batch.num_left for batch in found)
        return math.ceil(num_left * self._speed.part(here.num_servers))

    def _divide(self, found: Sequence[Batch], here: Here, *, num_taken: int) -> None:
        """How many lines this server may have, and how many it takes at a time.

        Where servers share the last lines, each has as many as it can answer until the others are
        done too, and takes few at a time: all end together.
        """
        self._speed.look(found, here)
        config = self._config
        self._most = config.high_watermark
        self._page = config.high_watermark - config.low_watermark
        if here.num_servers > 1:
            num_left = sum(batch.num_left for batch in found)
            part = self._part(found, here)
            if here.num_running is not None and here.num_running < here.num:
                # Of the others some wait in the store, where any server finds them.
                needed = math.ceil(_PER_RUNNING * here.num_running)
                part = max(part // _PAGES_LEFT, min(needed, part))
            self._most = min(part + _SPARE, self._most)
            page = (num_left - num_taken) // (_PAGES_LEFT * here.num_servers)
            self._page = min(max(page, _LEAST_PAGE), self._page)

    def _demand(self, batch: Batch, here: Here, num_taken: int) -> Demand:
        num_here = here.in_flight.get(batch.id, 0)
        num_in_flight = max(num_here, num_taken)
        num_waiting = batch.num_left - num_in_flight
        if self._store.now() - batch.times[Status.IN_PROGRESS] < _BEGUN_S:
            part = math.ceil(batch.num_left / here.num_servers)
            num_waiting = min(num_waiting, part - num_here)
        return Demand(
            batch_id=batch.id,
            share=self._share(batch.owner, batch.tenant),
            num_in_flight=num_in_flight,
            num_waiting=num_waiting,
            due=batch.expires_at if batch.id in here.late else None,
        )


def _waits_for_first(found: Sequence[Batch], in_flight: Mapping[str, int]) -> bool:
    """Whether an owner has batches and no line at the scheduler, where others have some: it does
    not wait until a page of their lines has ended."""
    served = {batch.owner for batch in found if in_flight.get(batch.id)}
    return bool(served) and any(batch.owner not in served and batch.num_left for batch in found)


class _Speed:
    """Which part of the latest lines of all servers this one has finished."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}
        """Batch in progress -> its lines with a result."""
        self._num_here = 0
        self._num_servers = 1
        self._here = self._all = 0.0
        """Finished lines, of which earlier ones weigh less."""

    def look(self, found: Sequence[Batch], at: Here) -> None:
        num_here = at.num_finished
        if at.num_servers != self._num_servers:  # what was measured is no part of the new ones
            self._num_servers = at.num_servers
            self._here = self._all = 0.0
        done = {batch.id: batch.total - batch.num_left for batch in found}
        more = sum(max(num - self._done.get(name, num), 0) for name, num in done.items())
        here, self._num_here, self._done = num_here - self._num_here, num_here, done
        kept = 0.5 ** (max(more, here) / _HALF_LIFE)
        self._here = self._here * kept + here
        self._all = self._all * kept + max(more, here)

    def part(self, num_servers: int) -> float:
        """Until it is known, all are as fast."""
        return (self._here + _PRIOR / num_servers) / (self._all + _PRIOR)


def _part(demand: Demand, here: Here) -> Part:
    return Part(
        batch_id=demand.batch_id,
        most=max(demand.num_waiting, 0),
        num_here=here.in_flight.get(demand.batch_id, 0),
        due=math.inf if demand.due is None else demand.due,
    )


def _num_ahead(num_left: int, num_servers: int) -> int:
    """Lines of a batch that one server sets aside."""
    return 0 if num_servers < 2 else min(num_left // (_SHARES_AHEAD * num_servers), _MAX_AHEAD)
