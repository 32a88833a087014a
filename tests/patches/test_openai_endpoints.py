"""What SGLang's endpoints of OpenAI's API say with cosched's hooks, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.port.endpoints import (
    check_route,
    fields_by_url,
    limit_reply,
    urls_of,
)
from cosched.errors import RequestError
from cosched.wire import MAX_TOKENS_KEY
from cosched_patches.openai_endpoints import (
    all_output_tokens,
    metadata_of_strings,
    parse_required_calls,
)


def manager(*, is_generation=True, default=None, kind="LlamaForCausalLM"):
    config = SimpleNamespace(**({} if default is None else {MAX_TOKENS_KEY: default}))
    return SimpleNamespace(
        is_generation=is_generation,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[kind]),
            hf_generation_config=config,
            context_len=1000,
        ),
    )


def test_metadata_is_a_map_of_strings():
    found = metadata_of_strings({"weight_version": "v2", "weight_versions": [{"version": "v2"}]})
    assert found == {"weight_version": "v2", "weight_versions": '[{"version": "v2"}]'}


@pytest.mark.parametrize(("asked", "sent"), [(1, 1), (2, 2), (600, 600), (None, 7)])
def test_max_output_tokens_is_the_number_of_tokens(asked, sent):
    request = SimpleNamespace(max_output_tokens=asked)
    assert all_output_tokens({"max_new_tokens": 7}, request)["max_new_tokens"] == sent


@pytest.mark.parametrize(
    ("choice", "parser", "is_parsed"),
    [
        ("required", None, True),
        (object(), None, True),
        ("auto", None, False),
        ("none", None, False),
    ],
)
def test_calls_that_a_grammar_forces_are_parsed_without_a_parser(choice, parser, is_parsed):
    request = SimpleNamespace(
        tool_choice=choice, tools=[1], _response_parser_json_response_format=False
    )
    serving = SimpleNamespace(tool_call_parser=parser)
    assert parse_required_calls(lambda *_: False, serving, request) is is_parsed


def test_an_endpoint_that_the_model_does_not_have_is_refused_with_the_choices():
    for route in ("/v1/chat/completions", "/v1/messages", "/generate"):
        check_route(route, manager())
        with pytest.raises(RequestError, match="/v1/embeddings"):
            check_route(route, manager(is_generation=False))
    with pytest.raises(RequestError, match="/v1/chat/completions"):
        check_route("/v1/embeddings", manager())
    assert "/v1/embeddings" not in urls_of(manager())
    classifier = manager(is_generation=False, kind="Qwen3ForSequenceClassification")
    check_route("/v1/classify", classifier)
    assert {"/v1/classify", "/v1/embeddings"} <= set(urls_of(classifier))
    for other in (manager(), manager(is_generation=False)):
        with pytest.raises(RequestError, match="/v1/classify: is for models that classify"):
            check_route("/v1/classify", other)


def test_fields_are_openais_and_those_that_sglang_reads():
    chat = fields_by_url()["/v1/chat/completions"]
    assert {"top_k", "regex", "messages", "user", "store", "service_tier", "seed"} <= chat
    assert not chat & {
        "guided_json",
        "functions",
        "best_of",
        "extra_body",
        "truncate_prompt_tokens",
    }
    assert "best_of" not in fields_by_url()["/v1/completions"]


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "default", "sent"),
    [
        ({"max_new_tokens": None}, 10, 512, 512),
        ({"max_new_tokens": None}, 900, 512, 99),
        ({"max_new_tokens": None, "ignore_eos": True}, 10, 512, None),
        ({"max_new_tokens": 600}, 10, 512, 600),
        ({"max_new_tokens": None}, 10, None, None),
    ],
)
def test_a_default_length_holds_where_no_other_is_asked_for(
    params, num_prompt_tokens, default, sent
):
    limit_reply(
        SimpleNamespace(sampling_params=params), num_prompt_tokens, manager(default=default)
    )
    assert params["max_new_tokens"] == sent
