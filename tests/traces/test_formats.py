"""Trace files: values, sorting, sharing, and errors with file and line."""

from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.core.request import RequestClass
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.formats import read_trace
from tests.traces.samples import (
    AZURE_HEADER,
    BURSTGPT_HEADER,
    common_prefix,
    lengths_of,
    rids_of,
    write,
    write_jsonl,
)

VOCAB = 50_000
AZURE_ROWS = (
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:16:46.6805900,20000,5000",
)


def mooncake(timestamp, input_length, hash_ids, output_length=7):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def prompts(workload):
    return [request.prompt(vocab_size=VOCAB) for request in workload.requests]


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure(tmp_path, name):
    path = write(tmp_path / name, AZURE_HEADER, *AZURE_ROWS, newline="\r\n")
    read = read_trace(path)
    assert lengths_of(read) == [(374, 44), (396, 109), (20000, 5000)]
    assert [r.arrival_s for r in read.requests] == pytest.approx([0, 4.314579, 60], abs=1e-5)
    assert rids_of(read) == ["trace-0", "trace-1", "trace-2"]
    assert {r.request_class for r in read.requests} == {RequestClass.ONLINE}
    assert read.notes == (f"read {name}",)
    keys = [segment.key for r in read.requests for segment in r.segments]
    assert len(set(keys)) == len(keys), "prompts share nothing"
    unpacked = read_trace(path.rename(tmp_path / "t.csv"), request_class=RequestClass.OFFLINE)
    assert rids_of(unpacked)[0] == "t-0", "gzip is told by content, not by name"
    assert {r.request_class for r in unpacked.requests} == {RequestClass.OFFLINE}


@pytest.mark.parametrize(
    ("header", "rows", "lengths", "arrivals"),
    [
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens",
            ["0.5,374,44.0", "4.75,396,109"],
            [(374, 44), (396, 109)],
            [0, 4.25],
        ),
        (
            "request_id,arrival_timestamp,prompt_size,token_size",
            ["9,0.5,374,44.0", "9,4.75,396,109"],
            [(374, 44), (396, 109)],
            [0, 4.25],
        ),
        (
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio",
            ["3772,54,3826,69.8", "2015,156,2171,12.9"],
            [(3772, 54), (2015, 156)],
            [0, 0],
        ),
        (
            AZURE_HEADER,
            ["2024-05-10 02:00:01.0+02:00,3,4", "2024-05-10 00:00:00.0+00:00,1,2"],
            [(1, 2), (3, 4)],
            [0, 1],
        ),
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type",
            ["7.5,u,1,GPT-4,10,20,API log"],
            [(10, 20)],
            [0],
        ),
    ],
)
def test_other_columns_zones_and_any_order_are_read(tmp_path, header, rows, lengths, arrivals):
    read = read_trace(write(tmp_path / "v.csv", header, *rows))
    assert [r.arrival_s for r in read.requests] == arrivals
    assert lengths_of(read) == lengths


def test_failed_requests_of_burstgpt_are_left_out_and_counted(tmp_path):
    rows = ("5,ChatGPT,472,18,490,API log", "9,GPT-4,417,0,417,API log", "20,GPT-4,4,1,5,API log")
    read = read_trace(write(tmp_path / "b.csv", BURSTGPT_HEADER, *rows))
    assert rids_of(read) == ["b-0", "b-2"]
    assert read.notes[-1] == "left out 1 rows of 0 tokens"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,12", "2 cells where the header has 3"),
        ("yesterday,12,3", "TIMESTAMP is not a time: 'yesterday'"),
        ("2023-11-16 18:15:46,twelve,3", "ContextTokens is not a number: 'twelve'"),
        ("2023-11-16 18:15:46,12,3.5", "GeneratedTokens is not a whole number: '3.5'"),
        ("2023-11-16 18:15:46,12,nan", "GeneratedTokens is not a whole number: 'nan'"),
        ("2023-11-16 18:15:46,,3", "ContextTokens is not a number: ''"),
        ("2023-11-16 18:15:46,-1,3", "prompt tokens -1 is negative"),
        ("2023-11-16 18:15:46,12,0", "output tokens is 0"),
    ],
)
def test_a_bad_row_names_file_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path / "bad.csv", AZURE_HEADER, *AZURE_ROWS, row)
    with pytest.raises(RowError, match=r"bad.csv:5: ") as error:
        read_trace(path)
    assert (error.value.path, error.value.line) == (path, 5)
    assert reason in error.value.reason


def test_bad_files_are_named(tmp_path):
    with pytest.raises(RowError, match=r"bad.csv:1: no column num_decode_tokens; .* TIMESTAMP"):
        read_trace(write(tmp_path / "bad.csv", "TIMESTAMP,num_prefill_tokens"), format="lengths")
    with pytest.raises(RowError, match=r":1: no column TIMESTAMP.*has nothing"):
        read_trace(write(tmp_path / "bad.csv"), format="azure")
    with pytest.raises(WorkloadError, match=r"absent.csv: No such file"):
        read_trace(tmp_path / "absent.csv")
    path = write(tmp_path / "t.csv.gz", AZURE_HEADER, *AZURE_ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RowError, match=r"t.csv.gz:\d+: cannot be read"):
        read_trace(path)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**10), st.integers(1, 10**5), st.integers(1, 10**4)),
        min_size=1,
        max_size=20,
    )
)
def test_round_trip(tmp_path, rows):
    start = datetime(2023, 11, 16)
    lines = [f"{start + timedelta(microseconds=us)},{p},{o}" for us, p, o in rows]
    read = read_trace(write(tmp_path / "t.csv", AZURE_HEADER, *lines))
    expected = sorted(rows, key=lambda row: row[0])
    assert lengths_of(read) == [(p, o) for _, p, o in expected]
    first = expected[0][0]
    assert [r.arrival_s for r in read.requests] == pytest.approx(
        [(us - first) / 1e6 for us, _, _ in expected], abs=1e-5
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 512)),
        min_size=2,
        max_size=6,
    )
)
def test_shared_leading_ids_are_shared_tokens(tmp_path, paths):
    rows = [mooncake(0, 512 * (len(ids) - 1) + last, ids) for ids, last in paths]
    made = prompts(read_trace(write_jsonl(tmp_path / "m.jsonl", *rows)))
    for (ids, last), prompt in zip(paths, made, strict=True):
        for (other_ids, other_last), other in zip(paths, made, strict=True):
            blocks = common_prefix(ids, other_ids)
            expected = 512 * blocks
            # The last common block may be cut short in one prompt or in both.
            if blocks == len(ids):
                expected += last - 512
            if blocks == len(other_ids):
                expected = min(expected, 512 * (blocks - 1) + other_last)
            assert common_prefix(prompt, other) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Input data was truncated: {"),
        ("[1]", "`object`, got `array`: [1]"),
        ('{"timestamp": 0}', "missing required field `input_length`"),
        ('{"timestamp": "0", "input_length": 5}', "`float`, got `str` - at `$.timestamp`"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids for 513 tokens; blocks of 512 tokens make 2",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',
            "`int`, got `str` - at `$.hash_ids[0]`",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [1]}',
            "output tokens is 0",
        ),
    ],
)
def test_a_bad_json_line_names_file_line_and_reason(tmp_path, line, reason):
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}'
    path = write(tmp_path / "bad.jsonl", good, "", line)
    with pytest.raises(RowError, match=r"bad.jsonl:3: ") as error:
        read_trace(path)
    assert reason in str(error.value)
