"""Records: what they refuse, and their way to a file and back."""

from __future__ import annotations

import json
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.lab.metrics.records import (
    IterationLog,
    RecordError,
    RequestRecord,
    read_records,
    record_line,
    write_records,
)
from tests.lab.metrics.samples import logs, request, requests


@given(st.lists(requests(), max_size=5))
def test_records_come_back_from_a_file_as_they_were(records):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        assert write_records(records, path) == len(records)
        assert list(read_records(path)) == records
        for line in path.read_text().splitlines():
            entry = json.loads(line, parse_constant=pytest.fail)
            assert list(entry) == list(RequestRecord.__dataclass_fields__)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"first_token_s": 0.5}, "before arrival_s"),
        ({"finish_s": 1.5}, "before first_token_s"),
        ({"finish_s": float("nan")}, "finish_s is nan"),
        ({"num_cached_tokens": 101}, "exceeds the prompt"),
        ({"num_cached_tokens": 60, "num_lost_tokens": 50}, "exceeds the prompt"),
        ({"num_preemptions": -1}, "num_preemptions is -1"),
        ({"num_output_tokens": 1}, "2 token_times for 1"),
        ({"num_output_tokens": 0}, "no output tokens"),
        ({"first_token_s": None}, "no first_token_s"),
        ({"token_times": array("d", (2.0, 1.0))}, "do not ascend"),
        ({"token_times": array("d", (2.5, 3.0))}, "begin at 2.5"),
        ({"token_times": array("d", (2.0, 4.0))}, "after finish_s"),
        ({"max_tbt_s": float("inf")}, "max_tbt_s is inf"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(fields, reason):
    with pytest.raises(RecordError, match=reason):
        request(1.0, (2.0, 3.0), **fields)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "Expecting value"),
        ("[]", "not a JSON object"),
        ('{"rid": "a"}', "missing"),
        ('{"colour": 1}', "unknown keys colour"),
        (record_line(request()).replace("online", "urgent"), "urgent"),
        (record_line(request()).replace('"num_prompt_tokens":100', '"num_prompt_tokens":-1'), "-1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "requests.jsonl"
    path.write_text(record_line(request()) + line.strip() + "\n")
    with pytest.raises(RecordError, match=r"requests\.jsonl:2: .*" + reason):
        list(read_records(path))


@pytest.mark.parametrize(
    ("record", "ttft_s", "tpot_s", "e2e_s", "worst_tbt_s"),
    [
        (request(1.0, (1.5, 1.75, 2.5)), 0.5, 0.5, 1.5, 0.75),
        (request(1.0, (1.5,)), 0.5, None, 0.5, None),
        (request(1.0, finish_s=3.0), 2.0, None, 2.0, None),
        (request(0.0, (1.0, 2.0), ok=False), 1.0, None, None, 1.0),
    ],
    ids=["three tokens", "one token", "an empty reply", "failed"],
)
def test_latencies_of_one_request(record, ttft_s, tpot_s, e2e_s, worst_tbt_s):
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (ttft_s, tpot_s, e2e_s)
    assert record.worst_tbt_s == worst_tbt_s


def test_tokens_without_times_are_spread_evenly():
    record = request(0.0, (1.0, 1.25, 5.0), token_times=None)
    times, weight = record.emissions(until_s=100.0)
    assert (list(times), weight) == ([1.0, 3.0, 5.0], 1.0)
    times, _ = replace(record, finish_s=None).emissions(until_s=9.0)
    assert list(times) == [1.0, 5.0, 9.0]


def test_tokens_that_came_in_pieces_share_their_times():
    record = request(0.0, (1.0, 2.0), num_output_tokens=6)
    times, weight = record.emissions(until_s=9.0)
    assert (list(times), weight) == ([1.0, 2.0], 3.0)


def test_a_line_without_token_times_keeps_the_largest_gap():
    entry = json.loads(record_line(request(0.0, (1.0, 1.5, 3.5)), with_token_times=False))
    assert (entry["token_times"], entry["max_tbt_s"]) == (None, 2.0)


@given(logs())
def test_a_log_gives_back_its_rows(log):
    rows = list(log)
    assert len(rows) == len(log)
    assert list(IterationLog(rows)) == rows
