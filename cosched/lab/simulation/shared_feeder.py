"""Feeders of several servers on one store, each in a process of its own, in one virtual time."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from cosched.batch.batch_records import Status
from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database
from cosched.batch.store import BatchStore
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.simulation.arrivals import VOCAB_SIZE, Arrival
from cosched.lab.simulation.feeder_client import FeederClient, Job, submit
from cosched.lab.simulation.fleet_spec import Life

_STEP_S = 1.0
"""A feeder looks at the store at least so often, which is its heartbeat."""
_ASK_S = 0.0005
_SENT = "#"
_SUBMITTER, _SUBMITS_S = "submitter", 1.0


class SharedFile(Database):
    """SQLite as a store of several servers. `FleetTime.alone` keeps them from each other."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_shared = True

    def keep_others_from_quotas(self, connection: sa.Connection) -> None:
        pass


class FleetTime:
    """Virtual times of processes, by their index: one does something at the store when all others
    have come to its time."""

    def __init__(self, starts_s: Sequence[float]) -> None:
        context = multiprocessing.get_context("fork")
        self._clocks = context.Array("d", list(starts_s), lock=False)
        self._lock: AbstractContextManager[Any] = context.Lock()

    def is_now(self, index: int, now_s: float) -> None:
        self._clocks[index] = now_s

    def least_s(self) -> float:
        return float(min(self._clocks))

    def alone(self, now_s: float) -> AbstractContextManager[Any]:
        """Waits for the others. For a `with`."""
        while self.least_s() < now_s:
            time.sleep(_ASK_S)
        return self._lock


def first_rid(rid: str) -> str:
    """The name of a request when it was sent first."""
    return rid.partition(_SENT)[0]


def submitted(
    url: str, jobs: Sequence[Job], *, servers: Sequence[str], lease_s: float
) -> dict[str, Job]:
    """New batches in a new store, by their names. servers: that have joined before"""
    with closing(SharedFile(url)) as database:
        store = BatchStore(database, clock=lambda: 0.0)
        for name in servers:
            store.join(name, lease_s=lease_s)
        store.join(_SUBMITTER, lease_s=_SUBMITS_S)
        batches = {submit(store, job, server=_SUBMITTER): job for job in jobs}
        store.leave(_SUBMITTER)
    return batches


class SharedFeeder(FeederClient):
    """One server's feeder, from the start of its life to its end.

    is_done  all lines of the store have results
    """

    def __init__(
        self,
        url: str,
        batches: Mapping[str, Job],
        *,
        life: Life,
        index: int,
        times: FleetTime,
        config: BatchesConfig,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        """batches: all of the store. index: of this process in `times`"""
        super().__init__(
            (), config=config, database=SharedFile(url), server=life.name, vocab_size=vocab_size
        )
        self._lines = {name: job.requests for name, job in batches.items()}
        self._life = life
        self._index = index
        self._times = times
        self._look_s = life.start_s
        self._found_more = self._is_member = False
        self._given: Counter[str] = Counter()
        """Requests that were given back, as often."""
        self.is_done = False

    def due(self, now_s: float) -> Iterator[Arrival]:
        self._times.is_now(self._index, now_s)
        self._now_s = now_s
        if self.is_done or now_s < self._life.start_s:
            return
        if now_s >= self._life.closed_s:
            self._leave()
            return
        is_free = self._claims.are_due(len(self._in_flight))
        if now_s < self._look_s and not (is_free and self._found_more):
            return
        with self._times.alone(now_s):
            self._beat()
            self._flush()
            found = [one for one in self._store.open() if one.status is Status.IN_PROGRESS]
            self.is_done = not found
            num_taken = sum(self._store.num_taken().values())
            self._num_waiting = sum(batch.num_left for batch in found) - num_taken
            sent = list(map(self._named, self._refill())) if is_free and found else []
            if not sent and self._num_servers > 1:
                self._give_back(self._claims.surplus(found, self._here()))
        self._look_s = now_s + _STEP_S
        self._found_more = bool(sent)
        yield from sent

    def next_s(self) -> float | None:
        if self.is_done or self._now_s >= self._life.closed_s:
            return None
        return min(self._look_s, self._life.closed_s)

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        if self._now_s < self._life.closed_s:
            super().on_finish(record, output_ids)

    def _beat(self) -> None:
        lease_s = self._config.lease_s
        self._is_member = True
        self._num_servers = self._store.beat(self._server, lease_s=lease_s)
        if self._num_servers == 0:
            self._store.join(self._server, lease_s=lease_s)
            self._num_servers = self._store.beat(self._server, lease_s=lease_s)

    def _named(self, arrival: Arrival) -> Arrival:
        """With a name of its own: an earlier request for the same line may still end, and SGLang
        aborts all whose names begin like the one that it is told."""
        named = replace(arrival, rid=f"{arrival.rid}{_SENT}{self._given[arrival.rid]}{_SENT}")
        self._in_flight[named.rid] = self._in_flight.pop(arrival.rid)
        return named

    def _give_back(self, num: int) -> None:
        """The lines that were sent last."""
        for rid in list(self._in_flight)[len(self._in_flight) - num :]:
            name, number = self._in_flight.pop(rid)
            self.abort(rid)
            self._given[first_rid(rid)] += 1
            self._store.release(name, server=self._server, numbers=[number])

    def _leave(self) -> None:
        if self._is_member:
            self._is_member = False
            with self._times.alone(self._now_s):
                self._flush()
                self._store.leave(self._server)
