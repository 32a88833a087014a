"""`python -m cosched.lab.estimate`: its answer follows from how much there is to do."""

from __future__ import annotations

import itertools
import json

import pytest

from cosched.lab.estimate import main, read_lines


def write(path, num, *, max_tokens=8):
    documents = [f"document {n} " * 50 for n in range(4)]
    with path.open("w") as file:
        for number in range(num):
            body = {"prompt": f"{documents[number % 4]}question {number}", "max_tokens": max_tokens}
            entry = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**entry, "body": body}) + "\n")
    return path


def ask(capsys, path, *options):
    main([str(path), "--trace", "azure-like", "--cost-model", "roofline", "--quiet", *options])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_it_tells_when_the_file_is_finished_and_how_often_it_is_not(tmp_path, capsys):
    path = write(tmp_path / "in.jsonl", 60)
    told = ask(capsys, path, "--rate", "1", "--window", "1m", "--starts", "2")
    assert told["lines"] == 60 and told["output_tokens"] == 480
    assert [one["finished"] for one in told["starts"]] == [60, 60]
    assert told["starts"][0]["start_s"] == 0 < told["starts"][1]["start_s"]
    assert told["miss_chance"] == 0 and 0 < told["earliest_finish_s"] <= told["latest_finish_s"]
    # One line at a time takes longer, and a window that is too short ends first.
    slow = ask(capsys, path, "--rate", "1", "--window", "1m", "--concurrency", "1")
    assert slow["earliest_finish_s"] > told["latest_finish_s"]
    longer = write(tmp_path / "long.jsonl", 60, max_tokens=900)
    missed = ask(capsys, longer, "--rate", "1", "--window", "1m", "--concurrency", "1")
    assert missed["miss_chance"] == 1 and missed["latest_finish_s"] is None
    assert 0 < missed["starts"][0]["finished"] < 60


def test_lines_are_read_in_prefix_order_with_replies_within_their_limit(tmp_path):
    requests = read_lines(write(tmp_path / "in.jsonl", 40), reply_tokens=5)
    heads = [request.token_ids[:100] for request in requests]
    assert sum(a != b for a, b in itertools.pairwise(heads)) == 3
    assert {request.num_output_tokens for request in requests} == {5}
    assert {request.max_new_tokens for request in requests} == {8}
    [*_, last] = read_lines(write(tmp_path / "in.jsonl", 3), reply_tokens=50)
    assert last.num_output_tokens == 8


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", (), "the file has no lines"),
        ("{}", (), "custom_id is not a text"),
        ('{"custom_id": "a"}', ("--window", "1 day"), "must be a number and m, h or d"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, capsys, content, options, message):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main([str(path), "--trace", "azure-like", *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err
