"""CSV readers: values, sorting, options, and errors with file and line."""

from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.core.request import RequestClass
from cosched_traces.csv_traces import (
    read_arrivals_csv,
    read_azure_csv,
    read_burstgpt_csv,
    read_lengths_csv,
)
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.rows import OnEmpty, ReadOptions
from tests.traces.samples import AZURE_HEADER, BURSTGPT_HEADER, lengths_of, rids_of, write

AZURE_ROWS = (
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:16:46.6805900,20000,5000",
)
BURSTGPT_ROWS = (
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,230,1317,API log",
    "118,GPT-4,417,0,417,Conversation log",
)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure(tmp_path, name):
    path = write(tmp_path / name, AZURE_HEADER, *AZURE_ROWS, newline="\r\n")
    read = read_azure_csv(path)
    assert lengths_of(read) == [(374, 44), (396, 109), (20000, 5000)]
    assert [r.arrival_s for r in read.requests] == pytest.approx([0, 4.314579, 60], abs=1e-5)
    assert rids_of(read) == ["trace-0", "trace-1", "trace-2"]
    assert {r.request_class for r in read.requests} == {RequestClass.ONLINE}
    assert read.notes == (f"read {name}",)


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    packed = write(tmp_path / "t.csv.gz", AZURE_HEADER, *AZURE_ROWS)
    path = packed.rename(tmp_path / "t.csv")
    assert len(read_azure_csv(path).requests) == 3


def test_azure_2024_has_a_zone(tmp_path):
    rows = ("2024-05-10 00:00:00.009930+00:00,1,2", "2024-05-10 02:00:01.009930+02:00,3,4")
    read = read_azure_csv(write(tmp_path / "t.csv", AZURE_HEADER, *rows))
    assert [r.arrival_s for r in read.requests] == pytest.approx([0, 1], abs=1e-6)


def test_prompts_share_nothing(tmp_path):
    read = read_azure_csv(write(tmp_path / "t.csv", AZURE_HEADER, *AZURE_ROWS))
    keys = [segment.key for r in read.requests for segment in r.segments]
    assert len(set(keys)) == len(keys)


def test_options(tmp_path):
    path = write(tmp_path / "t.csv", AZURE_HEADER, *AZURE_ROWS)
    options = ReadOptions(name="n", request_class=RequestClass.OFFLINE, max_rows=2)
    read = read_azure_csv(path, options)
    assert read.name == "n"
    assert rids_of(read) == ["n-0", "n-1"]
    assert {r.request_class for r in read.requests} == {RequestClass.OFFLINE}


def test_rows_out_of_order_are_sorted_and_keep_their_numbers(tmp_path):
    path = write(tmp_path / "t.csv", AZURE_HEADER, AZURE_ROWS[1], AZURE_ROWS[0])
    read = read_azure_csv(path)
    assert rids_of(read) == ["t-1", "t-0"]
    assert read.requests[0].arrival_s == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,12", "2 cells where the header has 3"),
        ("yesterday,12,3", "TIMESTAMP is no time: 'yesterday'"),
        ("2023-11-16 18:15:46,twelve,3", "ContextTokens is no number: 'twelve'"),
        ("2023-11-16 18:15:46,12,3.5", "GeneratedTokens is no whole number: '3.5'"),
        ("2023-11-16 18:15:46,12,nan", "GeneratedTokens is no whole number: 'nan'"),
        ("2023-11-16 18:15:46,,3", "ContextTokens is no number: ''"),
        ("2023-11-16 18:15:46,-1,3", "prompt tokens -1 is negative"),
        ("2023-11-16 18:15:46,12,0", "output tokens is 0"),
    ],
)
def test_a_bad_row_names_file_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path / "bad.csv", AZURE_HEADER, *AZURE_ROWS, row)
    with pytest.raises(RowError, match=r"bad.csv:5: ") as error:
        read_azure_csv(path)
    assert (error.value.path, error.value.line) == (path, 5)
    assert reason in error.value.reason


def test_a_missing_column_is_named(tmp_path):
    path = write(tmp_path / "bad.csv", "TIMESTAMP,ContextTokens", "x,1")
    with pytest.raises(RowError, match=r"bad.csv:1: no column GeneratedTokens; .* TIMESTAMP"):
        read_azure_csv(path)


def test_an_empty_file_has_no_columns(tmp_path):
    with pytest.raises(RowError, match=r":1: no column TIMESTAMP.*has nothing"):
        read_azure_csv(write(tmp_path / "bad.csv"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"absent.csv: No such file"):
        read_azure_csv(tmp_path / "absent.csv")


def test_a_damaged_gzip_file_names_the_line(tmp_path):
    path = write(tmp_path / "t.csv.gz", AZURE_HEADER, *AZURE_ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RowError, match=r"t.csv.gz:\d+: cannot be read"):
        read_azure_csv(path)


def test_zero_lengths_clamped_or_dropped_stand_in_the_notes(tmp_path):
    path = write(tmp_path / "b.csv", BURSTGPT_HEADER, *BURSTGPT_ROWS)
    clamped = read_burstgpt_csv(path, ReadOptions(on_empty=OnEmpty.CLAMP))
    assert lengths_of(clamped)[2] == (417, 1)
    assert clamped.notes[-1] == "clamp 1 rows of 0 tokens"
    dropped = read_burstgpt_csv(path, ReadOptions(on_empty=OnEmpty.DROP))
    assert rids_of(dropped) == ["b-0", "b-1"]
    assert dropped.notes[-1] == "drop 1 rows of 0 tokens"


def test_burstgpt_keeps_a_model_and_a_log_type(tmp_path):
    path = write(tmp_path / "b.csv", BURSTGPT_HEADER, *BURSTGPT_ROWS)
    read = read_burstgpt_csv(path, model="ChatGPT", log_type="API log")
    assert lengths_of(read) == [(1087, 230)]
    assert read.notes[-1] == "left out 2 rows of another model or log type"


def test_burstgpt_with_further_columns(tmp_path):
    header = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type"
    )
    path = write(tmp_path / "b.csv", header, "7.5,u,1,GPT-4,10,20,30,API log")
    assert lengths_of(read_burstgpt_csv(path)) == [(10, 20)]


@pytest.mark.parametrize(
    "header",
    [
        "arrived_at,num_prefill_tokens,num_decode_tokens",
        "request_id,arrival_timestamp,prompt_size,token_size",
    ],
)
def test_vidur_and_splitwise(tmp_path, header):
    first = "9," if header.startswith("request_id") else ""
    path = write(tmp_path / "v.csv", header, f"{first}0.5,374,44.0", f"{first}4.75,396,109")
    read = read_arrivals_csv(path)
    assert [r.arrival_s for r in read.requests] == [0, 4.25]
    assert lengths_of(read) == [(374, 44), (396, 109)]


def test_lengths_take_arrivals(tmp_path):
    header = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio"
    path = write(tmp_path / "l.csv", header, "3772,54,3826,69.8", "2015,156,2171,12.9")
    assert [r.arrival_s for r in read_lengths_csv(path).requests] == [0, 0]
    timed = read_lengths_csv(path, arrivals_s=[1.5])
    assert [(r.arrival_s, r.num_prompt_tokens) for r in timed.requests] == [(1.5, 3772)]
    with pytest.raises(WorkloadError, match="3 arrivals for 2 requests"):
        read_lengths_csv(path, arrivals_s=[1, 2, 3])
    with pytest.raises(WorkloadError, match="not in ascending order"):
        read_lengths_csv(path, arrivals_s=[2, 1])


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
    read = read_azure_csv(write(tmp_path / "t.csv", AZURE_HEADER, *lines))
    expected = sorted(rows, key=lambda row: row[0])
    assert lengths_of(read) == [(p, o) for _, p, o in expected]
    first = expected[0][0]
    assert [r.arrival_s for r in read.requests] == pytest.approx(
        [(us - first) / 1e6 for us, _, _ in expected], abs=1e-5
    )
