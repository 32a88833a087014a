"""From HTTP to what is sent to the scheduler: SGLang's app, endpoints and tokenizer manager.

Only the socket to the scheduler is cut: what would go there is kept, and an answer made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from fastapi import HTTPException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cosched.bootstrap
from cosched.batch.service import InProcessTransport
from cosched.limits.api_keys import ApiKeys
from cosched.server.front import own_request
from cosched.server.preparation import AT_ONCE, LoopLag, PreparationGate
from cosched.wire import OFFLINE_PRIORITY

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATE, EMBEDDINGS, MESSAGES = "/generate", "/v1/embeddings", "/v1/messages"

_MESSAGES = [{"role": "user", "content": "hello"}]
MINIMAL = {
    CHAT: {"messages": _MESSAGES, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"model": "m", "input": "hello", "max_output_tokens": 2},
    EMBEDDINGS: {"input": "hello"},
    GENERATE: {"text": "hello", "sampling_params": {"max_new_tokens": 2}},
    MESSAGES: {"model": "m", "messages": _MESSAGES, "max_tokens": 2},
}
TIERED = [CHAT, COMPLETIONS, RESPONSES]
OPENAI = [*TIERED, EMBEDDINGS]
ALL = sorted(MINIMAL)


class Front:
    """The HTTP side of a server. `sent` is what the last request sent to the scheduler."""

    def __init__(self, app, manager):
        self.app = app
        self.manager = manager
        self.text = "hi"
        self.reason = {"type": "length", "length": 1}
        self.late = None
        """What the scheduler says of the TTFT target."""
        self.costs = None
        """What the scheduler says that the request cost so far, per token [s]."""
        self.sent = []

    def post(self, path, body=None, *, headers=(), root_path="", **changes):
        self.sent.clear()
        body = {**MINIMAL.get(path, {}), **(body or {}), **changes}
        headers = {k.replace("_", "-"): v for k, v in dict(headers).items()}

        async def send():
            transport = httpx.ASGITransport(self.app, root_path=root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                return await client.post(root_path + path, json=body, headers=headers)

        return asyncio.run(send())

    @property
    def priorities(self):
        return [request.priority for request in self.sent]

    @property
    def targets(self):
        return [
            (request.sampling_params.custom_params or {}).get("cosched") for request in self.sent
        ]


@pytest.fixture(scope="module")
def front(tiny_model):
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    from cosched_patches import http, openai_endpoints
    from cosched_patches.seam import install

    hooks = {http.read_body, http.render_messages, http.classify, http.check_values}
    hooks |= {http.keep_status}
    hooks.add(http.note_released)
    hooks.add(openai_endpoints.word_error)
    install(seam for seam in http.SEAMS + openai_endpoints.SEAMS if seam.hook in hooks)
    # Of this one, only what it does before the server runs.
    http.prepare_app(None)
    flags = ["--model-path", str(tiny_model), "--served-model-name", "m"]
    if not cosched.bootstrap.has_cuda():
        flags += ["--device", "cpu", "--attention-backend", "torch_native"]
    server_args = prepare_server_args(flags)
    server_args.resolve_once()
    publish(server_args, role="tokenizer")
    manager, templates = init_tokenizer_manager(server_args, PortArgs.init_new(server_args))
    manager.max_req_input_len = 1000
    manager.auto_create_handle_loop = lambda: None
    # Each stream would end with a wait of 2 s for a client that may be gone.
    manager.create_abort_task = lambda obj: None
    front = Front(http_server.app, manager)

    async def answer(*, obj, state, request=None):
        manager.rid_to_state.pop(obj.rid, None)
        yield {
            "text": front.text,
            "output_ids": [5],
            "embedding": [0.5],
            "meta_info": {
                "id": obj.rid,
                "finish_reason": front.reason,
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "cached_tokens": 0,
                "weight_version": "default",
                **({"cosched_late": [front.late]} if front.late else {}),
                **({"device_seconds": front.costs} if front.costs else {}),
            },
        }

    manager._dispatch_to_scheduler = front.sent.append
    manager._stream_one_response = answer
    state = http_server.app.state
    serving = {
        "openai_serving_chat": OpenAIServingChat(manager, templates),
        "openai_serving_completion": OpenAIServingCompletion(manager, templates),
        "openai_serving_embedding": OpenAIServingEmbedding(manager, templates),
        "openai_serving_responses": OpenAIServingResponses(manager, templates),
    }
    serving["anthropic_serving"] = AnthropicServing(serving["openai_serving_chat"])
    for name, endpoint in serving.items():
        setattr(state, name, endpoint)
    before = http_server.get_global_state()
    http_server.set_global_state(SimpleNamespace(tokenizer_manager=manager))
    yield front
    http_server.set_global_state(before)
    for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler):
        socket.close(linger=0)


@contextlib.contextmanager
def embedding_model(front):
    """The tiny model is no embedding model; let it pass for one up to the scheduler."""
    front.manager.is_generation = False
    try:
        yield
    finally:
        front.manager.is_generation = True


def post(front, path, **kwargs):
    with embedding_model(front) if path == EMBEDDINGS else contextlib.nullcontext():
        return front.post(path, **kwargs)


def refused(response, *parts):
    assert response.status_code == 400, response.text
    for part in parts:
        assert part in response.text


PRIORITY = OFFLINE_PRIORITY
CLASSES = [
    ({}, {}, None),
    *(({"priority": priority}, {}, priority) for priority in (-7, 0, 3)),
    ({"service_tier": "flex"}, {}, PRIORITY),
    ({"service_tier": "flex", "priority": -2}, {}, -2),
    ({}, {"x_smg_priority": "bulk"}, PRIORITY),
    ({"priority": 4}, {"x_vllm_priority": "5"}, -5),
    ({"priority": -4}, {"x_vllm_priority": "-5"}, 5),
    ({"service_tier": "flex"}, {"x_vllm_priority": "-5"}, PRIORITY),
]
WRONG = [
    ({"service_tier": "flex", "priority": 1}, {}, ["service_tier", "'flex'", "priority 1"]),
    *(({"priority": wrong}, {}, ["priority", "integer"]) for wrong in ("-5", -5.0, True, [-5])),
    ({}, {"x_smg_priority": "bulky"}, ["x-smg-priority", "bulk, default, interactive, system"]),
    ({}, {"x_vllm_priority": "high"}, ["x-vllm-priority", "integer", "'high'"]),
    *(({}, {"x-slo-ttft-ms": wrong}, ["x-slo-ttft-ms"]) for wrong in ("0", "-1", "soon", "inf")),
    ({}, {"x-slo-tpot-ms": "0"}, ["x-slo-tpot-ms"]),
    *(({}, {"x-data-parallel-rank": wrong}, ["x-data-parallel-rank"]) for wrong in ("flex", "1.5")),
]
WRONG_FOR_OPENAI = [
    (
        {"service_tier": "flexible"},
        {},
        ["service_tier", "'flexible'", "auto, default, flex, priority, scale"],
    ),
    (
        {"custom_params": {"cosched": {"ttft_slo_ms": -1}}},
        {},
        ["custom_params.cosched.ttft_slo_ms", "-1"],
    ),
]


class TestClass:
    @pytest.mark.parametrize("path", ALL)
    @pytest.mark.parametrize(("fields", "headers", "priority"), CLASSES)
    def test_the_class_arrives_from_every_endpoint(self, front, path, fields, headers, priority):
        response = post(front, path, headers=headers, root_path="/v2", **fields)
        assert response.status_code == 200, path
        assert (front.priorities, front.targets) == ([priority], [None])

    @pytest.mark.parametrize("path", OPENAI)
    @pytest.mark.parametrize("tier", ["auto", "default", "priority", "scale"])
    def test_other_tiers_say_nothing(self, front, path, tier):
        assert post(front, path, service_tier=tier).status_code == 200
        assert front.priorities == [None]

    @pytest.mark.parametrize("tier", ["auto", "standard_only"])
    def test_anthropic_has_tiers_of_its_own(self, front, tier):
        assert front.post(MESSAGES, service_tier=tier).status_code == 200
        assert front.priorities == [None]
        refused(front.post(MESSAGES, service_tier="default"), "auto, flex, standard_only")

    @pytest.mark.parametrize("path", ALL)
    @pytest.mark.parametrize("stream", [False, True])
    def test_every_endpoint_names_a_wrong_value(self, front, path, stream):
        for fields, headers, parts in WRONG + WRONG_FOR_OPENAI * (path in OPENAI):
            refused(post(front, path, headers=headers, stream=stream, **fields), *parts)
            assert not front.sent

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
    def test_streams(self, front, path):
        response = front.post(path, priority=-4, stream=True)
        assert response.status_code == 200
        assert "data: [DONE]" in response.text
        assert front.priorities == [-4]

    def test_batches_and_parallel_samples(self, front):
        front.post(COMPLETIONS, prompt=["a", "b"], service_tier="flex")
        assert front.priorities == [OFFLINE_PRIORITY] * 2
        front.post(GENERATE, text=["a", "b", "c"], priority=-1)
        assert front.priorities == [-1] * 3
        front.post(CHAT, n=2, service_tier="flex")
        assert set(front.priorities) == {OFFLINE_PRIORITY}

    def test_vertex_parameters_are_checked_too(self, front):
        body = {"instances": [{"text": "hello"}], "parameters": {"priority": "low"}}
        refused(front.post("/vertex_generate", body), "priority", "'low'")
        body["parameters"]["priority"] = -3
        assert front.post("/vertex_generate", body).status_code == 200
        assert front.priorities == [-3]


HEADERS = {"x_slo_ttft_ms": "500", "x_slo_tpot_ms": "20.5"}


class TestTargets:
    @pytest.mark.parametrize("path", ALL)
    def test_headers(self, front, path):
        assert post(front, path, headers=HEADERS).status_code == 200
        assert front.targets == [{"ttft_slo_ms": 500.0, "tpot_slo_ms": 20.5}]

    @pytest.mark.parametrize("path", OPENAI)
    def test_body_of_openai_wins(self, front, path):
        params = {"cosched": {"ttft_slo_ms": 9, "deadline_s": 60}, "mine": 1}
        assert post(front, path, custom_params=params, headers=HEADERS).status_code == 200
        targets = {"ttft_slo_ms": 9, "tpot_slo_ms": 20.5, "deadline_s": 60}
        assert front.targets == [targets]
        if path == CHAT:
            custom = front.sent[0].sampling_params.custom_params
            assert custom == {"mine": 1, "cosched": targets}, "other parameters stay"

    def test_batch_with_targets_of_their_own(self, front):
        params = [
            {"max_new_tokens": 1},
            {"max_new_tokens": 2, "custom_params": {"cosched": {"tpot_slo_ms": 7}}},
        ]
        headers = {"x_slo_tpot_ms": "20.5"}
        front.post(GENERATE, text=["a", "b"], sampling_params=params, headers=headers)
        assert front.targets == [{"tpot_slo_ms": 20.5}, {"tpot_slo_ms": 7}]
        assert [request.sampling_params.max_new_tokens for request in front.sent] == [1, 2]

    @pytest.mark.parametrize("stream", [False, True])
    def test_wrong_target_in_generate(self, front, stream):
        bad = {"custom_params": {"cosched": {"speed": 1}}}
        refused(
            front.post(GENERATE, sampling_params=bad, stream=stream),
            "sampling_params.custom_params.cosched.speed",
            "deadline_s, output_tokens_hint, tpot_slo_ms, ttft_slo_ms",
        )
        refused(
            front.post(GENERATE, text=["a", "b"], sampling_params=[{}, bad], stream=stream),
            "sampling_params[1].custom_params.cosched.speed",
        )


class TestEmbeddedEngine:
    """Programs that call the tokenizer manager themselves: no HTTP request comes with it."""

    def generate(self, front, **fields):
        from sglang.srt.managers.io_struct import GenerateReqInput

        front.sent.clear()
        obj = GenerateReqInput(text="hello", **fields)

        async def first():
            return await anext(front.manager.generate_request(obj, None))

        return asyncio.run(first())

    def test_class_and_targets(self, front):
        params = {"custom_params": {"cosched": {"deadline_s": 5}}}
        self.generate(front, sampling_params=params, priority=-1)
        assert front.priorities == [-1]
        assert front.targets == [{"deadline_s": 5}]

    def test_wrong_values(self, front):
        with pytest.raises(ValueError, match=r"^priority: must be an integer, not 'x'"):
            self.generate(front, priority="x")
        params = {"custom_params": {"cosched": {"deadline_s": 0}}}
        with pytest.raises(ValueError, match=r"custom_params\.cosched\.deadline_s: "):
            self.generate(front, sampling_params=params)

    def test_sampling_params_of_the_caller_are_not_changed(self, front):
        params = {"max_new_tokens": 1}
        front.post(GENERATE, sampling_params=params, headers=HEADERS)
        self.generate(front, sampling_params=params)
        assert params == {"max_new_tokens": 1}


class TestReply:
    @pytest.mark.parametrize("path", ALL)
    @pytest.mark.parametrize(
        ("fields", "name", "tier"),
        [({}, "online", "default"), ({"priority": -1}, "offline", "flex")],
    )
    def test_class(self, front, path, fields, name, tier):
        response = post(front, path, **fields)
        assert response.status_code == 200
        assert response.headers["x-cosched-class"] == name
        assert "x-cosched-targets" not in response.headers
        assert response.json().get("service_tier") == (tier if path in TIERED else None)
        assert int(response.headers["content-length"]) == len(response.content)

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize(("tier", "said"), [("flex", "flex"), ("auto", "default")])
    def test_every_chunk_of_a_stream(self, front, path, tier, said):
        options = {"include_usage": True}
        response = front.post(path, service_tier=tier, stream=True, stream_options=options)
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert len(chunks) > 1
        assert {chunk["service_tier"] for chunk in chunks} == {said}

    def test_the_events_that_carry_a_response(self, front):
        response = front.post(RESPONSES, service_tier="flex", stream=True)
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        found = [event["response"]["service_tier"] for event in events if "response" in event]
        assert len(found) == 3 and set(found) == {"flex"}

    def test_a_text_that_looks_like_a_field_stays(self, front, monkeypatch):
        text = 'data: {"id":1, "response":{"id":2}\n\n{"id":'
        monkeypatch.setattr(front, "text", text)
        for path, stream in itertools.product(TIERED, [False, True]):
            response = front.post(path, stream=stream)
            shown = json.dumps(text)[1:-1]
            assert shown in response.text or shown.replace(" ", "") in response.text, path

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, GENERATE, MESSAGES])
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("late", ["overdue", None])
    def test_who_asks_is_told_whether_its_target_was_out_of_reach(
        self, front, monkeypatch, path, stream, late
    ):
        monkeypatch.setattr(front, "late", late)
        response = front.post(path, stream=stream, headers={"x_cosched_late": "1"})
        comment = f": x-cosched-late: {late or 'no'}\n\n"
        told = response.headers.get("x-cosched-late")
        # These streams begin before anything is known.
        begins_early = stream and path in (RESPONSES, GENERATE, MESSAGES)
        assert told == (None if begins_early else late or "no")
        assert response.text.count(comment) == begins_early
        for headers, fields in (({}, {}), ({"x_cosched_late": "1"}, {"priority": -1})):
            if path == MESSAGES and fields:
                continue
            response = front.post(path, stream=stream, headers=headers, **fields)
            assert "x-cosched-late" not in response.headers
            assert "cosched_late" not in response.text and "x-cosched-late" not in response.text

    def test_of_several_prompts_one_that_is_late_is_told(self, front, monkeypatch):
        monkeypatch.setattr(front, "late", "crowded")
        headers = {"x_cosched_late": "1"}
        response = front.post(GENERATE, text=["a", "b"], headers=headers)
        assert response.headers["x-cosched-late"] == "crowded"
        refused(
            front.post(GENERATE, headers={"x_cosched_late": "yes"}),
            "x-cosched-late: unknown value 'yes'; choose from 0, 1",
        )

    @pytest.mark.parametrize("path", [*TIERED, GENERATE])
    @pytest.mark.parametrize("stream", [False, True])
    def test_usage_says_what_a_request_cost_if_it_asks(self, front, monkeypatch, path, stream):
        monkeypatch.setattr(front, "costs", [None, 0.25])
        monkeypatch.setattr(front, "text", '"usage":{"prompt_tokens":1}')
        options = {} if path == RESPONSES else {"stream_options": {"include_usage": True}}
        fields = {"stream": stream, **(options if stream else {})}
        response = front.post(path, headers={"x_cosched_usage": "1"}, **fields)
        (sent,) = front.sent
        assert sent.sampling_params.custom_params["cosched_server"] == {"device_seconds": True}
        lines = response.text.splitlines() if stream else ["data: " + response.text]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        last = events[-1].get("response", events[-1])
        told = last["meta_info"] if path == GENERATE else last["usage"]
        assert told["device_seconds"] == 0.25
        monkeypatch.setattr(front, "costs", None)
        assert "device_seconds" not in front.post(path, **fields).text

    def test_targets_as_they_are_granted(self, front):
        headers = {"x_slo_ttft_ms": "0.001", "x_slo_tpot_ms": "30"}
        response = front.post(CHAT, headers=headers)
        # The server's own are 1000 ms and 50 ms.
        assert response.headers["x-cosched-targets"] == "ttft_slo_ms=250, tpot_slo_ms=30"
        # The scheduler raises them, for requests that come another way too.
        assert front.targets == [{"ttft_slo_ms": 0.001, "tpot_slo_ms": 30.0}]

    def test_a_refusal_of_a_stream_that_has_begun_is_its_last_part(self, front, monkeypatch):
        async def refuse(**_):
            raise HTTPException(503, "the server is shutting down")
            yield

        monkeypatch.setattr(front.manager, "_stream_one_response", refuse)
        for path, stream in [(GENERATE, False), (CHAT, True), (CHAT, False)]:
            assert front.post(path, stream=stream).status_code == 503
        begun = front.post(GENERATE, stream=True)
        assert begun.status_code == 200 and begun.text.endswith("data: [DONE]\n\n")
        error = json.loads(begun.text.splitlines()[0].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == (503, "the server is shutting down")

    def test_the_reply_names_a_seed_that_has_no_effect(self, front):
        assert front.post(CHAT, seed=3).headers["x-cosched-ignored"] == "seed"
        assert "x-cosched-ignored" not in front.post(CHAT, seed=3, temperature=0).headers


@pytest.fixture
def claiming(front, monkeypatch):
    """`claiming(**claims)`: from now on the server has these claims."""
    from cosched_patches.http import front as front_of_process

    def claim(**claims):
        monkeypatch.setenv("COSCHED_CONFIG", json.dumps({"claims": claims}))
        front_of_process.cache_clear()

    yield claim
    front_of_process.cache_clear()


class TestClaims:
    KEY = {"authorization": "Bearer secret"}  # noqa: RUF012

    def test_signs_that_are_ignored(self, front, claiming):
        claiming(ignore=["priority", "service_tier", "body_targets", "class_header"])
        params = {"cosched": {"speed": 1}, "mine": 1}
        for path in (CHAT, GENERATE):
            nested = {"sampling_params": {"custom_params": params}}
            body = nested if path == GENERATE else {"custom_params": params}
            fields = {"priority": -4, "service_tier": "nonsense", **body}
            response = front.post(path, headers={"x_smg_priority": "bulk"}, **fields)
            assert response.status_code == 200, response.text
            assert front.priorities == [None]
            assert front.sent[0].sampling_params.custom_params == {"mine": 1}
            assert response.headers["x-cosched-class"] == "online"

    def test_class_of_a_key(self, front, claiming):
        claiming(keys={"secret": {"class": "offline"}})
        response = front.post(CHAT, headers=self.KEY, priority=3)
        assert front.priorities == [OFFLINE_PRIORITY]
        assert response.json()["service_tier"] == "flex"
        front.post(CHAT)
        assert front.priorities == [None]

    def test_name_of_a_key(self, front, claiming):
        claiming(keys={"secret": {"name": "acme"}, "other": {}})
        lies = {"custom_params": {"cosched_server": {"name": "rich"}, "mine": 1}}
        digest = hashlib.sha256(b"other").hexdigest()
        for headers, name in (
            (self.KEY, "acme"),
            ({"authorization": "Bearer other"}, digest[:8]),
            ({"authorization": "Bearer third"}, None),
            ({}, None),
        ):
            front.post(CHAT, lies, headers=headers)
            expected = {"mine": 1, **({"cosched_server": {"name": name}} if name else {})}
            assert front.sent[0].sampling_params.custom_params == expected

    def test_requests_are_prepared_in_the_turn_of_the_key_that_pays(self, front, claiming):
        """Whatever its tenants are called."""
        claiming(keys={"secret": {"name": "acme"}})
        gate, turns = PreparationGate(LoopLag()), []
        enter = gate.enter
        gate.enter = lambda key: turns.append(key) or enter(key)
        front.app.state.cosched_preparation = gate
        secret = hashlib.sha256(b"secret").hexdigest()
        names = ApiKeys(names={f"sha256:{secret}": "acme"}, has_owners=True)

        async def ask(owner):
            state = own_request(owner=owner, tenant="t", keys=names)
            transport = InProcessTransport(front.app, state=state)
            async with httpx.AsyncClient(transport=transport, base_url="http://own") as client:
                return await client.post(CHAT, json=MINIMAL[CHAT])

        try:
            for headers in (self.KEY, {"authorization": "Bearer other"}):
                assert front.post(CHAT, headers=headers, service_tier="flex").status_code == 200
            for owner in (secret, "0123456789"):
                assert asyncio.run(ask(owner)).status_code == 200
        finally:
            del front.app.state.cosched_preparation
        assert turns == ["acme", "", "acme", "01234567"]

    def test_bounds_of_a_key(self, front, claiming):
        claiming(keys={"secret": {"floors": {"ttft_ms": 800}, "ceilings": {"tpot_ms": 60}}})
        params = {"cosched": {"tpot_slo_ms": 900}}
        headers = {**self.KEY, "x_slo_ttft_ms": "300"}
        response = front.post(COMPLETIONS, headers=headers, custom_params=params)
        assert front.targets == [{"ttft_slo_ms": 800.0, "tpot_slo_ms": 60.0}]
        assert response.headers["x-cosched-targets"] == "ttft_slo_ms=800, tpot_slo_ms=60"

    def test_too_much_under_way(self, front, claiming):
        claiming(keys={"secret": {"max_online": 2}})
        response = front.post(COMPLETIONS, headers=self.KEY, prompt=["a", "b", "c"])
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert "may have 2 online sequences in flight" in response.text
        assert not front.sent
        for _ in range(3):
            # What is over is not counted any more, nor is what failed or needs no model.
            assert front.post(CHAT, headers=self.KEY, n=2).status_code == 200
            assert front.post(CHAT, headers=self.KEY, n=2, stream=True).status_code == 200
            response = front.post(CHAT, headers=self.KEY, n=2, messages=[])
            refused(response)
            assert "service_tier" not in response.text
        fields = {"prompt": ["a", "b", "c"], "service_tier": "flex"}
        assert front.post(COMPLETIONS, headers=self.KEY, **fields).status_code == 200

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES])
    def test_what_the_server_asks_itself_is_offline_and_no_key_counts_it(
        self, front, claiming, path
    ):
        claiming(
            ignore=["priority", "service_tier", "class_header", "body_targets"],
            keys={"*": {"max_offline": 0}},
        )
        transport = InProcessTransport(front.app, state=own_request(30.0))
        for fields in ({}, {"priority": 3}, {"service_tier": "flex"}):
            front.sent.clear()

            async def ask(body):
                state = {"state": own_request(60.0, num_behind=7)}
                async with httpx.AsyncClient(transport=transport, base_url="http://own") as client:
                    return await client.post(path, json=body, extensions=state)

            with embedding_model(front) if path == EMBEDDINGS else contextlib.nullcontext():
                response = asyncio.run(ask({**MINIMAL[path], **fields}))
            assert response.status_code == 200, response.text
            assert front.priorities == [OFFLINE_PRIORITY]
            assert response.headers["x-cosched-class"] == "offline"
            assert front.targets == [{"deadline_s": 60.0}]
            told = front.sent[0].sampling_params.custom_params["cosched_server"]
            assert told["behind"] == 7
        assert front.post(CHAT, priority=3).status_code == 200

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES])
    def test_what_the_operator_aborts_is_sent_again_if_it_is_the_servers_own(
        self, front, monkeypatch, path
    ):
        from cosched.batch.jsonl.line_results import TryAgain, judge

        monkeypatch.setattr(front, "reason", {"type": "abort", "message": "Aborted"})
        transport = InProcessTransport(front.app, state=own_request(30.0))

        async def ask():
            async with httpx.AsyncClient(transport=transport, base_url="http://own") as client:
                return await client.post(path, json=MINIMAL[path])

        with embedding_model(front) if path == EMBEDDINGS else contextlib.nullcontext():
            response = asyncio.run(ask())
        assert response.status_code == 503 and "send it again" in response.text
        verdict = judge(response)
        assert isinstance(verdict, TryAgain) and verdict.failure is None
        if path != EMBEDDINGS:
            assert front.post(path).status_code == 200, "a client sees the finish reason"

    @pytest.mark.parametrize("n", [1, 3])
    def test_an_aborted_request_says_what_it_cost_when_the_scheduler_has_ended_it(
        self, front, monkeypatch, n
    ):
        costs = []

        async def hang_up(*, obj, state, request=None):
            if obj.sampling_params.get("max_new_tokens") and len(front.sent) <= 1 < n:
                del front.manager.rid_to_state[obj.rid]
                yield {"meta_info": {}}  # the prompt of all samples
                return
            raise ValueError("Request is disconnected from the client side")
            yield

        async def ask():
            transport = InProcessTransport(front.app, state=own_request(30.0, aborted=costs.append))
            async with httpx.AsyncClient(transport=transport, base_url="http://own") as client:
                response = await client.post(CHAT, json={**MINIMAL[CHAT], "n": n})
            await asyncio.sleep(0)
            assert response.status_code == 400 and not costs, "it still runs"
            for state in list(front.manager.rid_to_state.values()):
                state.out_list.append({"meta_info": {"device_seconds": [0.1, 0.25]}})
                state.finished = True
                state.event.set()
            front.manager.rid_to_state.clear()
            async with asyncio.timeout(120):
                while not costs:
                    await asyncio.sleep(0.001)

        front.sent.clear()
        monkeypatch.setattr(front.manager, "_stream_one_response", hang_up)
        asyncio.run(ask())
        assert costs == [0.25 * n]

    def test_no_key_stands_before_the_end_of_a_request(self, front, claiming):
        claiming(keys={"*": {"max_online": 0}})
        assert front.post(CHAT).status_code == 429
        assert front.post("/tokenize", {"prompt": "a"}).status_code != 429

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data())
    def test_equal_spellings_count_as_what_goes_to_the_scheduler(self, front, claiming, data):
        path = data.draw(st.sampled_from([CHAT, COMPLETIONS, GENERATE, EMBEDDINGS]))
        num_prompts = 1 if path == CHAT else data.draw(st.integers(1, 3))
        num_samples = 1 if path == EMBEDDINGS else data.draw(st.integers(1, 3))
        tokens = data.draw(st.booleans())
        prompts = [[5, 6]] * num_prompts if tokens else ["a"] * num_prompts
        one = num_prompts == 1 and data.draw(st.booleans())
        prompt = prompts[0] if one else prompts
        spelled = data.draw(st.sampled_from([int, float, str]))
        limit = num_prompts * num_samples - data.draw(st.integers(0, 1))
        claiming(keys={"secret": {"max_online": limit}})
        if path == GENERATE:
            params = {"n": num_samples, "max_new_tokens": 2}
            if not one and data.draw(st.booleans()):
                params = [params] * num_prompts
            # SGLang itself takes only whole numbers here.
            name = "input_ids" if tokens else "text"
            body = {"text": None, name: prompt, "sampling_params": params}
        elif path == EMBEDDINGS:
            body = {"input": prompt}
        else:
            body = {"n": spelled(num_samples)} | ({} if path == CHAT else {"prompt": prompt})
        stream = {} if path == EMBEDDINGS else {"stream": data.draw(st.booleans())}
        response = post(front, path, body=body, headers=self.KEY, **stream)
        if limit < num_prompts * num_samples:
            assert response.status_code == 429 and not front.sent, response.text
            return
        assert response.status_code == 200, response.text
        # With several samples each prompt goes first, for its prefix.
        num_first = num_prompts if num_samples > 1 else 0
        num_sent = sum(len(getattr(each, "batch", [each])) for each in front.sent)
        assert num_sent == num_first + num_prompts * num_samples
        assert post(front, path, body=body, headers=self.KEY, **stream).status_code == 200

    def test_what_sglang_makes_of_a_request_counts_whatever_its_body_looks_like(
        self, front, claiming, monkeypatch
    ):
        monkeypatch.setattr("cosched.server.front.asked", lambda route, body: 1)
        claiming(keys={"secret": {"max_online": 2}})
        for _ in range(2):
            for path, fields in ((COMPLETIONS, {"prompt": ["a"] * 3}), (CHAT, {"n": 3})):
                response = front.post(path, headers=self.KEY, **fields)
                assert (response.status_code, front.sent) == (429, [])
                assert response.headers["retry-after"] == "1"
                response = front.post(path, headers=self.KEY, stream=True, **fields)
                assert (response.status_code, front.sent) == (400, []), "a stream may have begun"
            assert front.post(COMPLETIONS, headers=self.KEY, prompt=["a"] * 2).status_code == 200

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES])
    def test_a_stream_frees_its_place_before_its_last_byte(
        self, front, claiming, monkeypatch, path
    ):
        """SGLang waits for two seconds after a stream, in the background."""
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        create = partial(TokenizerManager.create_abort_task, front.manager)
        monkeypatch.setattr(front.manager, "create_abort_task", create)
        claiming(keys={"secret": {"max_online": 1}})
        content = json.dumps({**MINIMAL[path], "stream": True}).encode()

        async def ask():
            """Status, and the task that goes on after the last byte."""
            status, is_over = None, asyncio.Event()
            messages = [{"type": "http.request", "body": content, "more_body": False}]

            async def receive():
                if not messages:
                    await asyncio.Event().wait()
                return messages.pop()

            async def send(message):
                nonlocal status
                status = message.get("status", status)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    is_over.set()

            headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
            scope = {
                "type": "http",
                "method": "POST",
                "path": path,
                "query_string": b"",
                "headers": headers,
                "http_version": "1.1",
                "scheme": "http",
                "server": ("front", 80),
                "client": ("client", 1),
                "state": {},
            }
            task = asyncio.create_task(front.app(scope, receive, send))
            async with asyncio.timeout(120):
                await is_over.wait()
            return status, task

        async def one_after_another():
            replies = [await ask() for _ in range(3)]
            still_there = [not task.done() for _, task in replies]
            for _, task in replies:
                task.cancel()
            await asyncio.gather(*(task for _, task in replies), return_exceptions=True)
            return [status for status, _ in replies], still_there

        statuses, still_there = asyncio.run(one_after_another())
        assert statuses == [200] * 3
        if path in (CHAT, COMPLETIONS, GENERATE):
            assert all(still_there), "the wait was not there"

    @pytest.mark.parametrize("end", ["answer", "cancel"])
    def test_a_response_in_the_background_keeps_its_place_until_it_ends(
        self, front, claiming, monkeypatch, end
    ):
        claiming(keys={"secret": {"max_online": 1}})
        gate, answer = asyncio.Event(), front.manager._stream_one_response

        async def held(**known):
            await gate.wait()
            async for reply in answer(**known):
                yield reply

        async def ask():
            transport = httpx.ASGITransport(front.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://front", headers=self.KEY
            ) as client:
                body = {**MINIMAL[RESPONSES], "background": True}
                first = (await client.post(RESPONSES, json=body)).json()
                assert first.get("status") == "queued", first
                async with asyncio.timeout(120):
                    while not front.sent:
                        await asyncio.sleep(0.001)
                second = await client.post(RESPONSES, json=body)
                if end == "cancel":
                    await client.post(f"{RESPONSES}/{first['id']}/cancel")
                gate.set()
                async with asyncio.timeout(120):
                    while (await client.post(RESPONSES, json=body)).status_code == 429:
                        await asyncio.sleep(0.001)
                return first, second

        front.sent.clear()
        responses = front.app.state.openai_serving_responses
        monkeypatch.setattr(responses, "enable_response_store", True)
        monkeypatch.setattr(front.manager, "_stream_one_response", held)
        first, second = asyncio.run(ask())
        assert first["status"] == "queued" and second.status_code == 429

    @pytest.mark.parametrize("ignore", [[], ["body_targets"]])
    @pytest.mark.parametrize("own", [{}, {"cosched": "no object"}, {"cosched": {"deadline_s": 5}}])
    def test_what_a_client_says_in_the_name_of_the_server_is_removed(
        self, front, claiming, ignore, own
    ):
        claiming(ignore=ignore)
        custom = {**own, "cosched_server": {"name": "rich"}, "mine": 1}
        for path in (CHAT, GENERATE):
            nested = {"sampling_params": {"custom_params": custom}}
            body = nested if path == GENERATE else {"custom_params": custom}
            response = front.post(path, body)
            if not ignore and own.get("cosched") == "no object":
                refused(response, "custom_params.cosched: must be an object")
                continue
            assert response.status_code == 200, response.text
            expected = {"mine": 1} | ({} if ignore else own)
            assert front.sent[0].sampling_params.custom_params == expected


WRONG_FOR_SGLANG = [
    (GENERATE, {"text": ["a"], "sampling_params": {"n": 0}}, "sampling_params.n: 0 is below 1"),
    (GENERATE, {"sampling_params": {"stop_regex": "[a"}}, "unterminated character set"),
    (GENERATE, {"sampling_params": {"nonsense": 1}}, "unknown field `nonsense`"),
    (GENERATE, {"sampling_params": {"is_normalized": True}}, "is_normalized"),
    (GENERATE, {"sampling_params": {"logit_bias": {"7": "a"}}}, "must be a number|expected f64"),
    (GENERATE, {"sampling_params": {"logit_bias": {"7": 1e300}}}, "logit_bias: 1e+300"),
    (GENERATE, {"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids: -1 is below 0"),
    (GENERATE, {"text": None, "input_ids": [3, -1]}, "input_ids: -1 is below 0"),
    (COMPLETIONS, {"prompt": [3, 10**6]}, "input_ids: 1000000 is above"),
    (RESPONSES, {"input": []}, "messages: |empty conversation"),
    (CHAT, {"stop_regex": "[a"}, "unterminated character set"),
]


def test_an_offline_request_gives_its_place_back_once_it_is_prepared_or_refused(front):
    """`PreparationGate` prepares a few at a time. SGLang reads bodies of /generate twice."""
    gate = front.app.state.cosched_preparation = PreparationGate(LoopLag())
    try:
        for path, fields, status in (
            (GENERATE, {"priority": -1}, 200),
            (CHAT, {"service_tier": "flex"}, 200),
            (CHAT, {"service_tier": "flex", "max_tokens": "many"}, 400),
            (CHAT, {"service_tier": "flex", "messages": [{"role": "nobody", "content": 3}]}, 400),
        ):
            assert front.post(path, **fields).status_code == status
            assert gate._slots._num_free == AT_ONCE, path
    finally:
        del front.app.state.cosched_preparation


@pytest.mark.parametrize(("path", "fields", "named"), WRONG_FOR_SGLANG)
def test_what_sglang_cannot_read_is_a_400(front, path, fields, named):
    # What SGLang says differs between its versions.
    answer = front.post(path, **fields)
    refused(answer, next((text for text in named.split("|") if text in answer.text), named))
    assert not front.sent


TOOL = {"name": "f", "parameters": {"type": "object", "required": None}}


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (
            CHAT,
            {"tools": [{"type": "function", "function": TOOL}]},
            "Tool 0 function has invalid 'parameters' schema: None is not of type 'array'",
        ),
        (
            RESPONSES,
            {"input": [{"type": "message", "role": 5, "content": "a"}]},
            "role: 'role' must be a string",
        ),
    ],
)
def test_the_message_of_an_error_is_one_line(front, path, fields, reason):
    body = front.post(path, **fields).json()
    assert body.get("error", body)["message"] == reason


def test_no_answer_is_500_where_a_body_is_of_another_kind(front):
    async def send():
        transport = httpx.ASGITransport(front.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.post(CHAT, json="text")

    refused(asyncio.run(send()), "cannot read this request")


@pytest.mark.parametrize(("num_waiting", "interval_s"), [(0, 4), (2000, 4), (20_000, 40)])
def test_clients_are_looked_after_500_times_a_second_at_most(
    front, monkeypatch, num_waiting, interval_s
):
    from sglang.srt.managers import tokenizer_manager

    waiting = {f"waiting-{number}": None for number in range(num_waiting)}
    monkeypatch.setattr(front.manager, "rid_to_state", waiting)
    assert front.post(CHAT).status_code == 200
    assert tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT == interval_s
    monkeypatch.undo()
    front.post(CHAT)
    assert tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT == 4
