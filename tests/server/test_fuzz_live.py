"""300 requests of a fuzz to a running server; `scripts/fuzz_server` sends more."""

from __future__ import annotations

import json

import pytest

from tests.batch.api import Api
from tests.fuzz.cases import FEATURES, World, make_case
from tests.fuzz.run import build_parser, fuzzed_server, main
from tests.request_lines import chat, error_of

CHAT = "/v1/chat/completions"
WORLD = World(model="m", context_len=1024, vocab_size=2048, loras=("A",))


def test_a_seed_names_the_requests():
    cases = [make_case(3, number, WORLD) for number in range(200)]
    assert [make_case(3, number, WORLD) for number in range(200)] == cases
    assert make_case(4, 0, WORLD) != cases[0]
    paths = {case.path.split("?")[0] for case in cases}
    assert len(paths) > 20


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ("penalties", ("frequency_penalty", "min_new_tokens")),
        ("lora", ("lora_path",)),
        ("beam", ("beam_width",)),
        ("logprobs", ("logprob",)),
        ("sessions", ("session_params", "/open_session")),
    ],
)
def test_features_are_there_unless_they_are_left_out(feature, words):
    def shown(without):
        world = World(
            model="m", context_len=64, vocab_size=2048, loras=("A",), without=frozenset(without)
        )
        return " ".join(
            case.path + case.content.decode("utf-8", "replace")
            for case in (make_case(0, number, world) for number in range(800))
        )

    everything, less = shown(()), shown((feature,))
    for word in words:
        assert word in everything and word not in less


def test_every_feature_can_be_left_out():
    assert build_parser().parse_args(["--without", *FEATURES]).without == list(FEATURES)


NUM_REQUESTS = 300


@pytest.fixture(scope="module")
def server(forks):
    with fuzzed_server(build_parser().parse_args([]), forks) as server:
        yield server


@pytest.mark.server
def test_no_request_ends_the_server_or_stops_a_chat(server, capsys):
    """On a quiet machine no probe takes 2 s (`scripts/fuzz_server`); beside other tests each takes
    as long as these leave of the processor."""
    options = ["--seed", "11", "--requests", str(NUM_REQUESTS), "--probe-limit", "60"]
    try:
        main([*options, "--url", server.url])
    except SystemExit:
        pytest.fail(capsys.readouterr().err[-8000:] + server.log()[-8000:])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_slow_probes"] == result["num_failures"] == 0
    assert result["num_sent"] == NUM_REQUESTS and result["num_probes"] > 5
    assert result["statuses"]["200"] > 40 and result["statuses"]["400"] > 40


@pytest.mark.server
def test_lines_may_name_adapters_alone_or_behind_the_model(server):
    named = {name: name for name in ("fuzzed", "default", "fuzzed:A", "default:B")}
    named["A"] = "fuzzed:A"  # SGLang would answer with the base model
    api = Api(server.url)
    done = api.wait(api.create([chat(name, model=name) for name in named], endpoint=CHAT))
    records = api.records(done.output_file_id)
    assert {r["custom_id"]: r["response"]["body"]["model"] for r in records} == named
    done = api.wait(api.create([chat("no", model="fuzzed:eve")], endpoint=CHAT))
    [failed] = api.records(done.error_file_id)
    assert error_of(failed)["code"] == "model_not_found"
