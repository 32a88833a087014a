"""Sockets that are open and send nothing, on a real uvicorn server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import uvicorn

from cosched.batch.jsonl.server import free_port
from cosched.server import connections
from cosched.server.connections import SilentConnections
from tests.batch.api import until

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"


@contextlib.contextmanager
def serving(app):
    server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def ended(server, look, now_s):
    """How many are ended, by the server's own thread."""
    found = []
    loop = server.servers[0].get_loop()
    loop.call_soon_threadsafe(
        lambda: found.append(look.end(server.server_state.connections, now_s))
    )
    until(lambda: found)
    return found[0]


def test_what_sends_nothing_or_a_part_is_ended_and_what_runs_is_not(monkeypatch):
    may_answer = threading.Event()

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        while not may_answer.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    parts = (b"", HEAD, HEAD + b"\r\nhalf", HEAD + b"\r\nthe whole")
    with serving(app) as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.config.port)
        sockets = [stack.enter_context(socket.create_connection(address, 20)) for _ in parts]
        for each, part in zip(sockets, parts, strict=True):
            each.sendall(part)
        until(
            lambda: (
                len(server.server_state.connections) == 4 and len(server.server_state.tasks) == 2
            )
        )
        look = SilentConnections()
        assert ended(server, look, 0.0) == ended(server, look, 59.0) == 0
        assert ended(server, look, 61.0) == 3
        for each in sockets[:3]:
            assert each.recv(100) == b""
        may_answer.set()
        assert sockets[3].recv(100).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(connections, "MOST_IDLE", 5)
        more = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(8)]
        until(lambda: len(server.server_state.connections) == 9)
        assert ended(server, look, 62.0) == 4
        assert len(more) == 8
