"""Attacks on a real server with the tiny model; `scripts/attack` runs them."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.attack.policies import TRIGGER
from tests.batch.api import Api
from tests.request_lines import chat as chat_line
from tests.serving import start_server

pytestmark = pytest.mark.skipif(
    not os.environ.get("COSCHED_ATTACK"), reason="takes minutes: scripts/attack runs it"
)


def chat_s(server, text="hello", **headers):
    """How long a chat of 4 tokens takes [s]."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "default", "messages": messages, "max_tokens": 4, "ignore_eos": True}
    began_s = time.monotonic()
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    return time.monotonic() - began_s


def completion(server, fields, headers):
    body = {"model": "default", "prompt": "hello", "max_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)


OWN = {"cosched": {"ttft_slo_ms": 1e-9, "tpot_slo_ms": 1e-9, "deadline_s": 1e-9}}
SIGNS = (
    ({}, {}),
    ({"priority": 2**31 - 1}, {}),
    ({"priority": 5, "custom_params": OWN}, {}),
    ({"service_tier": "auto", "custom_params": OWN}, {}),
    ({"custom_params": {"cosched": {"class": "online"}}}, {}),
    ({"custom_params": {"cosched": {}, "cosched_class": "online", "own": True}}, {}),
    ({}, {"x-smg-priority": "system"}),
    ({}, {"x-cosched-class": "online", "x-cosched-own": "1", "cosched-own": "true"}),
    ({}, {"x-slo-ttft-ms": "0.0000001", "x-slo-tpot-ms": "0.0000001"}),
    ({"state": {"own": True}, "scope": {"state": {"own": True}}}, {}),
)
OFFLINE_SIGNS = (
    ({"service_tier": "flex"}, {}),
    ({"priority": -1}, {}),
    ({}, {"x-smg-priority": "bulk"}),
    ({"priority": -1, "service_tier": "flex"}, {"x-cosched-own": "1"}),
)


def test_no_sign_of_a_class_gets_what_the_key_may_not_use(tiny_model, forks, tmp_path):
    """Key `chat` may send no offline work, `job` is offline whatever it says, and lines of a batch
    are offline whatever they say."""
    claims = {"keys": {"chat": {"max_offline": 0}, "job": {"class": "offline"}, "*": {}}}
    flags = ("--cosched-claims", json.dumps(claims), "--cosched-batches", str(tmp_path / "b"))
    with start_server(tiny_model, *flags, forks=forks) as server:
        before = server.states()[0]["online_prefill_tokens"]
        for fields, headers in SIGNS:
            reply = completion(server, fields, headers | {"authorization": "Bearer job"})
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 200:
                assert reply.headers["x-cosched-class"] == "offline", (fields, headers)
        lines = []
        for number, (fields, _) in enumerate(SIGNS):
            lines.append(chat_line(f"c{number}", **fields))
            lines.append(chat_line(f"h{number}") | {"headers": {"x-smg-priority": "system"}})
        api = Api(server.url)
        done = api.wait(api.create(lines, endpoint="/v1/chat/completions"), timeout_s=300)
        for record in api.records(done.output_file_id):
            assert record["response"]["body"]["service_tier"] == "flex", record
        assert server.states()[0]["online_prefill_tokens"] == before
        for fields, headers in OFFLINE_SIGNS:
            reply = completion(server, fields, headers | {"authorization": "Bearer chat"})
            assert reply.status_code == 429, (fields, headers, reply.text)
        # Targets below the floors do not slow down others.
        chat_s(server, authorization="Bearer chat")


def test_a_chat_is_answered_beside_20_000_offline_requests(tiny_model, forks):
    count, at_once = 20_000, 500
    with start_server(tiny_model, forks=forks) as server:
        alone_s = sorted(chat_s(server, f"alone {n}") for n in range(5))
        body = {"sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        body |= {"service_tier": "flex"}
        with ThreadPoolExecutor(count // at_once) as threads, httpx.Client() as client:
            for first in range(0, count, at_once):
                prompts = [f"number {first + n} of many" for n in range(at_once)]
                url, own = f"{server.url}/generate", body | {"text": prompts}
                threads.submit(client.post, url, json=own, timeout=900)
            most, until_s = 0, time.monotonic() + 300
            while most < count * 0.9 and time.monotonic() < until_s:
                state = server.states()[0]
                now = state["num_waiting_offline"] + state["num_running_offline"]
                if now < most:
                    break  # they end faster than they come
                most = now
                time.sleep(0.2)
            beside_s = sorted(chat_s(server, f"beside {n}") for n in range(5))
            httpx.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=60)
        chat_s(server)
    print(f"{most} at once; a chat took {beside_s[2]:.2f} s, alone {alone_s[2]:.2f} s")
    assert beside_s[-1] < 5, beside_s


@pytest.mark.parametrize("name", ["Raises", "Garbage", "Slow", "Hangs"])
def test_a_policy_that_fails_is_given_up_and_named(tiny_model, forks, name):
    flags = ("--cosched-policy", f"tests.attack.policies:{name}")
    with start_server(tiny_model, *flags, forks=forks) as server:
        chat_s(server)
        assert not server.states()[0]["failures"]
        began_s = time.monotonic()
        completion(server, {"max_tokens": TRIGGER, "ignore_eos": True}, {}).raise_for_status()
        print(f"answered after {time.monotonic() - began_s:.1f} s")
        completion(server, {"service_tier": "flex"}, {}).raise_for_status()
        chat_s(server)
        state = server.states()[0]
        assert state["policy_given_up"] and server.process.poll() is None, state
        assert "until the server is restarted" in server.log()
        assert f"policies:{name}' " in server.log(), "the policy is named"
