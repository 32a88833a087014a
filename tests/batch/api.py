"""The `openai` client on a server of batches, and servers with a stand-in for the engine."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time

import openai
import uvicorn

from cosched.batch.jsonl.server import free_port
from tests.request_lines import error_of

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id, prompt=None, **changes):
    body = {"prompt": custom_id if prompt is None else prompt, "max_tokens": 2}
    entry = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return entry | changes


def lines(count, prefix="c"):
    return [line(f"{prefix}{n}") for n in range(count)]


def until(condition, timeout_s=120):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.01)


class Api:
    """The `openai` client, and what tests do with it again and again."""

    def __init__(self, url, key="key"):
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.files, self.batches = self.client.files, self.client.batches

    def upload(self, lines, **more):
        text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in lines)
        content = ("in.jsonl", io.BytesIO(text.encode()))
        return self.files.create(file=content, purpose="batch", **more)

    def create(self, lines, **more):
        return self.start(self.upload(lines).id, **more)

    def start(self, file_id, *, window="24h", endpoint="/v1/completions", **more):
        """A batch of a file that is there."""
        return self.batches.create(
            input_file_id=file_id, endpoint=endpoint, completion_window=window, **more
        )

    def wait(self, batch, *statuses, timeout_s=240):
        deadline_s = time.monotonic() + timeout_s
        while (now := self.batches.retrieve(batch.id)).status not in (statuses or ENDED):
            assert time.monotonic() < deadline_s, now
            time.sleep(0.02)
        return now

    def records(self, file_id):
        if file_id is None:
            return []
        return [json.loads(line) for line in self.files.content(file_id).text.splitlines()]

    def outcome(self, batch):
        """custom_id -> the text of its answer, or the code of its error."""
        good, bad = self.records(batch.output_file_id), self.records(batch.error_file_id)
        found = [(r["custom_id"], r["response"]["body"]["choices"][0]["text"]) for r in good]
        found += [(r["custom_id"], error_of(r)["code"]) for r in bad]
        assert len(dict(found)) == len(found), "a line has two results"
        return dict(found)


@contextlib.contextmanager
def serving(stand_in):
    """Its URL, while it runs."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(stand_in.app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=120)
        assert not thread.is_alive()
