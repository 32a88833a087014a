"""Real servers with one store; one is killed while a batch runs and chats continue.

    scripts/kill_replica [--lines 600] [--max-tokens 60] [--users 2] [--replicas 2] [--add]
                         [--router PYTHON] [--callbacks BATCHES]

They have the tiny model and one PostgreSQL store of the test's own. A batch is uploaded to the
second; when a third of its lines is answered, the first is killed (``kill -9``), and with ``--add``
another one is started, which must get its part. Every line must have one result. Chat users ask the
second server, or with ``--router`` SGLang's own router before all: PYTHON is one that has
``sglang-router``, in an environment without SGLang.

``--callbacks``: the lines are divided among so many batches, each with a callback URL. The receiver
refuses the first attempt (500) and does not answer the fifth, whose server is killed. Each batch
must be told, with the right signature, and again only what was refused and what the killed server
had sent: when its claim ends, 30 s after `TIMEOUT_S`. There are no chats.

Prints one JSON object, and ends with 1 when something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cosched.batch.callback_rules import SECRET_ENV
from cosched.config import ENV_VAR
from cosched.lab.demo_model import ensure_demo_model
from tests.batch import postgres
from tests.batch.api import Api, until
from tests.batch.receiver import LOOPBACK, SECRET, Receiver, unwrapped
from tests.forks import Forks
from tests.request_lines import completion
from tests.serving import ServerError, free_port, start_server

LEASE_S = 3.0
TIMEOUT_S = 10.0  # of an attempt to call back
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the servers share the cores


class Chats:
    """Users with one request at a time. `seen`: (when it ended [s], how long it took [s], what was
    wrong or None)."""

    pause_s = 0.2

    def __init__(self, url, num_users, *, key="none"):
        self.url, self.seen = url, []
        self._headers = {"authorization": f"Bearer {key}"}
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(num_users)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, user):
        number = 0
        while not self._ended.wait(self.pause_s):
            number += 1
            self.seen.append(self.chat(user, number))

    def chat(self, user, number):
        messages = [{"role": "user", "content": f"hello {user} {number}"}]
        body = {"model": "default", "messages": messages, "max_tokens": 4}
        began_s, wrong = time.monotonic(), None
        try:
            url = f"{self.url}/v1/chat/completions"
            reply = httpx.post(url, json=body, headers=self._headers, timeout=60)
            if not (reply.is_success and reply.json()["usage"]["completion_tokens"]):
                wrong = f"HTTP {reply.status_code}"
        except httpx.HTTPError as error:
            wrong = type(error).__name__
        now_s = time.monotonic()
        return now_s, now_s - began_s, wrong


@contextlib.contextmanager
def router(python, urls):
    """The URL of SGLang's router before these servers."""
    port = free_port()
    command = [python, "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin", "--health-check-interval-secs", "2"]
    with tempfile.TemporaryFile() as log:
        # None of our paths: it would find an SGLang that it cannot import.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd="/")
        url = f"http://127.0.0.1:{port}"
        try:
            deadline_s = time.monotonic() + 240
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/readiness", timeout=5).is_success:
                        break
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    raise ServerError(f"no router:\n{log.read().decode()[-2000:]}")
                time.sleep(0.1)
            yield url
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def one_store(root, forks, *, env=None, **batches):
    """A function that starts a server. All of them have one store in PostgreSQL; `batches`: more
    settings of it."""
    model = ensure_demo_model(size="tiny", dtype="float32")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(postgres.cluster())
        batches |= {"folder": str(root), "url": cluster.url, "lease_s": LEASE_S}
        env = {ENV_VAR: json.dumps({"batches": batches}), **(env or {})}

        def started():
            server = start_server(model, "--cosched-policy", "cosched", env=env, forks=forks)
            return stack.enter_context(server)

        yield started


def kill(server):
    os.killpg(server.process.pid, signal.SIGKILL)


def lines_of(count, max_tokens):
    more = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return [completion(f"c{n}", **more) for n in range(count)]


def answered_lines(url):
    """By this server, as it tells Prometheus."""
    text = httpx.get(f"{url}/cosched/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "cosched:batches_finished_lines_total":
                if sample.labels["result"] == "answered":
                    return int(sample.value)
    raise AssertionError(text)


def run(
    root,
    forks,
    *,
    num_lines,
    max_tokens,
    num_users,
    num_replicas=2,
    adds=False,
    chats_beside_s=5.0,
    router_python=None,
):
    """What was seen; AssertionError when something is wrong. `adds`: a server, after the kill.
    `chats_beside_s`: duration of chats before the batch, and after it."""
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(one_store(root, forks))
        servers = [started() for _ in range(num_replicas)]
        urls = [server.url for server in servers]
        front = (
            urls[1] if router_python is None else stack.enter_context(router(router_python, urls))
        )
        api = Api(urls[1])
        chats = stack.enter_context(Chats(front, num_users))
        time.sleep(chats_beside_s)
        lines = lines_of(num_lines, max_tokens)
        began_s = time.monotonic()
        batch = api.create(lines, window="1h")
        while (now := api.batches.retrieve(batch.id)).request_counts.completed < num_lines // 3:
            assert now.status in ("validating", "in_progress"), now
            time.sleep(0.05)
        answered = [answered_lines(url) for url in urls]
        kill(servers[0])
        killed_s = time.monotonic()
        added = started() if adds else None
        done_before = api.batches.retrieve(batch.id).request_counts.completed
        ended = api.wait(batch, timeout_s=300)
        ended_s = time.monotonic()
        records = api.records(ended.output_file_id)
        by_added = answered_lines(added.url) if added is not None else None
        time.sleep(chats_beside_s)
        seen = sorted(chats.seen)
    assert ended.status == "completed", ended
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (num_lines, num_lines, 0), ended
    assert [one["custom_id"] for one in records] == [one["custom_id"] for one in lines]
    assert ended.usage.output_tokens == num_lines * max_tokens, "tokens are counted once"
    if added is not None:
        assert done_before < num_lines, "the batch was over before the new server had started"
        assert by_added, "the new server got no line"
    return {
        "lines": num_lines,
        "answered_before_the_kill": {"killed": answered[0], "others": answered[1:]},
        "answered_by_the_added": by_added,
        "left_when_added": num_lines - done_before,
        "batch_s": round(ended_s - began_s, 1),
        "after_the_kill_s": round(ended_s - killed_s, 1),
        "chats": {
            "through": "router" if router_python else "the other server",
            "before_the_kill": told([one for one in seen if one[0] < killed_s]),
            "after_the_kill": told([one for one in seen if one[0] >= killed_s]),
            "last_failure_after_the_kill_s": max(
                (round(at_s - killed_s, 1) for at_s, _, wrong in seen if wrong), default=None
            ),
        },
    }


def has_connection(server, port):
    """From that port of this machine."""
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return any(one.laddr.port == port for one in found)


def run_callbacks(root, forks, *, num_batches, num_lines, max_tokens, num_replicas=2):
    """As `run`, of batches with a callback each."""
    allowed = {**LOOPBACK, "timeout_s": TIMEOUT_S, "retry_s": 0.5}
    env = {SECRET_ENV: SECRET}
    with (
        Receiver(500, 200, 200, 200, "held", 200) as receiver,
        one_store(root, forks, env=env, callbacks=allowed) as started,
    ):
        servers = [started() for _ in range(num_replicas)]
        lines = lines_of(num_lines // num_batches, max_tokens)
        told_to = {"metadata": {"callback_url": receiver.url}}
        names = [Api(servers[0].url).create(lines, **told_to).id for _ in range(num_batches)]
        until(lambda: receiver.held)
        [killed] = [one for one in servers if has_connection(one, receiver.held[0])]
        kill(killed)
        killed_s = time.monotonic()
        receiver.is_released.set()
        api = Api(next(one.url for one in servers if one is not killed))
        at_kill = [api.batches.retrieve(name) for name in names]
        ended = [api.wait(batch) for batch in at_kill]
        ended_s = time.monotonic()
        attempts = {}

        def are_told():
            for name in names:
                [callback] = api.batches.retrieve(name).cosched["callbacks"]
                attempts[name] = callback["state"] == "delivered" and callback["attempts"]
            return all(attempts.values())

        until(are_told)
        told_s = time.monotonic()
    for batch in ended:
        assert batch.status == "completed", batch
        assert batch.request_counts.completed == len(lines), batch
        assert batch.usage.output_tokens == len(lines) * max_tokens, "tokens are counted once"
    events = unwrapped(receiver)  # fails for a wrong signature
    assert {event.type for event in events} == {"batch.completed"}
    assert Counter(event.data.id for event in events) == attempts
    due = Counter([*names, events[0].data.id, events[4].data.id])  # refused; sent by the killed
    assert due == attempts, (due, attempts)
    return {
        "batches": num_batches,
        "lines": num_batches * len(lines),
        "ended_before_the_kill": sum(batch.status == "completed" for batch in at_kill),
        "events_of_each": sorted(attempts.values()),
        "all_ended_after_the_kill_s": round(ended_s - killed_s, 1),
        "all_told_after_the_kill_s": round(told_s - killed_s, 1),
    }


def told(seen):
    good = [took_s for _, took_s, wrong in seen if wrong is None]
    return {
        "answered": len(good),
        "failed": sorted(wrong for *_, wrong in seen if wrong),
        "longest_s": round(max(good, default=0.0), 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lines", type=int, default=600)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--add", action="store_true", help="start a server after the kill")
    parser.add_argument("--router", metavar="PYTHON", help="one that has sglang-router")
    parser.add_argument("--callbacks", type=int, metavar="BATCHES", help="batches that are told")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cosched-replicas-")))
        forks = Forks(root, cleared=(ENV_VAR, "SGLANG_PLUGINS"))
        stack.callback(forks.close)
        sizes = {
            "num_lines": arguments.lines,
            "max_tokens": arguments.max_tokens,
            "num_replicas": arguments.replicas,
        }
        if arguments.callbacks:
            asked = partial(run_callbacks, num_batches=arguments.callbacks)
        else:
            more = {"num_users": arguments.users, "router_python": arguments.router}
            asked = partial(run, adds=arguments.add, **more)
        try:
            seen = asked(root / "batches", forks, **sizes)
        except (AssertionError, ServerError) as error:
            print(json.dumps({"wrong": str(error)}))
            return 1
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
