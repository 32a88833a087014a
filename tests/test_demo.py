"""The demo: its workload, its arithmetic, its picture, and a short run from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest

from cosched.config import SloConfig
from cosched.demo.__main__ import main
from cosched.demo.picture import draw
from cosched.demo.records import (
    OfflineRecord,
    OnlineRecord,
    Percentiles,
    summarize_offline,
    summarize_online,
)
from cosched.demo.report import json_entry, notes, result_of, results_table
from cosched.demo.scenario import Load, Measured, Scenario
from cosched.demo.workload import WorkloadSpec, chat_prompts, make_chat_trace, make_offline_job
from cosched.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
SLO = SloConfig(ttft_ms=300.0, tpot_ms=20.0)
SPEC = WorkloadSpec(seconds=20.0, rate_per_s=4.0, num_offline=50)


def online(*, arrival_s=0.0, sent_s=None, chunks_s=(), num_output_tokens=None, error=None):
    return OnlineRecord(
        arrival_s=arrival_s,
        sent_s=arrival_s if sent_s is None else sent_s,
        chunks_s=tuple(chunks_s),
        num_output_tokens=len(chunks_s) if num_output_tokens is None else num_output_tokens,
        error=error,
    )


def offline(finished_s, *, error=None):
    return OfflineRecord(
        finished_s=finished_s, num_prompt_tokens=90, num_output_tokens=10, error=error
    )


def measured(name, *, delay_s):
    """Made-up records of a scenario in which everything takes `delay_s`."""
    records = tuple(
        online(arrival_s=a, chunks_s=[a + delay_s * (i + 1) for i in range(3)]) for a in range(5)
    )
    return Measured(
        scenario=Scenario.named(name),
        online=records,
        offline=() if name == "online-only" else (offline(1.0), offline(2.0)),
        server_start_s=15.0,
        load_average=0.5,
    )


def test_the_same_seed_gives_the_same_requests():
    assert make_chat_trace(SPEC) == make_chat_trace(SPEC)
    assert make_offline_job(SPEC) == make_offline_job(SPEC)


def test_another_seed_gives_other_requests():
    other = WorkloadSpec(seconds=20.0, rate_per_s=4.0, num_offline=50, seed=1)
    assert make_chat_trace(SPEC) != make_chat_trace(other)
    assert not {p.prompt for p in make_offline_job(SPEC)} & {
        p.prompt for p in make_offline_job(other)
    }


def test_the_trace_has_not_changed():
    # Numbers of earlier runs are comparable only while this holds.
    trace = make_chat_trace(WorkloadSpec(seconds=40.0, rate_per_s=2.0))
    assert [round(request.arrival_s, 3) for request in trace[:3]] == [0.753, 1.009, 2.211]
    assert [request.num_output_tokens for request in trace[:3]] == [38, 24, 51]


def test_arrivals_lie_in_the_window_and_crowd_in_the_bursts():
    spec = WorkloadSpec(seconds=1000.0, rate_per_s=4.0)
    times = [request.arrival_s for request in make_chat_trace(spec)]
    assert times == sorted(times)
    assert 0 <= times[0] and times[-1] < 1000
    in_bursts = sum(250 <= t < 350 or 650 <= t < 750 for t in times)
    # 800 s at 4/s and 200 s at 12/s, within four standard deviations.
    assert len(times) - in_bursts == pytest.approx(3200, abs=4 * 3200**0.5)
    assert in_bursts == pytest.approx(2400, abs=4 * 2400**0.5)


def test_chat_requests_stay_within_their_bounds_and_differ():
    trace = make_chat_trace(SPEC)
    assert all(500 <= len(request.prompt) <= 1500 for request in trace)
    assert all(16 <= request.num_output_tokens <= 64 for request in trace)
    assert len({request.prompt for request in trace}) == len(trace)


def test_offline_prompts_share_a_few_heads_in_no_order():
    spec = WorkloadSpec(num_offline=400)
    job = make_offline_job(spec)
    heads = [prompt.prompt.rpartition("Q: ")[0] for prompt in job]
    assert len(set(heads)) == spec.num_heads
    assert all(len(head) > 300 for head in heads)
    assert len({prompt.prompt for prompt in job}) > 395
    num_runs = sum(1 for _ in groupby(heads))
    assert num_runs > 300, "prompts of one prefix follow each other"


def test_warm_up_prompts_are_not_those_measured():
    prompts = chat_prompts(SPEC, seed=-1)
    assert next(prompts)[60:] not in {request.prompt[60:] for request in make_chat_trace(SPEC)}


@pytest.mark.parametrize(
    ("field", "value"), [("seconds", 0.0), ("rate_per_s", float("nan")), ("num_offline", -1)]
)
def test_a_workload_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(ConfigError, match=r"must be"):
        WorkloadSpec(**{field: value})


def test_times_of_a_request_count_from_its_arrival():
    record = online(arrival_s=10.0, sent_s=10.2, chunks_s=[10.5, 10.6, 10.9])
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.2)
    assert record.tbt_s == pytest.approx((0.1, 0.3))


def test_tpot_counts_tokens_and_not_pieces_of_text():
    record = online(chunks_s=[1.0, 2.0], num_output_tokens=5)
    assert record.tpot_s == pytest.approx(0.25)


def test_a_reply_of_one_token_has_no_tpot():
    assert online(chunks_s=[1.0]).tpot_s is None


def test_online_summary_of_hand_made_records():
    records = [
        online(chunks_s=[0.1, 0.2, 0.3]),
        online(arrival_s=1.0, sent_s=1.05, chunks_s=[1.3, 1.4, 1.9]),
        online(chunks_s=[0.5], error="cut off"),
        online(error="HTTP 503"),
    ]
    summary = summarize_online(records)
    assert (summary.num_requests, summary.num_failed) == (4, 2)
    assert summary.first_error == "cut off"
    assert summary.ttft_ms.count == 3 and summary.ttft_ms.p50 == pytest.approx(300)
    assert summary.tpot_ms.count == 2 and summary.tpot_ms.p50 == pytest.approx(200)
    assert summary.tbt_ms.count == 4 and summary.tbt_ms.p50 == pytest.approx(100)
    assert summary.max_client_delay_ms == pytest.approx(50)


def test_percentiles_are_numpys_and_none_without_values():
    values = [float(value) for value in range(1, 102)]
    assert Percentiles.of(values) == Percentiles(count=101, p50=51.0, p99=100.0)
    assert Percentiles.of([]) is None


def test_offline_rates_count_what_ends_within_the_window():
    records = [offline(-1.0), offline(0.0), offline(5.0), offline(9.0, error="x"), offline(10.0)]
    summary = summarize_offline(records, num_prompts=20, window_s=10.0)
    assert (summary.num_done, summary.num_failed) == (3, 1)
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.tokens_per_s == pytest.approx(20.0)
    assert summary.output_tokens_per_s == pytest.approx(2.0)
    assert summary.job_ended_s is None


def test_a_job_that_ends_early_is_said_to():
    records = [offline(1.0), offline(4.0)]
    assert summarize_offline(records, num_prompts=2, window_s=10.0).job_ended_s == 4.0
    load = Load.of(WorkloadSpec(seconds=5.0, num_offline=2), concurrency=1)
    result = result_of(measured("sarathi", delay_s=0.1), load, SLO)
    assert any("the job was done 2 s into the window" in line for line in notes([result]))


def test_scenarios_are_compared_with_online_only():
    load = Load.of(SPEC, concurrency=1)
    runs = [measured("online-only", delay_s=0.1), measured("sglang", delay_s=0.3)]
    results = [result_of(run, load, SLO) for run in runs]
    entry = json.loads(json.dumps(json_entry(config={}, seed=7, results=results)))
    assert entry["seed"] == 7 and entry["versions"]["sglang"]
    stock = entry["results"][1]
    assert stock["latencies"]["ttft_p50_ms"] == pytest.approx(300)
    assert stock["ratio_to_online_only"]["tpot_p99_ms"] == pytest.approx(3.0)
    assert stock["offline"]["requests_per_s"] == pytest.approx(0.1)
    assert entry["results"][0]["offline"] is None
    assert results_table(results).row_count == 2
    alone = json_entry(config={}, seed=7, results=results[1:])["results"][0]
    assert alone["ratio_to_online_only"]["ttft_p50_ms"] is None


def test_a_failed_request_is_pointed_out():
    load = Load.of(SPEC, concurrency=1)
    run = Measured(
        scenario=Scenario.named("sglang"),
        online=(online(error="HTTP 500: oh"),),
        offline=(),
        server_start_s=1.0,
        load_average=100.0 * (os.cpu_count() or 1),
    )
    lines = "\n".join(notes([result_of(run, load, SLO)]))
    assert "1 of 1 online requests have no whole answer" in lines and "HTTP 500" in lines
    assert "others used the machine" in lines


def test_a_client_that_was_late_itself_is_marked():
    load = Load.of(SPEC, concurrency=1)

    def result(delay_s):
        record = online(arrival_s=1.0, sent_s=1.0 + delay_s, chunks_s=[2.0, 2.1])
        return result_of(
            Measured(
                scenario=Scenario.named("sglang"),
                online=(record,),
                offline=(),
                server_start_s=1.0,
                load_average=0.0,
            ),
            load,
            SLO,
        )

    late, in_time = result(5.193), result(0.01)
    assert "up to 5.2 s late" in "\n".join(notes([late])) and not notes([in_time])
    names = list(results_table([late, in_time]).columns[0].cells)
    assert names == ["sglang (!)", "sglang"]
    entry = json_entry(config={}, seed=0, results=[late, in_time])
    assert [found["is_client_late"] for found in entry["results"]] == [True, False]


def test_in_a_log_each_phase_is_a_line(capsys):
    from rich.console import Console
    from rich.progress import Progress as Bars

    from cosched.demo.__main__ import _bar
    from cosched.demo.scenario import Progress

    show = _bar(Bars(console=Console(stderr=True, force_terminal=False), disable=True), "hygen")
    for text in ("server starts", "warm-up", "online: 1/9 sent", "online: 2/9 sent"):
        show(Progress(text=text, done_s=1.0, total_s=40.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2].strip() for line in lines] == [
        "server starts (1/40 s)",
        "warm-up (1/40 s)",
        "online",
    ]


def test_the_picture_is_drawn_also_where_nothing_was_answered(tmp_path):
    load = Load.of(SPEC, concurrency=1)
    nothing = Measured(
        scenario=Scenario.named("priority"),
        online=(online(error="x"),),
        offline=(),
        server_start_s=1.0,
        load_average=0.0,
    )
    runs = [measured("online-only", delay_s=0.1), measured("sglang", delay_s=0.3), nothing]
    path = tmp_path / "new" / "demo.png"
    draw(
        [(run, result_of(run, load, SLO)) for run in runs],
        load=load,
        slo=SLO,
        path=path,
        caption="c",
    )
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [["--out", "demo.pdf"], ["--scenarios", "sglang", "sglang"], ["--seconds", "-3"]],
)
def test_wrong_options_are_one_clear_line(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"demo: {arguments[0]}") and error.count("\n") == 1


SMALL = ["--size", "tiny", "--scenarios", "sarathi"]


@pytest.mark.server
def test_a_short_run_ends_with_numbers_and_a_picture(tmp_path, forked_own_server, capsys):
    out = tmp_path / "demo.png"
    code = main([*SMALL, "--seconds", "3", "--offline-prompts", "400", "--out", str(out)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    entry = json.loads(shown.out.splitlines()[-1])
    (result,) = entry["results"]
    trace = make_chat_trace(WorkloadSpec(seconds=3.0))
    assert result["online"]["num_requests"] == len(trace)
    assert result["online"]["num_failed"] == 0 and result["offline"]["num_failed"] == 0
    assert result["offline"]["num_done"] > 0
    assert 0 < result["latencies"]["ttft_p50_ms"] <= result["latencies"]["ttft_p99_ms"]
    assert "sarathi" in shown.out and out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.server
def test_ctrl_c_stops_the_server_too(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "cosched.demo", *SMALL, "--out", str(tmp_path / "demo.png")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "demo-sarathi.server.log"
    deadline_s = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    children = _children(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read().endswith("demo: interrupted\n")
    assert children and not any(Path(f"/proc/{pid}").exists() for pid in children)


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
