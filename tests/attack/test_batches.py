"""Attacks on Files and Batches. The engine is a stand-in: what is attacked is the store, its files
and its routes. `kill -9` is for scripts/kill_batches.

Some are short here, and whole with scripts/attack.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import subprocess
import threading
import time
from collections import Counter

import httpx
import msgspec
import openai
import pytest

from cosched.batch.config import BatchesConfig
from cosched.errors import ConfigError
from tests.batch import kills
from tests.batch.api import Api, line, serving, until
from tests.batch.stand_in import StandIn


@pytest.fixture
def is_full():
    return bool(os.environ.get("COSCHED_ATTACK"))


def lines_of(count, name="c"):
    return [line(f"{name}{number}") for number in range(count)]


def check_whole(api, batch, count):
    """Each line of the batch has one result."""
    ended = api.wait(batch, timeout_s=3600)
    records = api.records(ended.output_file_id) + api.records(ended.error_file_id)
    names = {record["custom_id"] for record in records}
    assert len(names) == len(records) == count, ended
    return ended.status


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of this size; False where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        is_there = not subprocess.run(command, capture_output=True, check=False).returncode
    except FileNotFoundError:
        is_there = False
    try:
        yield is_there
    finally:
        if is_there:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full_under_a_running_batch_costs_no_line(tmp_path):
    """Without the right to mount a small disk: no file of the server may grow."""
    seen = Counter()
    with small_disk(tmp_path / "disk", "12m") as is_mounted:  # SQLite's log may take 4 MB
        server = kills.StandInServer(tmp_path, place=str(tmp_path / "disk" / "b"))
        server.start()
        pid, ballast = server.process.pid, tmp_path / "disk" / "ballast"
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        try:
            kills.wait_ready(server)
            api = Api(server.url)
            batch = api.create(lines_of(600))
            until(lambda: api.batches.retrieve(batch.id).request_counts.completed)
            if is_mounted:
                with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                    while file.write(b"x" * 4096):
                        pass
            else:
                most = (4096, resource.RLIM_INFINITY)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, most)
            while seen[503] < 3:
                assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200
                try:
                    api.upload(lines_of(2000, "x" * 200))
                except openai.APIStatusError as error:
                    seen[error.status_code] += 1
                time.sleep(0.1)
            ballast.unlink(missing_ok=True)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, no_limit)
            check_whole(api, batch, 600)
        finally:
            server.close()


def test_a_full_disk_is_a_503_with_its_reason_in_the_log(tmp_path, caplog):
    """Also where only the file that comes in finds it full."""
    stand_in = StandIn(BatchesConfig(folder=str(tmp_path / "b")))
    with serving(stand_in) as url:
        folder = tmp_path / "b" / "files"
        folder.rmdir()
        form = {"file": ("in.jsonl", b"{}\n")}
        reply = httpx.post(f"{url}/v1/files", files=form, data={"purpose": "batch"})
        folder.mkdir()
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "store_away"
    assert "its files cannot be written: No such file" in caplog.text


def test_a_damaged_database_is_refused_at_the_start_or_a_503(tmp_path, is_full):
    """Pages of the file are overwritten while the server is down. It must refuse to start with one
    sentence, or serve; a request may fail with a clear 503 and never with a 500."""
    rng = random.Random(1)
    for number in range(20 if is_full else 2):
        folder = tmp_path / f"b{number}"
        config = BatchesConfig(folder=str(folder))
        with serving(StandIn(config)) as url:
            api = Api(url)
            done = api.wait(api.create(lines_of(150)))
        damage(folder / "batches.sqlite", rng, is_first_page=number % 4 == 0)
        try:
            stand_in = StandIn(config)
        except ConfigError as error:
            assert "the store of batches" in str(error) and "\n" not in str(error), error
            continue
        with serving(stand_in) as url:
            assert httpx.get(f"{url}/health").status_code == 200
            paths = [f"batches/{done.id}", "batches", "files", f"files/{done.output_file_id}"]
            paths.append(f"files/{done.output_file_id}/content")
            for path in paths:
                headers = {"authorization": "Bearer key"}
                reply = httpx.get(f"{url}/v1/{path}", headers=headers, timeout=30)
                assert reply.status_code in (200, 404, 503), (path, reply.text)


def damage(path, rng, *, is_first_page):
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(1 if is_first_page else 4):
            file.seek(0 if is_first_page else rng.randrange(1, size // 4096) * 4096)
            file.write(rng.randbytes(2048))


class JumpingClock:
    jump_s = 0.0

    def __call__(self):
        return time.time() + self.jump_s


def test_a_wall_clock_that_jumps_by_hours_loses_no_line(tmp_path, is_full):
    """Windows follow the wall clock: what they leave out is an error."""
    for number in range(8 if is_full else 1):
        clock = JumpingClock()
        few = {"high_watermark": 64, "low_watermark": 48}
        config = BatchesConfig(folder=str(tmp_path / f"b{number}"), **few)
        stand_in = StandIn(config, clock=clock)
        stand_in.num_answered = 100
        with serving(stand_in) as url:
            api = Api(url)
            short = api.create(lines_of(150, "short"), window="1h")
            long = api.create(lines_of(150, "long"), window="24h")
            for hours in (2, -5, 26):
                until(lambda stand_in=stand_in: stand_in.asked)
                stand_in.asked.clear()
                clock.jump_s += hours * 3600
                if hours == 2:
                    assert check_whole(api, short, 150) == "expired"
                    stand_in.num_answered = None
                    batch = api.create(lines_of(60, "after"), window="1h")
                elif hours == -5:
                    assert check_whole(api, batch, 60) == "completed"
                    third = api.create(lines_of(300, "third"), window="24h")
                    # Its lines are known: a batch that expires before that has none.
                    api.wait(third, "in_progress", "finalizing", "completed")
            check_whole(api, long, 150)
            check_whole(api, third, 300)


def test_a_second_server_on_the_folder_is_refused(tmp_path, is_full):
    folder, link = tmp_path / "b", tmp_path / "link"
    link.symlink_to(folder)
    with serving(StandIn(BatchesConfig(folder=str(folder)))) as url:
        api = Api(url)
        batch = api.create(lines_of(600))
        for place in [str(folder), str(link), f"file://{folder}"] * (5 if is_full else 1):
            with pytest.raises(ConfigError, match="another server uses it"):
                StandIn(BatchesConfig(folder=place))
        check_whole(api, batch, 600)


def test_a_batch_of_most_lines_is_answered_beside_the_api(tmp_path, is_full):
    count = 100_000 if is_full else 400
    server, waits_s, ended = kills.StandInServer(tmp_path), [], threading.Event()
    server.config = msgspec.structs.replace(server.config, max_lines=count)

    def ask():
        while not ended.wait(0.05):
            began_s = time.monotonic()
            httpx.get(f"{server.url}/v1/batches", timeout=60).raise_for_status()
            waits_s.append(time.monotonic() - began_s)

    server.start()
    asking = threading.Thread(target=ask)
    try:
        kills.wait_ready(server)
        api = Api(server.url)
        asking.start()
        check_whole(api, api.create(lines_of(count)), count)
        ended.set()
        over = api.wait(api.create(lines_of(count + 1)), timeout_s=3600)
        assert over.status == "failed" and over.errors.data[0].code == "too_many_lines", over
    finally:
        ended.set()
        asking.join()
        server.close()
    print(f"the API took up to {max(waits_s):.3f} s")


CANARY = "only for the operator"
UPS = (
    "../canary", "../../canary", "..%2fcanary", "%2e%2e/%2e%2e/canary", "....//canary", "/canary",
    "..\\canary", "%00", "file-%00", "canary%00.jsonl", "lock", "batches.sqlite", "store-id",
    "files/../../canary", "' OR 1=1 --", "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/canary",
)  # fmt: skip


def test_ids_names_and_custom_ids_that_are_paths_reach_no_file(tmp_path):
    folder = tmp_path / "b"
    (tmp_path / "canary").write_text(CANARY)
    with serving(StandIn(BatchesConfig(folder=str(folder)))) as url:
        api = Api(url)
        for name in UPS:
            for kind in ("files", "batches"):
                for method, tail in (
                    ("GET", ""),
                    ("DELETE", ""),
                    ("GET", "/content"),
                    ("POST", "/cancel"),
                ):
                    reply = raw(url, method, f"/v1/{kind}/{name}{tail}")
                    assert reply[9:10] == b"4" and CANARY.encode() not in reply, reply
            form = {"file": (name, b'{"custom_id": "a"}\n')}
            reply = httpx.post(f"{url}/v1/files", files=form, data={"purpose": "batch"})
            assert reply.status_code == 200 and reply.json()["id"].startswith("file-"), reply.text
            body = {"endpoint": "/v1/completions", "completion_window": "1h"}
            reply = httpx.post(f"{url}/v1/batches", json=body | {"input_file_id": name})
            assert reply.status_code == 404, reply.text
        batch = api.create([line(name) for name in UPS], metadata={"tenant": "../../canary"})
        check_whole(api, batch, len(UPS))
    outside = sorted(path.name for path in tmp_path.iterdir())
    inside = {path.name for path in folder.iterdir()}
    assert outside == ["b", "canary"] and (tmp_path / "canary").read_text() == CANARY
    assert inside <= {"lock", "store-id", "files", "batches.sqlite"}, inside
    assert all(path.name.startswith("file-") for path in (folder / "files").iterdir())


def raw(url, method, path):
    """The answer to this path as it is: HTTP clients clean paths."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        target = path.replace(" ", "%20")
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


OTHER_KEYS = (
    {},
    {"authorization": "Bearer other"},
    {"authorization": "Bearer mine "[:-2]},
    {"authorization": "Basic mine"},
    {"authorization": "Bearer other", "x-api-key": "mine"},
    {"x-api-key": "other", "openai-organization": "mine", "x-cosched-owner": "mine"},
    {"authorization": "Bearer sha256:" + "0" * 64},
)


def test_ids_of_another_tenant_are_a_404_on_each_route(tmp_path):
    with serving(StandIn(BatchesConfig(folder=str(tmp_path / "b")))) as url:
        api, client = Api(url, key="mine"), httpx.Client(base_url=f"{url}/v1/")
        done = api.wait(api.create(lines_of(50)))
        for headers in OTHER_KEYS:
            for name in (done.id, done.input_file_id, done.output_file_id):
                for method, path in (
                    ("GET", f"files/{name}"),
                    ("GET", f"files/{name}/content"),
                    ("DELETE", f"files/{name}"),
                    ("GET", f"batches/{name}"),
                    ("POST", f"batches/{name}/cancel"),
                    ("GET", f"files?after={name}"),
                    ("GET", f"batches?after={name}"),
                ):
                    reply = client.request(method, path, headers=headers)
                    assert reply.status_code == 404, (method, path, headers, reply.text)
                body = {"input_file_id": name, "endpoint": "/v1/completions"}
                body["completion_window"] = "1h"
                reply = client.post("batches", json=body, headers=headers)
                assert reply.status_code == 404, reply.text
            for kind in ("files", "batches"):
                assert client.get(kind, headers=headers).json()["data"] == []
        assert len(api.outcome(done)) == 50, "they are still there for their owner"
