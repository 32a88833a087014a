"""Classes and targets on the wire, from the openai client to the scheduler of a running server.

Each sign and each refusal: tests/wire/test_http.py.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.serving import GUARDED_ADMIN_KEY, GUARDED_FLAGS

numbers = itertools.count()
ONLINE, OFFLINE = "online", "offline"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def messages():
    # Never the same twice: a cached prompt needs no prefill.
    return [{"role": "user", "content": f"{next(numbers)} is a number. Name another."}]


def chat(client, **kwargs):
    kwargs = {"model": "m", "messages": messages(), "max_tokens": 4} | kwargs
    return client.chat.completions.create(**kwargs)


CASES = [
    ({}, ONLINE),
    ({"service_tier": "flex"}, OFFLINE),
    ({"extra_body": {"priority": -5}}, OFFLINE),
    ({"extra_headers": {"x-smg-priority": "bulk"}}, OFFLINE),
    ({"extra_headers": {"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "50"}}, ONLINE),
    ({"extra_body": {"custom_params": {"cosched": {"ttft_slo_ms": 800}}}}, ONLINE),
]
TIER = {ONLINE: "default", OFFLINE: "flex"}


@pytest.mark.parametrize(("kwargs", "expected"), CASES)
def test_chat(client, seen, kwargs, expected):
    reply = chat(client, **kwargs)
    assert reply.usage.completion_tokens == 4
    assert reply.service_tier == TIER[expected]
    assert seen() == {expected}


@pytest.mark.parametrize("name", [ONLINE, OFFLINE])
def test_chat_stream(client, seen, name):
    chunks = list(chat(client, service_tier=TIER[name], stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.service_tier for chunk in chunks} == {TIER[name]}
    assert seen() == {name}


def test_headers_of_the_reply(client, server):
    headers = {"x-slo-ttft-ms": "0.001", "x-slo-tpot-ms": "45"}
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=messages(), max_tokens=1, service_tier="flex", extra_headers=headers
    )
    assert raw.headers["x-cosched-class"] == OFFLINE
    assert raw.headers["x-cosched-targets"] == "ttft_slo_ms=250, tpot_slo_ms=45"
    assert raw.parse().service_tier == "flex"
    body = {"text": "one is", "sampling_params": {"max_new_tokens": 1}, "stream": True}
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert reply.headers["x-cosched-class"] == ONLINE
    assert "x-cosched-class" not in httpx.get(f"{server.url}/v1/models", timeout=120).headers


def test_completions(client, seen):
    prompts = [f"{next(numbers)} and {next(numbers)} and" for _ in range(3)]
    reply = client.completions.create(
        model="m", prompt=prompts, max_tokens=2, extra_body={"service_tier": "flex"}
    )
    assert len(reply.choices) == 3
    assert reply.service_tier == "flex"
    assert seen() == {OFFLINE}
    client.completions.create(model="m", prompt=f"{next(numbers)} or", max_tokens=2)
    assert seen() == {ONLINE}


def test_responses(client, server, seen):
    model = client.models.list().data[0].id
    reply = client.responses.create(
        model=model, input=f"{next(numbers)} or what", max_output_tokens=2, service_tier="flex"
    )
    assert reply.service_tier == "flex"
    assert seen() == {OFFLINE}
    events = client.responses.create(
        model=model, input=f"{next(numbers)} or so", max_output_tokens=2, stream=True
    )
    tiers = {event.response.service_tier for event in events if hasattr(event, "response")}
    assert tiers == {"default"}
    assert seen() == {ONLINE}


def test_anthropic(server, seen):
    body = {"model": "m", "max_tokens": 2, "messages": messages(), "service_tier": "flex"}
    reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=120)
    assert reply.status_code == 200 and reply.headers["x-cosched-class"] == OFFLINE
    assert seen() == {OFFLINE}
    body |= {"messages": messages(), "service_tier": "standard_only"}
    assert httpx.post(f"{server.url}/v1/messages", json=body, timeout=120).status_code == 200
    assert seen() == {ONLINE}
    body["service_tier"] = "default"
    reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=120)
    assert reply.status_code == 400
    assert "choose from auto, flex, standard_only" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("priority", "expected"), [(0, ONLINE), (-1, OFFLINE)])
@pytest.mark.parametrize("stream", [False, True])
def test_generate(server, seen, priority, expected, stream):
    body = {
        "text": [f"{next(numbers)} is", f"{next(numbers)} was"],
        "sampling_params": {"max_new_tokens": 3, "n": 1 if stream else 2},
        "stream": stream,
        "priority": priority,
    }
    assert httpx.post(f"{server.url}/generate", json=body, timeout=120).status_code == 200
    assert seen() == {expected}


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"service_tier": "flexible"}, "service_tier: unknown value 'flexible'; choose from auto"),
        ({"extra_headers": {"x-slo-ttft-ms": "-1"}}, "x-slo-ttft-ms: must be positive"),
        (
            {"extra_body": {"custom_params": {"cosched": {"ttft_slo_ms": 0}}}},
            "custom_params.cosched.ttft_slo_ms: must be positive",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_answered_with_400(client, seen, kwargs, named, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, stream=stream, **kwargs)
    assert named in str(caught.value)
    assert seen() == set()


def test_both_classes_at_once(client, seen):
    kwargs = [{"service_tier": "flex"} if i % 2 else {} for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(lambda each: chat(client, **each), kwargs))
    assert all(reply.usage.completion_tokens == 4 for reply in replies)
    assert seen() == {ONLINE, OFFLINE}


def test_who_asks_is_told_that_its_target_was_out_of_reach(servers):
    """A target of a nanosecond is over before anybody plans."""
    server = servers.get(*GUARDED_FLAGS)  # of the policy cosched, and with no floor
    asks = {"x-cosched-late": "1"}
    hopeless = asks | {"x-slo-ttft-ms": "0.000001"}
    body = {"model": "m", "max_tokens": 3}
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def chat_of(headers, **fields):
            fields = {**body, "messages": messages(), **fields}
            return client.post("/v1/chat/completions", json=fields, headers=headers)

        def num_overdue():
            return server.states(GUARDED_ADMIN_KEY)[0]["late"]["overdue"]

        online, offline = num_overdue()
        assert chat_of(hopeless).headers["x-cosched-late"] == "overdue"
        streamed = chat_of(hopeless, stream=True)
        assert streamed.headers["x-cosched-late"] == "overdue"
        assert chat_of(asks | {"x-slo-ttft-ms": "1e9"}).headers["x-cosched-late"] == "no"
        assert "x-cosched-late" not in chat_of({"x-slo-ttft-ms": "0.000001"}).headers
        params = {"max_new_tokens": 3}
        generate = {"text": "one is", "sampling_params": params, "stream": True}
        reply = client.post("/generate", json=generate, headers=hopeless)
        assert reply.text.startswith(": x-cosched-late: overdue\n\ndata: ")
        assert "cosched_late" not in reply.text
        assert num_overdue() == [online + 4, offline]
