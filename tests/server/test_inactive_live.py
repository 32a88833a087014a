"""Installed without ``COSCHED_CONFIG``, the plugin leaves every answer as it is, byte for byte."""

from __future__ import annotations

import re

import httpx
import pytest

from cosched.config import ENV_VAR
from tests.serving import start_server

MESSAGES = [{"role": "user", "content": "Name three numbers."}]
GREEDY = {"temperature": 0, "max_tokens": 6}
SAMPLING = {"temperature": 0, "max_new_tokens": 6}
# A busy machine may put several tokens into one chunk.
ONE_TOKEN = {"max_tokens": 1, "stream": True}
WRONG_FOR_COSCHED = {"priority": "5", "custom_params": {"cosched": {"speed": 1}}}
HEADERS = {"x-slo-ttft-ms": "soon", "x-smg-priority": "low"}

REQUESTS = [
    ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, **ONE_TOKEN}),
    ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, "service_tier": "flexible"}),
    ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, **WRONG_FOR_COSCHED}),
    ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, "priority": "high"}),
    ("/v1/completions", {"prompt": ["One, two,", "Three, four,"], **GREEDY, "priority": -5}),
    ("/v1/completions", {"prompt": "One, two,", **GREEDY, **ONE_TOKEN}),
    ("/v1/completions", {"prompt": "", **GREEDY}),
    ("/generate", {"text": "One, two,", "sampling_params": SAMPLING, "priority": -5}),
    ("/generate", {"text": "Five, six,", "sampling_params": SAMPLING}),
    ("/generate", {"text": "One, two,", "sampling_params": SAMPLING, "priority": [1]}),
    ("/generate", {"sampling_params": SAMPLING}),
]

# What differs between any two runs: ids, times, and durations.
VARIES = re.compile(
    r'"(id|created|e2e_latency|response_sent_to_client_ts|\w*_time|\w*_ts|\w*throughput)":'
    r'("[^"]*"|[-\d.eE+]+|null)'
)


def answers(model, **env):
    """Status, content type and body of each request, on a fresh server."""
    found = []
    with start_server(model, module="tests.plain_sglang", env={ENV_VAR: "", **env}) as server:
        for path, body in REQUESTS:
            reply = httpx.post(server.url + path, json=body, headers=HEADERS, timeout=60)
            text = VARIES.sub(r'"\1":_', reply.text)
            found.append((path, reply.status_code, reply.headers["content-type"], text))
        info = httpx.get(f"{server.url}/get_server_info", timeout=30).json()
        assert "cosched" not in info["internal_states"][0]
    return found


@pytest.mark.server
def test_same_answers_with_and_without_the_inactive_plugin(tiny_model):
    stock = answers(tiny_model, SGLANG_PLUGINS="none")
    assert [status for _, status, _, _ in stock].count(200) == 8
    assert answers(tiny_model, SGLANG_PLUGINS="cosched") == stock
