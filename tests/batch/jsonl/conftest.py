"""A small HTTP server that answers like an OpenAI one, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cosched.batch.jsonl.server import free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it arrived. `nth` counts the requests of this body, from 1."""

    url: str
    headers: dict[str, str]
    body: dict[str, Any]
    nth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`cut_at`: close the connection after that many bytes of the response."""

    status: int = 200
    body: bytes = b"{}"
    delay_s: float = 0.0
    cut_at: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


def answer(asked: Asked, **changes: Any) -> Reply:
    choice = {"index": 0, "text": f"to {asked.body.get('prompt')}", "finish_reason": "stop"}
    choice["finish_reason"] = changes.pop("finish_reason", "stop")
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    body = json.dumps({"id": "r1", "choices": [choice], "usage": usage}).encode()
    return Reply(body=body, **changes)


class FakeServer:
    """Listens on one port in a thread. `behave` decides about each POST."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self.behave: Callable[[Asked], Reply] = answer
        self.asked: list[Asked] = []
        self.health_status = 200
        self.models_status = 200
        self.state: dict[str, Any] | None = {"policy": "hygen"}
        self.num_waiting = 0  # requests that came and have no reply yet
        self.max_waiting = 0
        self._seen: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self) -> None:
        self._on_loop(self._start())

    def stop(self) -> None:
        """As a crash: connections are cut, the port refuses."""
        self._on_loop(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def prompts(self) -> list[Any]:
        return [asked.body.get("prompt") for asked in self.asked]

    def _on_loop(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _start(self) -> None:
        # asyncio.start_server would leave connections open that it accepts while it is closed.
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _stop(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            task = self._loop.create_task(self._serve(listener.accept()[0]))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._serve_one(reader, writer):
                    pass
            writer.close()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, url, _ = head[0].split(" ")
        headers = {
            key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:])
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            if url == "/server_info":
                body = json.dumps({"internal_states": [{"cosched": self.state}]}).encode()
                return await _reply(writer, Reply(body=body))
            status = self.health_status if url == "/health" else self.models_status
            return await _reply(writer, Reply(status=status))
        self._seen[body.decode()] = nth = self._seen.get(body.decode(), 0) + 1
        asked = Asked(url=url, headers=headers, body=json.loads(body), nth=nth)
        self.asked.append(asked)
        reply = self.behave(asked)
        self.num_waiting += 1
        self.max_waiting = max(self.max_waiting, self.num_waiting)
        try:
            if await _hung_up(reader, within_s=reply.delay_s):
                return False
        finally:
            self.num_waiting -= 1
        return await _reply(writer, reply)


async def _hung_up(reader: asyncio.StreamReader, *, within_s: float) -> bool:
    """Wait that long; whether the client closed the connection meanwhile."""
    try:
        async with asyncio.timeout(within_s):
            return not await reader.read(1)
    except TimeoutError:
        return False


async def _reply(writer: asyncio.StreamWriter, reply: Reply) -> bool:
    """Write it; whether the connection stays open."""
    headers = {"content-type": "application/json", "content-length": str(len(reply.body))}
    lines = [f"{key}: {value}\r\n" for key, value in (headers | reply.headers).items()]
    response = f"HTTP/1.1 {reply.status} X\r\n{''.join(lines)}\r\n".encode() + reply.body
    writer.write(response[: reply.cut_at])
    await writer.drain()
    return reply.cut_at is None


class Batch:
    """A folder with an input file, and ways to run run_batch on it."""

    def __init__(self, folder: Path, server: FakeServer) -> None:
        self.folder = folder
        self.server = server
        self.input = folder / "in.jsonl"
        self.out = folder / "out.jsonl"
        self.errors = folder / "out.jsonl.errors.jsonl"
        self.state = folder / "out.jsonl.state.json"

    def beside(self, out: Path) -> Batch:
        """The same job with another output."""
        other = Batch(self.folder, self.server)
        other.out, other.errors = out, Path(f"{out}.errors.jsonl")
        return other

    def write(self, lines: list[Any]) -> None:
        """bytes and str as they are, anything else as JSON."""
        with open(self.input, "wb") as file:
            for line in lines:
                raw = line if isinstance(line, str | bytes) else json.dumps(line)
                file.write((raw.encode() if isinstance(raw, str) else raw) + b"\n")

    def command(self, *options: str) -> list[str]:
        base = [sys.executable, "-m", "cosched.run_batch", "-i", str(self.input)]
        return [*base, "-o", str(self.out), "--base-url", self.server.base_url, *options]

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "200"},
        )

    def run(self, *options: str, code: int = 0) -> dict[str, Any]:
        """Run to the end; the JSON of the last line (empty when there is none)."""
        process = self.start(*options)
        stdout, self.stderr = process.communicate(timeout=60)
        assert process.returncode == code, f"{process.returncode=}\n{stdout}\n{self.stderr}"
        lines = stdout.splitlines()
        return json.loads(lines[-1]) if lines else {}

    def answers(self) -> list[dict[str, Any]]:
        return _jsonl(self.out)

    def failures(self) -> list[dict[str, Any]]:
        return _jsonl(self.errors)


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def completion(custom_id: Any, **body: Any) -> dict[str, Any]:
    """A good line of a batch file."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": custom_id, "max_tokens": 2} | body,
    }


class Tools:
    """What test modules would import from here if tests were a package."""

    Asked, Reply, FakeServer = Asked, Reply, FakeServer
    answer, completion = staticmethod(answer), staticmethod(completion)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Running; `stop` it where a test wants it to come later."""
    server = FakeServer(free_port())
    server.start()
    yield server
    server.close()


@pytest.fixture
def batch(tmp_path: Path, fake: FakeServer) -> Batch:
    return Batch(tmp_path, fake)
