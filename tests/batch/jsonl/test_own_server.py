"""The server that a job starts for itself: readiness, death, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from cosched.batch.jsonl import server as own_server
from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.jsonl.errors import JobFileError, ServerGoneError, ServerRefusedError
from cosched.batch.jsonl.server import OwnServer, free_port, own_base_url, server_command

HTTP_SERVER = """
import http.server, subprocess, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers()
        self.wfile.write(b"{}")
child = subprocess.Popen(["sleep", "60"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid):
    deadline_s = time.monotonic() + 120
    while alive(pid):
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.02)


def child_of(log):
    deadline_s = time.monotonic() + 120
    while (
        not (text := log.read_text() if log.exists() else "").startswith("child")
        or "\n" not in text
    ):
        assert time.monotonic() < deadline_s, "the server did not start"
        time.sleep(0.02)
    return int(text.split()[1])


@pytest.fixture
def own(tmp_path):
    """Runs `work(server)` with a server made of a Python program."""

    def run(program, work):
        port = free_port()

        async def main():
            client = Client(
                base_url=own_base_url(port),
                concurrency=1,
                rules=RetryRules(base_s=0.02, cap_s=0.1),
            )
            server = OwnServer(
                client=client,
                command=[sys.executable, "-c", program, str(port)],
                log_path=str(tmp_path / "server.log"),
                start_timeout_s=120,
            )
            try:
                async with client:
                    await work(server)
            finally:
                server.stop()

        asyncio.run(main())

    return run


def test_it_is_ready_when_it_answers_and_gone_with_its_children_afterwards(own, tmp_path):
    found = []

    async def work(server):
        await server.ready()
        found.append(child_of(tmp_path / "server.log"))
        assert alive(found[0])

    own(HTTP_SERVER, work)
    wait_gone(found[0])


def test_one_that_dies_while_starting_shows_the_end_of_its_log(own):
    program = "print('x' * 9000); print('no GPU here'); raise SystemExit(7)"
    with pytest.raises(ServerRefusedError, match=r"exited with code 7(?s:.*)no GPU here") as caught:
        own(program, lambda server: server.ready())
    assert len(str(caught.value)) < 5000


def test_one_that_dies_later_ends_the_watch(own):
    async def work(server):
        await server.ready()
        os.kill(server._process.pid, signal.SIGKILL)
        await server.watch()

    with pytest.raises(ServerGoneError, match="exited with code -9"):
        own(HTTP_SERVER, work)


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path, own):
    async def work(server):
        server._command = ["/nowhere/python"]
        await server.ready()

    with pytest.raises(JobFileError, match=r"cannot start the server: .*/nowhere/python"):
        own("", work)


def test_kill_9_of_the_job_leaves_no_server(tmp_path):
    """The kernel sends the signal: no other process is left to do it."""
    job = textwrap.dedent(f"""
        import sys, time
        from cosched.batch.jsonl.server import OwnServer
        command = [sys.executable, "-c", "print('child', __import__('os').getpid(), flush=True);"
                   "__import__('time').sleep(60)"]
        log = {str(tmp_path / "log")!r}
        OwnServer(client=None, command=command, log_path=log, start_timeout_s=1)._start()
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", job])
    server = child_of(tmp_path / "log")
    process.kill()
    process.wait()
    wait_gone(server)


def test_the_command_starts_cosched_with_the_users_flags():
    command = server_command(model_path="m", port=5, flags=["--tp", "2"])
    assert command[1:] == [
        "-m", "cosched.launch_server", "--model-path", "m", "--cosched-batches", "off",
        "--host", "127.0.0.1", "--port", "5", "--tp", "2",
    ]  # fmt: skip


def test_a_free_port_is_given_once_and_is_no_port_that_sglang_takes_itself(monkeypatch):
    mine = {free_port() for _ in range(50)}
    monkeypatch.setattr(own_server, "_reserved", {})  # as in another process
    theirs = {free_port() for _ in range(50)}
    assert len(mine | theirs) == 100
    for port in mine | theirs:
        assert 10_000 <= port < 22_000
        beyond = {port + n for n in (*range(233, 240), 246)}  # with DP attention
        assert not beyond & (mine | theirs)


def test_a_free_port_is_given_again_when_there_is_no_other(monkeypatch):
    monkeypatch.setattr(own_server, "_PORTS", range(10_011, 10_111, 50))
    monkeypatch.setattr(own_server, "_reserved", {})
    assert {free_port() for _ in range(4)} == {10_011, 10_061}
