"""How many sequences a request asks for, before and after SGLang has parsed it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cosched.limits.sequences import asked, made

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        (CHAT, None, 1),
        (CHAT, {}, 1),
        (CHAT, {"messages": [{}, {}], "n": 3, "documents": ["a", "b"]}, 3),
        (CHAT, {"n": "3"}, 3),
        (CHAT, {"n": 3.0}, 3),
        (CHAT, {"n": -5}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": "2"}, 4),
        (COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}, 2),
        (COMPLETIONS, {"prompt": [[1], [2]]}, 2),
        (COMPLETIONS, {"n": True, "prompt": []}, 1),
        ("/v1/responses", {"input": [{"role": "user"}, {"role": "user"}], "n": 3}, 1),
        ("/v1/embeddings", {"input": ["a", "b"]}, 2),
        ("/v1/embeddings", {"input": [{"text": "a"}, {"text": "b"}]}, 2),
        ("/v1/embeddings", {"input": [1, 2]}, 1),
        ("/v1/score", {"query": "a", "items": ["b"] * 50}, 50),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 7}, 7),
        ("/vertex_generate", {"instances": [{"text": "a"}] * 3, "parameters": {}}, 3),
        (
            "/vertex_generate",
            {"instances": [{"text": "a"}], "parameters": {"sampling_params": {"n": 4}}},
            4,
        ),
    ],
)
def test_of_a_body(route, body, expected):
    assert asked(route, body) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, 4),
        ({"text": ["a", "b"], "input_ids": [1], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
        ({"input_ids": [1, 2, 3]}, 1),
        ({"input_ids": [[1], [2], [3]]}, 3),
        ({"input_embeds": [[0.5, 0.5], [0.5, 0.5]]}, 1),
        ({"input_embeds": [[[0.5, 0.5]], [[0.5, 0.5]]]}, 2),
        ({"text": "a", "sampling_params": {"beam_width": 32, "n": 4}}, 32),
        ({"text": ["a", "b"], "sampling_params": {"beam_width": 32}}, 64),
        ({"text": ["a", "b"], "sampling_params": [{"beam_width": 8}, {}]}, 9),
        ({"text": "a", "n": 5}, 1),
    ],
)
def test_of_generate(fields, expected):
    assert asked(GENERATE, fields) == expected
    given = {"text": None, "sampling_params": None, "stream": False, **fields}
    assert made(SimpleNamespace(**given)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": ["a", "b"], "sampling_params": {"n": 9}}, 2),
        ({"input_ids": [[1], [2]]}, 2),
        ({"image_data": ["x", "y"]}, 1),
        ({"image_data": [["x"], ["y"]]}, 2),
    ],
)
def test_of_embeddings(fields, expected):
    assert asked("/encode", fields) == expected
    assert made(SimpleNamespace(**{"text": None, **fields})) == expected
