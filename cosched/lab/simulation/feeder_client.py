"""The service's own feeder as a client: batches in a store, of which lines are claimed in pages.

Store, claims and order are those of a server with batches (`cosched.batch`), in this thread and in
virtual time. Left out are what has no part in the order: HTTP, validation, and forecasts, so no
batch is late and no line has a deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosched.batch.batch_records import Finished, NewBatch, NewLine, Status
from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database
from cosched.batch.free_places import FreePlaces, Here
from cosched.batch.jsonl.prefix_order import CHUNK_BYTES, MAX_CHUNKS, text_key
from cosched.batch.store import BatchStore
from cosched.core.shares import Share, share_of, share_path
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.simulation.arrivals import VOCAB_SIZE, Arrival
from cosched.lab.simulation.clients import arrivals_of
from cosched_traces.workload import TraceRequest

_TOKEN_BYTES = 4
"""Of text, in the mean."""
_MAX_BYTES = 256 << 20
_ALIVE_S = 1e12
_WINDOW_S = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A batch: its lines in the order of the file, when it is submitted [s], and whose it is."""

    requests: Sequence[TraceRequest]
    start_s: float = 0.0
    tenant: str = ""


def jobs_of(requests: Sequence[TraceRequest], *, num_batches: int) -> list[Job]:
    """One batch of each tenant, or several that are dealt its lines in turn."""
    by_tenant: dict[str, list[TraceRequest]] = {}
    for request in requests:
        by_tenant.setdefault(request.tenant, []).append(request)
    return [
        Job(requests=mine[index::num_batches], tenant=tenant)
        for tenant, mine in by_tenant.items()
        for index in range(min(num_batches, len(mine)))
    ]


def prompt_key(request: TraceRequest) -> bytes:
    """The key that its prompt would have as text of four bytes a token."""
    ids = request.prompt(vocab_size=VOCAB_SIZE)[: CHUNK_BYTES * MAX_CHUNKS // _TOKEN_BYTES]
    return text_key(np.array(ids, dtype=np.int32).tobytes())


def submit(store: BatchStore, job: Job, *, server: str) -> str:
    """The name of the new batch. server: is a member of the store"""
    asked = NewBatch(
        owner="",
        tenant=job.tenant,
        endpoint="/v1/completions",
        input_file_id="",
        completion_window="30d",
        window_s=_WINDOW_S,
        metadata=None,
        output_expires_after_s=None,
    )
    name = store.create(asked).id
    store.begin_validation(name, server=server)
    lines = [
        NewLine(
            number=number,
            custom_id=request.rid,
            start=0,
            num_bytes=_TOKEN_BYTES * request.num_prompt_tokens,
            prefix_key=prompt_key(request),
        )
        for number, request in enumerate(job.requests)
    ]
    store.add_lines(name, lines, server=server)
    store.accept(name, server=server)
    return name


class FeederClient:
    """One server's feeder. A request arrives when it is sent."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        config: BatchesConfig,
        database: Database | None = None,
        server: str = "simulated",
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        """database: of several servers, of which this one has a name; None: its own"""
        self._num_servers = 1
        self._config = config
        self._vocab_size = vocab_size
        self._server = server
        self._now_s = 0.0
        self._store = BatchStore(database or Database("sqlite://"), clock=lambda: self._now_s)
        if database is None:
            self._store.join(server, lease_s=_ALIVE_S)
        self._claims = FreePlaces(self._store, config, self._share)
        self._jobs = sorted(jobs, key=lambda job: job.start_s)
        self._lines: dict[str, Sequence[TraceRequest]] = {}
        """Batch -> its lines."""
        self._in_flight: dict[str, tuple[str, int]] = {}
        """rid -> (batch, number of its line)"""
        self._finished: list[Finished] = []
        self._num_waiting = self._num_finished = 0
        self.num_running: Callable[[], int | None] = lambda: None
        """Offline requests that have begun, if the engine says it."""
        self.abort: Callable[[str], None] = lambda rid: None
        """A request, which then does not end."""

    def _share(self, owner: str, tenant: str) -> Share:
        return share_of(share_path(tenant), self._config.tenant_weights)

    def due(self, now_s: float) -> Iterator[Arrival]:
        self._now_s = now_s
        while self._jobs and self._jobs[0].start_s <= now_s:
            self._submit(self._jobs.pop(0))
        if self._num_waiting and self._claims.are_due(len(self._in_flight)):
            yield from self._refill()

    def next_s(self) -> float | None:
        return self._jobs[0].start_s if self._jobs else None

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        place = self._in_flight.pop(record.rid, None)
        if place is not None:
            batch, number = place
            self._finished.append(Finished(batch_id=batch, number=number, is_answer=True, data=b""))

    def _submit(self, job: Job) -> None:
        self._lines[submit(self._store, job, server=self._server)] = job.requests
        self._num_waiting += len(job.requests)

    def _flush(self) -> None:
        self._num_finished += self._store.finish(self._finished)
        self._finished.clear()

    def _here(self) -> Here:
        return Here(
            in_flight=Counter(batch for batch, _ in self._in_flight.values()),
            num_finished=self._num_finished,
            num_running=self.num_running(),
            num_servers=self._num_servers,
        )

    def _refill(self) -> Iterator[Arrival]:
        self._flush()
        found = [one for one in self._store.open() if one.status is Status.IN_PROGRESS]
        for claim in self._claims.next(found, self._here()):
            taken = self._store.take(claim, max_bytes=_MAX_BYTES, server=self._server)
            self._num_waiting -= len(taken)
            requests = [self._lines[name][line.number] for name, line in taken]
            for (name, line), request in zip(taken, requests, strict=True):
                self._in_flight[request.rid] = (name, line.number)
            for arrival in arrivals_of(requests, vocab_size=self._vocab_size):
                yield replace(
                    arrival,
                    arrival_s=self._now_s,
                    num_behind=self._num_waiting // self._num_servers,
                )
