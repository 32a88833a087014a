"""A small HTTP server that answers like an OpenAI one and misbehaves where a test says so."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    @classmethod
    def of(cls, body: Any, **changes: Any) -> Reply:
        return cls(body=json.dumps(body).encode(), **changes)

    def to_bytes(self) -> bytes:
        headers = {"content-type": "application/json", "content-length": str(len(self.body))}
        lines = [f"{key}: {value}\r\n" for key, value in (headers | self.headers).items()]
        response = f"HTTP/1.1 {self.status} X\r\n{''.join(lines)}\r\n".encode() + self.body
        return response[: self.cut_at]


def answer(asked: Asked, *, finish_reason: str = "stop", **changes: Any) -> Reply:
    text = f"to {asked.body.get('prompt')}"
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return Reply.of({"id": "r1", "choices": [choice], "usage": usage}, **changes)


class _Listener(ThreadingHTTPServer):
    request_queue_size = 1024

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", fake.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was cut."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def do_GET(self) -> None:
        self.reply(self.server.fake.get(self.path))

    def do_POST(self) -> None:
        fake = self.server.fake
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        reply = fake.post(self.path, dict(self.headers), body)
        hung_up = self.hangs_up(within_s=reply.delay_s)
        fake.replied()
        if hung_up:
            self.close_connection = True
        else:
            self.reply(reply)

    def reply(self, reply: Reply) -> None:
        self.wfile.write(reply.to_bytes())
        if reply.cut_at is not None:
            self.close_connection = True

    def hangs_up(self, *, within_s: float) -> bool:
        """Wait that long. True as soon as the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], within_s)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def log_message(self, *arguments: Any) -> None:
        """pytest shows enough."""


class FakeServer:
    """Listens on one port. `behave` decides about each POST; it may wait."""

    def __init__(self, behave: Callable[[Asked], Reply] = answer) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.behave = behave
        self.asked: list[Asked] = []
        self.health_status = 200
        self.models_status = 200
        self.state: dict[str, Any] | None = {"policy": "hygen"}
        self.num_waiting = 0  # requests that came and have no reply yet
        self.max_waiting = 0
        self._seen: Counter[bytes] = Counter()
        self._lock = threading.Lock()
        self._listener: _Listener | None = None

    def start(self) -> None:
        self._listener = _Listener(self)
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """As a crash: connections are cut, the port refuses."""
        if (listener := self._listener) is None:
            return
        self._listener = None
        listener.shutdown()
        listener.server_close()
        for connection in listener.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is closed already

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def prompts(self) -> list[Any]:
        return [asked.body.get("prompt") for asked in self.asked]

    def get(self, path: str) -> Reply:
        if path == "/server_info":
            return Reply.of({"internal_states": [{"cosched": self.state}]})
        return Reply(status=self.health_status if path == "/health" else self.models_status)

    def post(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        with self._lock:
            self._seen[body] += 1
            asked = Asked(
                url=path,
                headers={name.lower(): value for name, value in headers.items()},
                body=json.loads(body or b"{}"),
                nth=self._seen[body],
            )
            self.asked.append(asked)
            self.num_waiting += 1
            self.max_waiting = max(self.max_waiting, self.num_waiting)
        return self.behave(asked)

    def replied(self) -> None:
        with self._lock:
            self.num_waiting -= 1
