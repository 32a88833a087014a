"""Few-shot prompts as text."""

import json

import pytest

from cosched_traces.arrivals import arrival_times, constant_rate
from cosched_traces.few_shot import few_shot_text
from cosched_traces.few_shot_exercises import EXERCISES
from cosched_traces.offline_sets import Order
from cosched_traces.openai_batch import read_openai_batch
from cosched_traces.seeds import rng_of
from cosched_traces.summary import shared_ratio
from tests.traces.samples import write


def heads_of(lines):
    return [line["body"]["messages"][0]["content"] for line in lines]


def test_lines_are_a_batch_file_that_shares_heads(tmp_path):
    made = few_shot_text(model="m", seed=1, num_groups=10, requests_per_group=6, max_tokens=9)
    assert len(made.lines) == 60
    assert len({line["custom_id"] for line in made.lines}) == 60
    assert len(set(heads_of(made.lines))) == 10  # two more than exercises: other examples
    path = write(tmp_path / "b.jsonl", *map(json.dumps, made.lines))
    read = read_openai_batch(path, lambda text: list(text.encode()))
    assert {r.num_output_tokens for r in read.requests} == {9}
    assert shared_ratio(read) > 0.6
    body = made.lines[0]["body"]
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][0]["content"].count("\nA: ") == 5
    assert body["messages"][1]["content"].endswith("\nA:")


def test_seed_and_order():
    made = few_shot_text(model="m", seed=1)
    assert made == few_shot_text(model="m", seed=1)
    assert made != few_shot_text(model="m", seed=2)
    grouped = few_shot_text(model="m", seed=1, order=Order.GROUPED)
    assert [line["custom_id"] for line in grouped.lines[:2]] == ["few-shot-0", "few-shot-1"]
    assert len(set(heads_of(grouped.lines[:25]))) == 1
    assert len(set(heads_of(made.lines[:25]))) > 1


def test_chat_arrives_when_asked():
    times = arrival_times(constant_rate(2, duration_s=10), seed=0)
    chat = few_shot_text(model="m", seed=1, chat_arrivals_s=times, chat_max_tokens=5).chat
    assert tuple(turn.arrival_s for turn in chat) == times
    assert all(turn.messages[0]["role"] == "user" and turn.max_tokens == 5 for turn in chat)
    assert len({turn.messages[0]["content"] for turn in chat}) > 3
    assert not any("{" in turn.messages[0]["content"] for turn in chat)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.instruction[:20])
def test_examples_differ_and_are_complete(exercise):
    rng = rng_of(0, "test")
    examples = [exercise.example(rng) for _ in range(40)]
    assert len({example.question for example in examples}) > 10
    assert all(example.question and example.answer for example in examples)


def test_answers_are_right():
    rng = rng_of(0, "test")
    shopping, sorting, _, _, extracting, _, counting, continuing = EXERCISES
    for _ in range(50):
        expression, result = shopping.example(rng).answer.rstrip(".").split(" = ")
        start, bought, given = (int(n) for n in expression.replace("+", "-").split(" - "))
        assert int(result) == start + bought - given >= 0
        words, answer = sorting.example(rng)
        assert answer.split(", ") == sorted(words.split(", "))
        assert set(json.loads(extracting.example(rng).answer)) == {"who", "to", "at"}
        question, answer = counting.example(rng)
        letter, word = question.split()[5], question.split()[-1].rstrip("?")
        assert int(answer) == word.count(letter) >= 1
        row, answer = continuing.example(rng)
        numbers = [int(n) for n in row.split(", ")[:5]]
        assert int(answer) == 2 * numbers[-1] - numbers[-2]
