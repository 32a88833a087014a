"""Prompts with real lengths of responses."""

from __future__ import annotations

import json

import pytest

from cosched_traces.errors import RowError
from cosched_traces.responses import (
    RESPONSE_SETS,
    iter_streams,
    read_responses_jsonl,
    tokens_of,
    words_of,
)

GENERATED = [name for name, one in RESPONSE_SETS.items() if not one.files]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_sets_are_there_without_a_folder_and_follow_the_seed(name, tmp_path):
    one = RESPONSE_SETS[name]
    assert one.is_there(None)
    first, again, other = (one.make(tmp_path, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) > 1000
    assert all(response.num_output_tokens >= 1 for response in first)
    assert all(response.num_prompt_tokens == len(response.prompt) for response in first)


def test_sets_of_files_are_there_with_their_files(tmp_path):
    one = RESPONSE_SETS["mooncake"]
    assert not one.is_there(None) and not one.is_there(tmp_path)
    path = tmp_path / one.files[0]
    path.parent.mkdir()
    line = {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}
    other = {**line, "hash_ids": [4, 6]}
    path.with_suffix("").write_text("")
    path.write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    assert one.is_there(tmp_path)
    first, second = one.make(tmp_path, 0)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (700, 9)
    assert first.prompt[:64] == second.prompt[:64]
    assert first.prompt[64:] != second.prompt[64:]


def test_prompts_of_ones_own(tmp_path):
    path = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "Add 2 and 2.", "output_tokens": 3},
        {"prompt": "Add 2 and 3.", "response": "That makes five."},
        {"prompt": "Sing!", "output_tokens": 90, "model": "b"},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    responses = read_responses_jsonl(path)
    assert [r.num_output_tokens for r in responses] == [3, 4, 90]
    assert responses[0].prompt[:3] == responses[1].prompt[:3]
    streams = dict(iter_streams(responses))
    assert {name: len(of) for name, of in streams.items()} == {"": 2, "b": 1}


@pytest.mark.parametrize(
    "line", [{"output_tokens": 3}, {"prompt": "a"}, {"prompt": "a", "output_tokens": -1}]
)
def test_a_wrong_line_is_named(line, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(RowError, match=r"own.jsonl:1: "):
        read_responses_jsonl(path)


def test_words_stand_for_tokens():
    assert len(words_of("It's 5, isn't it?")) == 10
    assert tokens_of("") == 1
    assert tokens_of("four letters") == 3
