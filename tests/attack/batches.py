"""Attacks on Files and Batches. The engine is a stand-in: what is attacked is the store, its files
and its routes."""

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
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from cosched.batch.config import BatchesConfig
from cosched.errors import ConfigError
from tests.attack.items import Setting, attack
from tests.batch import kills
from tests.batch.api import Api, line, serving, until
from tests.batch.stand_in import StandIn


def lines_of(count: int, name: str = "c") -> list[dict[str, object]]:
    return [line(f"{name}{number}") for number in range(count)]


def answered(api: Api, batch: object, count: int) -> Counter[str]:
    """Of a batch that has ended: lines that are there, lost, and there twice."""
    ended = api.wait(batch, timeout_s=3600)
    records = api.records(ended.output_file_id) + api.records(ended.error_file_id)
    names = Counter(record["custom_id"] for record in records)
    lost, repeated = count - len(names), sum(names.values()) - len(names)
    assert not lost and not repeated, f"{lost=} {repeated=} {ended.status=}"
    return Counter(lines=len(names), lost=lost, repeated=repeated, failed=len(records) - count)


@attack("kill -9 in a running batch", full="100 kills; 400 lines a batch")
def kill(setting: Setting) -> dict[str, object]:
    server = kills.StandInServer(setting.folder)
    try:
        return kills.run([server], kills=100 if setting.is_full else 3, seed=setting.seed)
    finally:
        server.close()


@attack("kill -9 of a real server in its batches", full="10 kills", needs_server=True)
def kill_server(setting: Setting) -> dict[str, object]:
    server = kills.RealServer(setting.folder / "b", setting.forks)
    try:
        return kills.run([server], kills=10 if setting.is_full else 1, seed=setting.seed)
    finally:
        server.close()


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
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


@attack("disk full under a running batch", full="a file system of 4 MB, filled")
def full_disk(setting: Setting) -> dict[str, object]:
    """Without the right to mount a small disk: no file of the server may grow."""
    seen: Counter[str] = Counter()
    with small_disk(setting.folder / "disk", "4m") as is_mounted:
        server = kills.StandInServer(setting.folder, place=str(setting.folder / "disk" / "b"))
        server.start()
        pid, ballast = server.process.pid, setting.folder / "disk" / "ballast"
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        try:
            kills.wait_ready(server)
            api = Api(server.url)
            batch = api.create(lines_of(1200))
            until(lambda: api.batches.retrieve(batch.id).request_counts.completed)
            if is_mounted:
                with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                    while file.write(b"x" * 4096):
                        pass
            else:
                most = (4096, resource.RLIM_INFINITY)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, most)
            ends_s = time.monotonic() + 3
            while time.monotonic() < ends_s:
                assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
                with contextlib.suppress(openai.APIStatusError):
                    try:
                        api.upload(lines_of(2000, "x" * 200))
                        seen["uploads_taken"] += 1
                    except openai.APIStatusError as error:
                        seen[f"uploads_{error.status_code}"] += 1
                time.sleep(0.3)
            assert seen["uploads_503"], seen
            ballast.unlink(missing_ok=True)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, no_limit)
            return {"mounted": is_mounted, **seen, **answered(api, batch, 1200)}
        finally:
            server.close()


@attack("corrupted SQLite", full="20 damaged copies of a database, opened and served")
def corrupt(setting: Setting) -> dict[str, object]:
    """Pages of the file are overwritten while the server is down. It must refuse to start with one
    sentence, or serve; a request may fail with a clear 503 and never with a 500."""
    rng, seen = random.Random(setting.seed), Counter()
    for number in range(20 if setting.is_full else 4):
        folder = setting.folder / f"b{number}"
        config = BatchesConfig(folder=str(folder))
        with serving(StandIn(config)) as url:
            api = Api(url)
            done = api.wait(api.create(lines_of(300)))
        damage(folder / "batches.sqlite", rng, is_first_page=number % 4 == 0)
        try:
            stand_in = StandIn(config)
        except ConfigError as error:
            assert "the store of batches" in str(error) and "\n" not in str(error), error
            seen["refused_at_start"] += 1
            continue
        with serving(stand_in) as url:
            assert httpx.get(f"{url}/health").status_code == 200
            paths = [f"batches/{done.id}", "batches", "files", f"files/{done.output_file_id}"]
            paths.append(f"files/{done.output_file_id}/content")
            for path in paths:
                headers = {"authorization": "Bearer key"}
                reply = httpx.get(f"{url}/v1/{path}", headers=headers, timeout=30)
                seen[f"answers_{reply.status_code}"] += 1
                assert reply.status_code in (200, 404, 503), (path, reply.text)
    return dict(seen)


def damage(path: Path, rng: random.Random, *, is_first_page: bool) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(1 if is_first_page else 4):
            file.seek(0 if is_first_page else rng.randrange(1, size // 4096) * 4096)
            file.write(rng.randbytes(2048))


class JumpingClock:
    jump_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.jump_s


@attack("wall clock jumps by hours while batches run", full="+2 h, -5 h, +26 h, 8 times each")
def jump_clock(setting: Setting) -> dict[str, object]:
    """Windows follow the wall clock: what they leave out is an error, and nothing is lost."""
    seen: Counter[str] = Counter()
    for number in range(8 if setting.is_full else 1):
        clock = JumpingClock()
        folder = str(setting.folder / f"b{number}")
        stand_in = StandIn(BatchesConfig(folder=folder), clock=clock)
        with serving(stand_in) as url:
            api = Api(url)
            short = api.create(lines_of(900, "short"), window="1h")
            long = api.create(lines_of(900, "long"), window="24h")
            for hours in (2, -5, 26):
                until(lambda stand_in=stand_in: stand_in.asked)
                stand_in.asked.clear()
                clock.jump_s += hours * 3600
                if hours == 2:
                    assert api.wait(short).status == "expired"
                    batch = api.create(lines_of(300, "after"), window="1h")
                elif hours == -5:
                    assert api.wait(batch).status == "completed"
                    seen += answered(api, batch, 300)
                    third = api.create(lines_of(2000, "third"), window="24h")
            for one, count in ((short, 900), (long, 900), (third, 2000)):
                seen += answered(api, one, count)
                seen[api.batches.retrieve(one.id).status] += 1
    return {"lost": 0, "repeated": 0, **seen}


@attack("two servers on one folder", full="the folder, a link to it, a URL of it; 5 times")
def share_folder(setting: Setting) -> dict[str, object]:
    seen: Counter[str] = Counter()
    folder, link = setting.folder / "b", setting.folder / "link"
    link.symlink_to(folder)
    with serving(StandIn(BatchesConfig(folder=str(folder)))) as url:
        api = Api(url)
        batch = api.create(lines_of(600))
        for place in [str(folder), str(link), f"file://{folder}"] * (5 if setting.is_full else 1):
            with pytest.raises(ConfigError, match="another server uses it"):
                StandIn(BatchesConfig(folder=place))
            seen["refused"] += 1
        seen += answered(api, batch, 600)
    return {"lost": 0, "repeated": 0, **seen}


@attack("10^5 lines in one batch", full="100,000 lines, and the API asked beside them")
def many_lines(setting: Setting) -> dict[str, object]:
    count = 100_000 if setting.is_full else 1000
    server, waits_s, ended = kills.StandInServer(setting.folder), [], threading.Event()
    server.config = msgspec.structs.replace(server.config, max_lines=count)

    def ask(url: str) -> None:
        while not ended.wait(0.05):
            began_s = time.monotonic()
            httpx.get(f"{url}/v1/batches", timeout=60).raise_for_status()
            waits_s.append(time.monotonic() - began_s)

    server.start()
    asking = threading.Thread(target=ask, args=(server.url,))
    try:
        kills.wait_ready(server)
        api = Api(server.url)
        began_s = time.monotonic()
        asking.start()
        seen = answered(api, api.create(lines_of(count)), count)
        took_s = time.monotonic() - began_s
        ended.set()
        over = api.wait(api.create(lines_of(count + 1)), timeout_s=3600)
        assert over.status == "failed" and over.errors.data[0].code == "too_many_lines", over
    finally:
        ended.set()
        asking.join()
        server.close()
    waits_s.sort()
    return {
        **seen,
        "lost": 0,
        "repeated": 0,
        "took_s": round(took_s, 1),
        "api_p99_s": round(waits_s[len(waits_s) * 99 // 100], 3),
        "api_max_s": round(waits_s[-1], 3),
    }


CANARY = "only for the operator"
UPS = (
    "../canary", "../../canary", "..%2fcanary", "%2e%2e/%2e%2e/canary", "....//canary", "/canary",
    "..\\canary", "%00", "file-%00", "canary%00.jsonl", "lock", "batches.sqlite", "store-id",
    "files/../../canary", "' OR 1=1 --", "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/canary",
)  # fmt: skip


@attack("path traversal", full="ids, file names, tenants and custom_ids that are paths")
def traverse(setting: Setting) -> dict[str, object]:
    folder, seen = setting.folder / "b", Counter()
    (setting.folder / "canary").write_text(CANARY)
    config = BatchesConfig(folder=str(folder))
    with serving(StandIn(config)) as url:
        api = Api(url)
        for name in UPS:
            for kind in ("files", "batches"):
                for tail in ("", "/content", "/cancel"):
                    for method in ("GET", "DELETE", "POST"):
                        reply = raw(url, method, f"/v1/{kind}/{name}{tail}")
                        seen[f"ids_{reply[9:12].decode()}"] += 1
                        assert reply[9:10] == b"4" and CANARY.encode() not in reply, reply
            form = {"file": (name, b'{"custom_id": "a"}\n')}
            reply = httpx.post(f"{url}/v1/files", files=form, data={"purpose": "batch"})
            assert reply.status_code == 200 and reply.json()["id"].startswith("file-"), reply.text
            seen["names_taken"] += 1
            body = {"endpoint": "/v1/completions", "completion_window": "1h"}
            reply = httpx.post(f"{url}/v1/batches", json=body | {"input_file_id": name})
            assert reply.status_code == 404, reply.text
        batch = api.create([line(name) for name in UPS], metadata={"tenant": "../../canary"})
        seen += answered(api, batch, len(UPS))
    outside = sorted(path.name for path in setting.folder.iterdir())
    inside = {path.name for path in folder.iterdir()}
    assert outside == ["b", "canary"] and (setting.folder / "canary").read_text() == CANARY
    assert inside <= {"lock", "store-id", "files", "batches.sqlite"}, inside
    assert all(path.name.startswith("file-") for path in (folder / "files").iterdir())
    return dict(seen)


def raw(url: str, method: str, path: str) -> bytes:
    """The answer to this path as it is: HTTP clients clean paths."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        target = path.replace(" ", "%20")
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


@attack("other tenants' ids", full="each route with each kind of id, and each way to show a key")
def other_tenants(setting: Setting) -> dict[str, object]:
    seen: Counter[str] = Counter()
    shown = [
        {},
        {"authorization": "Bearer other"},
        {"authorization": "Bearer mine "[:-2]},
        {"authorization": "Basic mine"},
        {"authorization": "Bearer other", "x-api-key": "mine"},
        {"x-api-key": "other", "openai-organization": "mine", "x-cosched-owner": "mine"},
        {"authorization": "Bearer sha256:" + "0" * 64},
    ]
    with serving(StandIn(BatchesConfig(folder=str(setting.folder / "b")))) as url:
        api, client = Api(url, key="mine"), httpx.Client()
        done = api.wait(api.create(lines_of(50)))
        ids = [done.id, done.input_file_id, done.output_file_id]
        for headers in shown:
            for name in ids:
                for method, path in (
                    ("GET", f"files/{name}"),
                    ("GET", f"files/{name}/content"),
                    ("DELETE", f"files/{name}"),
                    ("GET", f"batches/{name}"),
                    ("POST", f"batches/{name}/cancel"),
                    ("GET", f"files?after={name}"),
                    ("GET", f"batches?after={name}"),
                ):
                    reply = client.request(method, f"{url}/v1/{path}", headers=headers)
                    seen[str(reply.status_code)] += 1
                    assert reply.status_code == 404, (method, path, headers, reply.text)
                body = {"input_file_id": name, "endpoint": "/v1/completions"}
                body["completion_window"] = "1h"
                reply = client.post(f"{url}/v1/batches", json=body, headers=headers)
                seen[str(reply.status_code)] += 1
                assert reply.status_code == 404, reply.text
            for kind in ("files", "batches"):
                assert client.get(f"{url}/v1/{kind}", headers=headers).json()["data"] == []
        assert len(api.outcome(done)) == 50, "they are still there for their owner"
    return dict(seen)
