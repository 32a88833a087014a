"""One request must not end or stall a server: what did so, sent to a running one beside a chat.

Each is answered with 400, or fails its line of a batch alone, and the chat goes on.
"""

from __future__ import annotations

import json
import statistics
import threading
import time

import httpx
import openai
import pytest

from tests.batch.api import Api
from tests.request_lines import error_of
from tests.serving import start_server

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
VOCAB = 2048
KV_TOKENS = 6000
MOST_PROBE_S = 10.0
"""Of the median; one probe may meet whatever else the machine does."""

LEAST_PROBES = 3
"""Of fewer a median says nothing."""

MOST_STALL_S = 60.0
MOST_ANSWER_S = 30.0


@pytest.fixture(scope="module")
def server(tiny_model, forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    flags = ("--max-total-tokens", str(KV_TOKENS), "--cosched-batches", str(folder))
    with start_server(tiny_model, *flags, forks=forks) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def probes(client):
    """A chat again and again while a test runs: each is answered, and soon."""
    done = threading.Event()
    taken_s = []

    def probe():
        while not taken_s or not done.wait(0.05):
            started_s = time.monotonic()
            client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": f"hello {len(taken_s)}"}],
                max_tokens=3,
                extra_body={"ignore_eos": True},
            )
            taken_s.append(time.monotonic() - started_s)

    thread = threading.Thread(target=probe)
    thread.start()
    yield taken_s
    until_s = time.monotonic() + MOST_STALL_S
    while len(taken_s) < LEAST_PROBES and time.monotonic() < until_s:
        time.sleep(0.01)
    done.set()
    thread.join(timeout=120)
    assert not thread.is_alive() and taken_s
    assert statistics.median(taken_s) < MOST_PROBE_S and max(taken_s) < MOST_STALL_S, taken_s


def post(server, path, body):
    started_s = time.monotonic()
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + path, content=content, headers=headers, timeout=120)
    assert time.monotonic() - started_s < MOST_ANSWER_S
    return answer


def body_of(path, fields):
    """A request with the fields by the names of its endpoint."""
    if path == GENERATE:
        top = {key: fields[key] for key in fields.keys() & OUTSIDE_PARAMS}
        params = {key: value for key, value in fields.items() if key not in OUTSIDE_PARAMS}
        return {"text": "hello there", "sampling_params": {"max_new_tokens": 4, **params}} | top
    if path == CHAT:
        messages = [{"role": "user", "content": "hello there"}]
        return {"model": "default", "messages": messages, "max_tokens": 4} | fields
    return {"model": "default", "prompt": "hello there", "max_tokens": 4} | fields


OUTSIDE_PARAMS = {"return_logprob", "top_logprobs_num", "logprob_start_len", "priority", "text"}

BIG_ENUM = {"enum": [f"v{i}" for i in range(200_000)]}
LOOP = {"$ref": "#"}
RULES = "root ::= a\na ::= b\nb ::= a"


def schema(value):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
    return {GENERATE: {"json_schema": json.dumps(value)}, CHAT: {"response_format": form}}


ATTACKS = [
    *({path: {"top_k": value} for path in (GENERATE, CHAT, COMPLETIONS)} for value in
      (VOCAB + 1, 2**31, 2**32, 2**62, 2**63)),
    *({GENERATE: {"return_logprob": True, "top_logprobs_num": value},
       CHAT: {"logprobs": True, "top_logprobs": value},
       COMPLETIONS: {"logprobs": value}} for value in (VOCAB + 1, 10**5, 2**31, 2**62, 2**64)),
    *({GENERATE: {"return_logprob": True, "logprob_start_len": value}} for value in
      (-3, -100, -(2**62), -(2**63), 10**6)),
    {path: {"stop_regex": r"(?:(a+)+\1)$"} for path in (GENERATE, CHAT, COMPLETIONS)},
    schema(BIG_ENUM),
    schema(LOOP),
    {path: {"ebnf": RULES} for path in (GENERATE, CHAT, COMPLETIONS)},
    {path: {"logit_bias": {"5": 1e300}} for path in (GENERATE, CHAT, COMPLETIONS)},
    {path: {"priority": 2**64} for path in (GENERATE, CHAT, COMPLETIONS)},
    {path: {"n": 10**9} for path in (GENERATE, CHAT, COMPLETIONS)},
    {GENERATE: {"text": ""}},
    {GENERATE: {"text": ["hello", ""]}},
    {GENERATE: {"text": "river " * 500_000}, COMPLETIONS: {"prompt": "river " * 500_000},
     CHAT: {"messages": [{"role": "user", "content": "river " * 500_000}]}},
]  # fmt: skip

REQUESTS = [(path, fields) for attack in ATTACKS for path, fields in attack.items()]
NAMES = [f"{path}-{json.dumps(fields)[:40]}" for path, fields in REQUESTS]


@pytest.mark.parametrize(("path", "fields"), REQUESTS, ids=NAMES)
def test_a_request_that_would_end_or_stall_the_server_is_a_400(server, path, fields):
    answer = post(server, path, body_of(path, fields))
    assert answer.status_code == 400, answer.text[:300]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_as_a_line_of_a_batch_it_fails_alone(server, path):
    bodies = [body_of(of, fields) for of, fields in REQUESTS if of == path]
    bodies += [body_of(path, {}) for _ in range(5)]
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": path, "body": body}
        for n, body in enumerate(bodies)
    ]
    api = Api(server.url)
    done = api.wait(api.create(lines, endpoint=path))
    assert done.status == "completed" and done.request_counts.completed == 5
    failed = api.records(done.error_file_id)
    assert [record["custom_id"] for record in failed] == [f"{n}" for n in range(len(bodies) - 5)]
    assert all(error_of(record)["code"] and error_of(record)["message"] for record in failed)
    codes = [error_of(record)["code"] for record in failed]
    # What only the compiled grammar shows is found by the server that answers.
    assert codes.count("invalid_value") >= len(codes) - 2, codes


@pytest.mark.parametrize("path", [GENERATE, CHAT, "/v1/audio/transcriptions"])
def test_a_body_of_20_mb_is_a_413_at_once(server, path):
    answer = post(server, path, {"text": "x" * 20_000_000})
    assert answer.status_code == 413, answer.text[:300]
    assert "limits.body_mb" in answer.text


def test_a_body_without_a_length_is_a_413_as_soon_as_it_is_too_large(server):
    sent = []

    def parts():
        for _ in range(400):
            sent.append(1)
            yield b" " * 100_000

    answer = httpx.post(server.url + GENERATE, content=parts(), timeout=120)
    assert answer.status_code == 413, answer.text[:300]


def test_a_pattern_that_python_matches_in_exponential_time_stalls_no_one(server):
    params = {"max_new_tokens": 60, "ignore_eos": True, "stop_regex": r"(\w+\s?)+~{9}$"}
    answer = post(server, GENERATE, {"text": "hello there", "sampling_params": params})
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["completion_tokens"] == 60


def test_a_stop_pattern_stops_in_a_chat(server):
    body = body_of(CHAT, {"stop_regex": r"\w\w", "max_tokens": 200, "ignore_eos": True})
    answer = post(server, CHAT, body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 200


def test_an_offline_prompt_near_the_size_of_the_kv_memory_is_refused_when_it_comes(server):
    for num_tokens in (KV_TOKENS * 2, KV_TOKENS - 3, KV_TOKENS * 7 // 8 + 1):
        body = {"input_ids": [7] * num_tokens, "priority": -1}
        answer = post(server, GENERATE, body | {"sampling_params": {"max_new_tokens": 1}})
        assert answer.status_code == 400, answer.text[:300]
        assert "tokens are above" in answer.text or "longer than" in answer.text


def test_many_prompts_in_one_request_are_served(server):
    params = {"max_new_tokens": 1}
    answer = post(server, GENERATE, {"text": ["hello there"] * 64, "sampling_params": params})
    assert answer.status_code == 200 and len(answer.json()) == 64
