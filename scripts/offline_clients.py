#!/usr/bin/env python
"""When a job is done, by how its lines are sent: a table for docs/results/batches.md.

    scripts/offline_clients.py --data-dir DIR [--jobs questions,short] [--clients all,feeder,...]

Virtual time, one A100 with Llama-3.1-8B beside chat. Clients: `all` has the whole set in the pool;
`feeder` is the server's own, with `feeder-2` and `feeder-4` the set is dealt to as many batches,
`late-2` has the second one submitted when half of the first is done, `few-2` deals it every tenth
line; `file-256` and `file-2048` are line by line clients in file order, `lines` is `cosched batch
--via lines`. Two servers: `pools` has a half of the documents in the pool of each, `shared` is two
feeders on one store (a file, which their processes use at the same virtual time), `shared-2` with
two batches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import cosched.bootstrap  # noqa: F401  # isort: skip
from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database
from cosched.core.request import RequestClass
from cosched.lab.simulation import run
from cosched.lab.simulation.feeder_client import FeederClient, Job, jobs_of, prompt_key
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.versions import versions
from cosched_traces.catalogue import load_workload
from cosched_traces.lengths import Uniform
from cosched_traces.offline_sets import PrefixGroups

JOBS = {
    "questions": "1,600 questions on 160 documents",
    "short": "8,000 short prompts with 57 heads",
    "documents": "400 documents of arXiv length",
}
ONE = ("all", "feeder", "feeder-2", "feeder-4", "late-2", "few-2", "file-256", "file-2048", "lines")
TWO = ("pools", "shared", "shared-2")
_STEP_S = 1.0


class SharedFile(Database):
    """SQLite as a store of several servers: one of them writes at a time, in virtual time."""

    def __init__(self, url):
        super().__init__(url)
        self.is_shared = True

    def keep_others_from_quotas(self, connection):
        pass


class SharedFeeder(FeederClient):
    """Looks at the store in the order of virtual time. clocks: of all servers [s]"""

    def __init__(self, jobs, clocks, index, **options):
        super().__init__(jobs, **options)
        self._clocks, self._index, self._look_s = clocks, index, 0.0

    def due(self, now_s):
        self._clocks[self._index] = now_s
        self._now_s = now_s
        while self._jobs and self._jobs[0].start_s <= now_s:
            self._submit(self._jobs.pop(0))
        if now_s < self._look_s or not self._claims.are_due(len(self._in_flight)):
            return
        while min(self._clocks) < now_s:
            time.sleep(0.002)
        sent = list(self._refill())
        self._look_s = now_s if sent else now_s + _STEP_S
        yield from sent

    def known(self, lines):
        """Batches that the other server has submitted."""
        self._lines = lines


def requests_of(job, seed):
    if job == "questions":
        groups = PrefixGroups(
            num_groups=160,
            requests_per_group=10,
            shared=Uniform(6000, 14_000),
            unique=Uniform(30, 60),
            output=Uniform(50, 150),
        )
        found = groups.workload(job, seed=seed, num_requests=1600)
        limit = 150
    else:
        name, number = {"short": ("mmlu-like", 8000), "documents": ("arxiv", 400)}[job]
        return list(
            load_workload(
                name,
                seed=seed,
                request_class=RequestClass.OFFLINE,
                data_dir=DATA,
                num_requests=number,
            ).requests
        )
    return [replace(request, max_new_tokens=limit) for request in found.requests]


def spec_of(arguments, client):
    kind = {"all": "all", "lines": "lines", "pools": "all"}.get(client, "feeder")
    offline = WorkloadSpec(
        name="job",
        client=kind,
        num_batches=int(client[-1]) if client.startswith("feeder-") else 1,
        refill=int(client[5:]) if client.startswith("file-") else None,
    )
    return RunSpec(
        setting=setting_of(arguments.policy),
        online=WorkloadSpec(name="azure-like", rate=2.5),
        offline=offline,
        cost=CostSpec(name="kernel-table"),
        duration_s=arguments.duration,
        seed=arguments.seed,
        data_dir=str(arguments.data_dir),
    )


def measured(spec, offline, client=None):
    """What a run says; `client` replaces that of the spec."""
    if client is not None:
        run.offline_client = lambda *_: client
    online, _ = run.load_requests(replace(spec, offline=None))
    result = run.execute_requests(spec, online, offline)
    ends = [r.finish_s for r in result.records if r.request_class is RequestClass.OFFLINE]
    summary = result.summary
    return {
        "done_s": max(end for end in ends if end is not None),
        "finished": sum(end is not None for end in ends),
        "met": summary.online.attainment.joint.ratio,
        "hit": summary.offline.hit_ratio,
    }


def dealt(client, offline):
    """The batches of a client that is not named by its spec."""
    if client == "few-2":
        few = offline[::10]
        rest = [request for index, request in enumerate(offline) if index % 10]
        return [Job(requests=rest), Job(requests=few)]
    first, second = jobs_of(offline, num_batches=2)
    return [first, replace(second, start_s=100.0)]


def one(arguments, job, client):
    offline = requests_of(job, arguments.seed)
    own = None
    if client in ("late-2", "few-2"):
        own = FeederClient(dealt(client, offline), config=BatchesConfig())
    return measured(spec_of(arguments, client), offline, own)


def of_two(arguments, job, client, index, clocks, url):
    """One of two servers. The chats of the second are of another seed."""
    offline = requests_of(job, arguments.seed)
    spec = spec_of(arguments, client)
    if client == "pools":
        half = sorted(offline, key=prompt_key)
        middle = len(half) // 2
        chosen = {request.rid for request in (half[middle:] if index else half[:middle])}
        offline, own = [request for request in offline if request.rid in chosen], None
    else:
        jobs = jobs_of(offline, num_batches=2 if client.endswith("-2") else 1)
        own = SharedFeeder(
            [] if index else jobs,
            clocks,
            index,
            config=BatchesConfig(),
            database=SharedFile(url),
            server=f"server-{index}",
            num_servers=2,
        )
        if index:
            while not own._store.open() or any(
                b.status != "in_progress" for b in own._store.open()
            ):
                clocks[1] = 0.0
                time.sleep(0.1)
            own.known({b.id: j.requests for b, j in zip(own._store.open(), jobs, strict=True)})
    try:
        return measured(replace(spec, seed=arguments.seed + index), offline, own)
    finally:
        clocks[index] = 1e12


def _child(send, function, *given):
    send.send(function(*given))


def in_children(calls):
    """The results of calls, each in a process of its own: SGLang has process-wide state."""
    context = multiprocessing.get_context("fork")
    children = []
    for function, *given in calls:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(send, function, *given))
        process.start()
        send.close()
        children.append((process, receive))
    found = [receive.recv() for _, receive in children]
    for process, _ in children:
        process.join()
    return found


def row(arguments, job, client):
    if client in ONE:
        [found] = in_children([(one, arguments, job, client)])
        return found
    with tempfile.TemporaryDirectory() as folder:
        clocks = multiprocessing.get_context("fork").Array("d", 2, lock=False)
        url = f"sqlite:///{folder}/batches.sqlite"
        calls = [(of_two, arguments, job, client, index, clocks, url) for index in (0, 1)]
        both = in_children(calls)
    return {
        "done_s": max(one["done_s"] for one in both),
        "finished": sum(one["finished"] for one in both),
        "met": min(one["met"] for one in both),
        "hit": sum(one["hit"] for one in both) / 2,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--clients", default=",".join((*ONE, *TWO)))
    parser.add_argument("--policy", default="cosched")
    parser.add_argument("--duration", type=float, default=2000.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    global DATA
    DATA = arguments.data_dir
    rows = []
    for job in arguments.jobs.split(","):
        for client in arguments.clients.split(","):
            found = {"job": job, "client": client, **row(arguments, job, client)}
            rows.append(found)
            print(
                f"{job:10} {client:10} done {found['done_s']:7.1f} s  lines {found['finished']}  "
                f"met {found['met']:.3f}  hit {found['hit']:.3f}",
                flush=True,
            )
    print(
        json.dumps(
            {"program": "offline_clients", "seed": arguments.seed, **versions(), "rows": rows}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
