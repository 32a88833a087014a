"""ServeGen's fitted clients become requests at their rates and of their lengths."""

import json

import numpy as np
import pytest

from cosched.core.request import RequestClass
from cosched_traces.catalogue import load_workload
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.servegen import read_servegen
from tests.traces.samples import write


def client(folder, number, *windows, lengths=None):
    lengths = lengths or {"0": ({100: 0.5, 200: 0.5}, {7: 1.0})}
    write(folder / f"chunk-{number}-trace.csv", *windows)
    data = {
        start: {"input_tokens": str(prompt), "output_tokens": str(output)}
        for start, (prompt, output) in lengths.items()
    }
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(data))


def test_rates_lengths_and_silence(tmp_path):
    client(tmp_path, 0, "0,4.0,1.0,Gamma,1.0,0.25", "600,0,0,,0,0", "1200,8.0,1.2,Weibull,0.8,1")
    read = read_servegen(tmp_path, seed=1, duration_s=1800)
    times = np.array([r.arrival_s for r in read.requests])
    counts = np.histogram(times, bins=[0, 600, 1200, 1800])[0]
    assert counts[0] == pytest.approx(2400, rel=0.1)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(4800, rel=0.1)
    assert {r.num_prompt_tokens for r in read.requests} == {100, 200}
    assert {r.num_output_tokens for r in read.requests} == {7}
    assert read == read_servegen(tmp_path, seed=1, duration_s=1800)
    assert read != read_servegen(tmp_path, seed=2, duration_s=1800)


def test_the_rate_of_all_clients_is_scaled_and_time_is_cut(tmp_path):
    client(tmp_path, 0, "0,1.0,1.0,Gamma,1.0,1.0")
    client(tmp_path, 1, "0,3.0,1.0,,0,0")
    read = read_servegen(tmp_path, seed=0, start_s=100, duration_s=400, rate=10)
    assert len(read.requests) == pytest.approx(4000, rel=0.1)
    assert 0 <= read.requests[0].arrival_s < read.requests[-1].arrival_s < 400


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("600,1,1,Gamma,1", "5 cells where a window has 6"),
        ("600,fast,1,Gamma,1,1", "could not convert"),
        ("600,1,1,Poisson,1,1", "pattern 'Poisson' is none of"),
        ("600,-1,1,Gamma,1,1", "out of range"),
        ("0,1,1,Gamma,1,1", "does not follow"),
    ],
)
def test_a_bad_row_names_file_line_and_reason(tmp_path, row, reason):
    client(tmp_path, 0, "0,1,1,Gamma,1,1", row)
    with pytest.raises(RowError, match=r"chunk-0-trace.csv:2: ") as error:
        read_servegen(tmp_path, seed=0, duration_s=600)
    assert reason in str(error.value)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"no chunk-\*-trace.csv"):
        read_servegen(tmp_path, seed=0, duration_s=600)
    client(tmp_path, 0, "0,0,0,,0,0")
    with pytest.raises(WorkloadError, match="no client sends between 0 and 600"):
        read_servegen(tmp_path, seed=0, duration_s=600)
    client(tmp_path, 0, "0,1,1,,0,0", lengths={"600": ({1: 1.0}, {1: 1.0})})
    with pytest.raises(WorkloadError, match="client 0: no lengths at or before 0"):
        read_servegen(tmp_path, seed=0, duration_s=600)
    client(tmp_path, 0, "0,1,1,,0,0", lengths={"0": ({1: 0.4}, {1: 1.0})})
    with pytest.raises(WorkloadError, match=r"chunk-0-dataset.json: window '0'.*sum to 0.4"):
        read_servegen(tmp_path, seed=0, duration_s=600)


def test_a_folder_of_clients_is_a_workload_by_its_path(tmp_path):
    client(tmp_path, 0, "0,1.0,1.0,Gamma,1.0,1.0")
    online = load_workload(str(tmp_path), seed=0, duration_s=600, rate=2)
    assert len(online.requests) == pytest.approx(1200, rel=0.2)
    assert {r.max_new_tokens for r in online.requests} == {7}
    offline = load_workload(
        str(tmp_path), seed=0, request_class=RequestClass.OFFLINE, num_requests=5
    )
    assert [r.arrival_s for r in offline.requests] == [0.0] * 5
    assert {r.request_class for r in offline.requests} == {RequestClass.OFFLINE}
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkloadError, match=r"no chunk-\*-trace.csv here"):
        load_workload(str(tmp_path / "empty"), seed=0)
