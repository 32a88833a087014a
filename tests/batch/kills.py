"""kill -9 of a server in the middle of its batches, again and again.

    scripts/kill_batches [--kills 100] [--seed 1] [--server | --replicas 2] [--lease 2]
        [--files URL]

While batches are uploaded, created, validated, fed or ended, the server is killed at random moments
and restarted. No finished line may be lost or sent again, and in the end every line has one result.
By default the engine is a stand-in, so that a start takes no time; ``--server`` takes a
real server with the tiny model. With ``--replicas`` servers share a store in a PostgreSQL of the
test's own; each time one of them is killed, and the others take its lines. One that lives,
but was so slow that the others found it dead, may answer a line that another one has taken: these
count as computed twice. With ``--files`` uploads and results are kept where fsspec finds that URL.
Prints one JSON object, and ends with 1 when something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
import sqlalchemy as sa
import uvicorn

from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database, batches, files, results
from cosched.batch.jsonl.lines import INVALID_VALUE
from cosched.batch.jsonl.server import free_port
from cosched.batch.storage import UrlStorage, folder_of
from cosched.config import ENV_VAR
from cosched.lab.demo_model import ensure_demo_model
from tests.batch import postgres
from tests.batch.api import Api, line
from tests.batch.stand_in import StandIn
from tests.forks import Forks
from tests.serving import ServerError, start_server

LINES_PER_BATCH = 400
LONGEST_LIFE_S = 2.0
LEASE_S = 2.0


class StandInServer:
    """Forks of this process; each notes what it is asked in a file."""

    max_life_s = LONGEST_LIFE_S

    def __init__(self, root, *, place=None, number=0, database_url=None, lease_s=LEASE_S):
        place = place or str(root / "batches")
        self.config = BatchesConfig(folder=place, url=database_url, lease_s=lease_s)
        self.asked = root / f"asked-{number}"
        self.asked.touch()
        self.slow = root / f"slow-{number}"
        self.slow.touch()
        self.num_read = 0
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        self.process = multiprocessing.get_context("fork").Process(target=self.run)
        self.process.start()

    def run(self):
        stand_in = StandIn(self.config, delay_s=0.05)
        stand_in.note = os.open(self.asked, os.O_WRONLY | os.O_APPEND)
        self.note_lost_leases(stand_in.service.store)
        uvicorn.run(stand_in.app, port=self.port, log_level="error")

    def note_lost_leases(self, store):
        beat = store.beat

        def noted(*args, **more):
            living = beat(*args, **more)
            if not living:
                with self.slow.open("a") as file:
                    file.write("x")
            return living

        store.beat = noted

    def num_slow(self):
        """How often it was taken for dead, and found it out."""
        return self.slow.stat().st_size

    def kill(self):
        self.process.kill()
        self.process.join()

    def asked_for(self):
        """Since the last time."""
        asked = self.asked.read_text().split()
        new, self.num_read = asked[self.num_read :], len(asked)
        return new

    def close(self):
        self.kill()


class RealServer:
    """The tiny model; all of its processes are killed."""

    max_life_s = 4 * LONGEST_LIFE_S

    def __init__(self, folder, forks):
        self.folder = folder
        self.config = BatchesConfig(folder=str(folder))
        self.model = ensure_demo_model(size="tiny", dtype="float32")
        self.forks = forks
        self.stack = contextlib.ExitStack()
        self.url = ""

    def start(self):
        flags = ("--cosched-policy", "sarathi", "--cosched-batches", str(self.folder))
        server = self.stack.enter_context(start_server(self.model, *flags, forks=self.forks))
        self.url, self.process = server.url, server.process

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.stack.close()

    def asked_for(self):
        return []

    def num_slow(self):
        return 0

    def close(self):
        self.stack.close()


def wait_ready(server):
    deadline_s = time.monotonic() + 240
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/v1/batches", timeout=5).status_code == 200:
                return
        assert time.monotonic() < deadline_s, "the server does not start"
        time.sleep(0.01)


def finished(config):
    """(Batch, line) of each result that is in the store after a kill."""
    url = config.url or f"sqlite:///{config.folder}/batches.sqlite"
    with contextlib.closing(Database(url)) as database, database.read() as connection:
        query = sa.select(batches.c.id, results.c.number)
        found = connection.execute(query.join(results, results.c.batch == batches.c.seq))
        seen = {tuple(row) for row in found}
        if folder_of(config.folder) is None:
            storage = UrlStorage(config.folder)
            listed = sa.select(files.c.id, files.c.batch_id).where(files.c.batch_id.is_not(None))
            for name, batch in connection.execute(listed).all():
                records = map(json.loads, b"".join(storage.read(name)).splitlines())
                seen |= {(batch, int(record["id"][-8:], 16)) for record in records}
        return seen


def content(name):
    """Good lines, and some that the server refuses."""
    made = []
    for number in range(LINES_PER_BATCH):
        custom_id = f"{name}-{number}"
        entry = line(custom_id, "refuse" if number % 50 == 9 else custom_id)
        if number % 50 == 9:
            entry["body"]["max_tokens"] = -1
        made.append(entry)
    return made


def run(servers, *, kills, seed):
    """What was seen; AssertionError when something is wrong."""
    rng = random.Random(seed)
    created, done, at_kills, num_cut, num_asked, num_twice = {}, set(), [], 0, 0, 0
    slow = [0, 0]  # how often before the last kill, and the one before it
    for server in servers:
        server.start()
    # On a slow machine all of them may come before the first line is finished.
    while len(at_kills) < kills or not (any(at_kills) or len(at_kills) >= 4 * kills):
        for server in servers:
            wait_ready(server)
        server = rng.choice(servers)
        api = Api(server.url)
        ends_s = time.monotonic() + rng.uniform(0, server.max_life_s)
        open_lines = len(created) * LINES_PER_BATCH - len(done)
        if open_lines < LINES_PER_BATCH:
            # Some kills come while the file is on its way, or before the batch is answered for.
            name = f"b{len(at_kills)}"
            timer = multiprocessing.get_context("fork").Process(
                target=kill_at, args=(server.process.pid, ends_s, isinstance(server, RealServer))
            )
            timer.start()
            try:
                batch = api.create(content(name))
                created[batch.id] = name
            except (openai.APIConnectionError, openai.APIStatusError):
                num_cut += 1
            timer.join()
        time.sleep(max(0.0, ends_s - time.monotonic()))
        server.kill()
        now = finished(server.config)
        assert done <= now, f"lost: {sorted(done - now)[:3]}"
        asked = [one for each in servers for one in each.asked_for()]
        again = {f"{created.get(b)}-{n - 1}" for b, n in done} & set(asked)
        assert not again or is_slow(servers, since=slow[0]), (
            f"sent again although finished: {sorted(again)[:3]}"
        )
        num_twice += len(again)
        slow = [slow[1], sum(each.num_slow() for each in servers)]
        num_asked += len(asked)
        at_kills.append(len(now - done))
        done = now
        server.start()
    for server in servers:
        wait_ready(server)
    api = Api(rng.choice(servers).url)
    num_lines = 0
    # Also batches whose client never got the answer.
    for batch in api.batches.list(limit=100):
        ended = api.wait(batch, timeout_s=300)
        assert ended.status == "completed", ended
        counts = ended.request_counts
        assert (counts.total, counts.failed) == (LINES_PER_BATCH, LINES_PER_BATCH // 50), ended
        outcome = api.outcome(ended)  # AssertionError where a line has two results
        assert len(outcome) == LINES_PER_BATCH
        refused = ("http_400", INVALID_VALUE)  # by the stand-in, and by the bounds of a server
        assert sum(code in refused for code in outcome.values()) == counts.failed
        num_lines += len(outcome)
        created.pop(batch.id, None)
    assert not created, f"batches that were answered for are gone: {created}"
    num_asked += sum(len(server.asked_for()) for server in servers)
    return {
        "kills": len(at_kills),
        "replicas": len(servers),
        "in_mid_batch": sum(map(bool, at_kills)),
        "while_created": num_cut,
        "lines": num_lines,
        "answers_lost_by_kills": max(num_asked - num_lines, 0),
        "taken_for_dead": slow[1],
        "computed_twice": num_twice,
        "lost": 0,
        "repeated": 0,
    }


def is_slow(servers, *, since):
    """Whether one that lives was taken for dead, as it finds out when it is awake again."""
    deadline_s = time.monotonic() + 5 * servers[0].config.lease_s
    while sum(server.num_slow() for server in servers) <= since:
        if len(servers) == 1 or time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def kill_at(pid, at_s, is_group):
    time.sleep(max(0.0, at_s - time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if is_group else os.kill)(pid, signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--server", action="store_true", help="a real one, with the tiny model")
    either.add_argument("--replicas", type=int, default=1, help="servers with one PostgreSQL store")
    parser.add_argument("--lease", type=float, default=LEASE_S, metavar="S", help="of replicas")
    parser.add_argument("--files", metavar="URL", help="where nothing is yet, for fsspec")
    arguments = parser.parse_args()
    if arguments.server and arguments.files:
        parser.error("--files is for the stand-in")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cosched-kills-")))
        if arguments.server:
            forks = Forks(root, cleared=(ENV_VAR, "SGLANG_PLUGINS"))
            stack.callback(forks.close)
            servers = [RealServer(root / "batches", forks)]
        else:
            url = f"sqlite:///{root}/batches.sqlite" if arguments.files else None
            if arguments.replicas > 1:
                url = stack.enter_context(postgres.cluster()).url
            common = {"place": arguments.files, "database_url": url, "lease_s": arguments.lease}
            servers = [StandInServer(root, number=n, **common) for n in range(arguments.replicas)]
        for server in servers:
            stack.callback(server.close)
        try:
            seen = run(servers, kills=arguments.kills, seed=arguments.seed)
        except (AssertionError, ServerError) as error:
            print(json.dumps({"seed": arguments.seed, "wrong": str(error)}))
            return 1
    print(json.dumps({"seed": arguments.seed, **seen}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
