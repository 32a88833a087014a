"""A receiver of callbacks on this machine, and how they are signed for it."""

from __future__ import annotations

import base64
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
LOOPBACK = {"allow_http": True, "allow_networks": ("127.0.0.0/8",), "retry_s": 0.05}


class Receiver:
    """Notes (headers, body) of what it is sent. answers: statuses, the last one again and again;
    "endless": 200 and a body without an end; "silent": nothing; "held": 200 once `is_released`.
    held: the ports from which these came."""

    def __init__(self, *answers, context=None):
        self.got, self.answers = [], list(answers) or [200]
        self.is_over, self.is_released = threading.Event(), threading.Event()
        self.held, self.lock = [], threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                with receiver.lock:
                    receiver.got.append((dict(self.headers), body))
                    answers = receiver.answers
                    answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer == "silent":
                    receiver.is_over.wait()
                    return
                if answer == "held":
                    receiver.held.append(self.client_address[1])
                    receiver.is_released.wait()
                with contextlib.suppress(OSError):  # it does not wait any more
                    self.send_response(200 if isinstance(answer, str) else answer)
                    if answer == 302:
                        self.send_header("location", "/other")
                    self.end_headers()
                    while answer == "endless" and not receiver.is_over.is_set():
                        self.wfile.write(bytes(1 << 16))

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}/done"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.is_over.set()
        self.is_released.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def ids(self):
        return [headers["webhook-id"] for headers, _ in self.got]


def unwrapped(receiver, secret=SECRET):
    """What the `openai` client makes of it; an error if it was not signed so."""
    client = openai.OpenAI(api_key="x", webhook_secret=secret)
    return [client.webhooks.unwrap(body, headers) for headers, body in receiver.got]
