"""A run of several replicas on one store of batches, each forked into a process of its own.

Each has SGLang's scheduler, a KV pool and a clock of its own. The clocks meet where a feeder reads
the store, so what replicas know of each other they know in the order of virtual time. Lines of a
killed replica are computed again when its lease has ended; its chats count as unanswered.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database
from cosched.errors import ConfigError, CoschedError
from cosched.lab.metrics.records import ColumnLog, IterationLog, RequestRecord
from cosched.lab.simulation.feeder_client import Job, jobs_of
from cosched.lab.simulation.fleet_spec import FleetSpec, Life, dispatched
from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run import (
    RunResult,
    execute,
    execute_requests,
    summarize_run,
    work_of,
)
from cosched.lab.simulation.run_spec import RunSpec, offline_client_of
from cosched.lab.simulation.setting import OfflineClient
from cosched.lab.simulation.shared_feeder import FleetTime, SharedFeeder, first_rid, submitted
from cosched_traces.workload import TraceRequest

_LOOK_S = 0.5
_READ_BYTES = 1 << 20


def execute_replicas(
    spec: RunSpec,
    *,
    on_progress: Callable[[float], None] | None = None,
    decision_log: Path | None = None,
) -> RunResult:
    """The result of all replicas of a specification, of which most have one: as `execute`."""
    if spec.fleet.replicas == 1 and not spec.fleet.absent:
        return execute(spec, on_progress=on_progress, decision_log=decision_log)
    if decision_log is not None:
        raise ConfigError("--decision-log is for one replica")
    return execute_fleet(spec, *load_requests(spec), on_progress=on_progress)


def execute_fleet(
    spec: RunSpec,
    online: Sequence[TraceRequest],
    offline: Sequence[TraceRequest],
    *,
    jobs: Sequence[Job] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> RunResult:
    """The same with these requests. jobs: of the offline ones, in place of the specification's.
    ConfigError where the specification has what a fleet has not."""
    lives = [life for life in spec.fleet.lives() if life.start_s < spec.end_s]
    _check(spec, online, offline)
    chats = dispatched(online, lives)
    times = FleetTime([life.start_s for life in lives])
    config = msgspec.convert(dict(spec.config).get("batches", {}), BatchesConfig)
    with tempfile.TemporaryDirectory(prefix="cosched-fleet-") as folder:
        url = f"sqlite:///{folder}/batches.sqlite"
        Database(url).close()  # makes its tables
        if jobs is None:
            jobs = jobs_of(offline, num_batches=spec.offline.num_batches if spec.offline else 1)
        first = [life.name for life in lives if life.start_s == 0]
        batches = submitted(url, jobs, servers=first, lease_s=config.lease_s)

        def live(index: int) -> RunResult:
            life = lives[index]
            own = replace(
                spec, fleet=FleetSpec(), duration_s=min(spec.end_s, life.end_s), offline=None
            )
            try:
                if not batches:
                    return execute_requests(own, chats[life.name], ())
                feeder = SharedFeeder(
                    url, batches, life=life, index=index, times=times, config=config
                )
                return execute_requests(
                    own, chats[life.name], (), client=feeder, is_done=lambda: feeder.is_done
                )
            finally:
                times.is_now(index, math.inf)

        def look() -> None:
            if on_progress is not None:
                on_progress(min(times.least_s(), spec.end_s))

        results = _in_forks(len(lives), live, look)
    return _merged(spec, offline, lives, results)


def _check(spec: RunSpec, online: Sequence[TraceRequest], offline: Sequence[TraceRequest]) -> None:
    if spec.machine.dp_ranks > 1:
        raise ConfigError("--replicas and --dp-ranks exclude each other")
    if spec.fleet.absent and any(request.after is not None for request in online):
        raise ConfigError("--absent: sessions cannot go to another replica")
    if not offline:
        return
    is_fed = offline_client_of(spec) is OfflineClient.FEEDER
    if not is_fed or any(request.arrival_s for request in offline):
        raise ConfigError("--replicas needs one job and a policy with batches, such as cosched")


def _merged(
    spec: RunSpec,
    offline: Sequence[TraceRequest],
    lives: Sequence[Life],
    results: Sequence[RunResult],
) -> RunResult:
    """One result. Of a line that two replicas had the one that was answered first counts."""
    records: dict[str, RequestRecord] = {}
    for result in results:
        for record in result.records:
            rid = first_rid(record.rid)
            known = records.get(rid)
            if known is None or _end_of(record) < _end_of(known):
                records[rid] = replace(record, rid=rid)
    iterations = IterationLog()
    columns = [np.concatenate([r.iterations.column(n) for r in results]) for n in iterations.names]
    iterations.extend(columns)
    end_s = max(result.end_s for result in results)
    saturations = [result.saturation for result in results if result.saturation is not None]
    return RunResult(
        spec=spec,
        summary=summarize_run(
            spec, list(records.values()), iterations, end_s=end_s, work=work_of(spec, offline)
        ),
        records=list(records.values()),
        iterations=iterations,
        kv=ColumnLog(results[0].kv.names),
        end_s=end_s,
        wall_s=max(result.wall_s for result in results),
        cost_model=results[0].cost_model,
        cosched=None,
        saturation=round(fmean(saturations), 4) if saturations else None,
        gave_up=any(result.gave_up for result in results),
    )


def _end_of(record: RequestRecord) -> float:
    return math.inf if record.finish_s is None else record.finish_s


def _in_forks(
    number: int, make: Callable[[int], RunResult], look: Callable[[], None]
) -> list[RunResult]:
    """make: in a fork for each index. look: is called now and then. Raises the first error."""
    children: dict[int, tuple[int, int]] = {}
    received: dict[int, bytearray] = {index: bytearray() for index in range(number)}
    try:
        for index in range(number):
            listens, tells = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(listens)
                _tell(tells, partial(make, index))
            os.close(tells)
            children[listens] = index, pid
        for index, data in _read(dict(children), look):
            received[index] += data
            if not data:
                result = pickle.loads(bytes(received[index])) if received[index] else None
                if not isinstance(result, RunResult):
                    raise result or CoschedError("the process of a replica has died")
        return [pickle.loads(bytes(data)) for data in received.values()]
    finally:
        for listens, (_, pid) in children.items():
            os.close(listens)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _read(
    open_ones: dict[int, tuple[int, int]], look: Callable[[], None]
) -> Iterator[tuple[int, bytes]]:
    """(index, what a child said); empty at its end."""
    while open_ones:
        look()
        for listens in select.select(list(open_ones), [], [], _LOOK_S)[0]:
            data = os.read(listens, _READ_BYTES)
            yield open_ones[listens][0], data
            if not data:
                del open_ones[listens]


def _tell(tells: int, make: Callable[[], RunResult]) -> None:
    """In a child, which ends here."""
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    try:
        try:
            said: RunResult | Exception = make()
        except Exception as error:
            said = error
        with open(tells, "wb") as pipe:
            pickle.dump(said, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)
