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

from cosched.core.request import Slo
from cosched.lab.metrics.records import (
    IterationLog,
    IterationRecord,
    RecordError,
    RequestRecord,
    read_records,
    record_line,
    write_records,
)
from tests.lab.metrics.samples import OFFLINE, logs, request, requests


@given(st.lists(requests(), max_size=5))
def test_records_come_back_from_a_file_as_they_were(records):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        assert write_records(records, path) == len(records)
        assert list(read_records(path)) == records


@given(requests())
def test_a_line_is_strict_json_with_the_keys_in_one_order(record):
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    entry = json.loads(record_line(record), parse_constant=refuse)
    assert list(entry) == list(RequestRecord.__dataclass_fields__)
    assert record_line(replace(record)) == record_line(record)


def test_a_line_without_token_times_keeps_the_largest_gap():
    record = request(0.0, (1.0, 1.5, 3.5))
    entry = json.loads(record_line(record, with_token_times=False))
    assert entry["token_times"] is None
    assert entry["max_tbt_s"] == 2.0


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


def test_latencies_of_one_request():
    record = request(1.0, (1.5, 1.75, 2.5))
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (0.5, 0.5, 1.5)
    assert record.worst_tbt_s == 0.75


def test_a_single_token_has_no_tpot_and_no_gap():
    record = request(1.0, (1.5,))
    assert (record.ttft_s, record.e2e_s) == (0.5, 0.5)
    assert record.tpot_s is None
    assert record.worst_tbt_s is None


def test_an_empty_reply_is_as_late_as_its_end():
    record = request(1.0, finish_s=3.0)
    assert (record.ttft_s, record.e2e_s) == (2.0, 2.0)
    assert record.tpot_s is None


def test_a_failed_request_has_neither_e2e_nor_tpot():
    record = request(0.0, (1.0, 2.0), ok=False)
    assert (record.e2e_s, record.tpot_s) == (None, None)
    assert not record.is_open


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


@given(logs())
def test_a_log_gives_back_its_rows(log):
    rows = list(log)
    assert len(rows) == len(log)
    assert list(IterationLog(rows)) == rows


def test_a_log_is_compact():
    log = IterationLog()
    log.append(IterationRecord(start_s=0.0, duration_s=0.1, kv_free_tokens=2_000_000_000))
    assert sum(column.itemsize for column in log._columns.values()) == 72
    assert log[0].kv_free_tokens == 2_000_000_000
    assert log[0].predicted_s is None


def test_a_log_grows_while_somebody_holds_a_column():
    log = IterationLog([IterationRecord(start_s=0.0, duration_s=0.1)])
    column = log.column("start_s")
    log.append(IterationRecord(start_s=1.0, duration_s=0.1))
    assert (len(column), len(log)) == (1, 2)


def test_slo_and_class_come_back_as_objects(tmp_path):
    record = request(0.0, (1.0,), request_class=OFFLINE, slo=Slo(deadline_s=60.0))
    write_records([record], tmp_path / "r.jsonl")
    (back,) = read_records(tmp_path / "r.jsonl")
    assert back.request_class is OFFLINE
    assert back.slo == Slo(deadline_s=60.0)
