"""Installed without ``COSCHED_CONFIG``, the plugin does nothing to any answer."""

from __future__ import annotations

import sys

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


@pytest.mark.server
def test_the_inactive_plugin_shows_in_no_answer(tiny_model, forks):
    """That it leaves SGLang's code as it is, tests/patches/test_seam.py compares."""
    env = {ENV_VAR: "", "SGLANG_PLUGINS": "cosched"}
    statuses = []
    with start_server(tiny_model, module="tests.plain_sglang", env=env, forks=forks) as server:
        for path, body in REQUESTS:
            reply = httpx.post(server.url + path, json=body, headers=HEADERS, timeout=120)
            statuses.append(reply.status_code)
            # SGLang quotes the file that refuses, and the checkout may be in a folder of that name.
            told = f"{reply.headers} {reply.text}".replace(sys.prefix, "")
            assert "cosched" not in told, path
            assert "flex" not in reply.text.replace("flexible", "")
        assert server.states() == [None]
    # What cosched refuses, SGLang takes, as far as it knows it at all.
    assert statuses == [200, 200, 200, 200, 400, 200, 200, 400, 200, 200, 400, 400]
