"""The demo: its arithmetic, its picture, and a short run from end to end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from cosched.core.request import Slo
from cosched.lab.benchmark.live import LiveResult, print_live
from cosched.lab.benchmark.own_server import OwnRun
from cosched.lab.demo import Demo, Measured, draw, main, targets_from
from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run import summarize_run
from tests.batch.api import until
from tests.lab.metrics.samples import OFFLINE, request


def spec(name, **options):
    return Demo(seconds=20, rate=4, **options).spec(name)


def measured(name, records, *, load_average=0.5, **options):
    run = spec(name, **options)
    summary = summarize_run(run, records, None, end_s=run.end_s)
    result = LiveResult(spec=run, summary=summary, records=records)
    return Measured(run=OwnRun(result=result, server_start_s=15.0, load_average=load_average))


def made_up(name, *, delay_s=0.1, **options):
    """A scenario in which everything takes `delay_s`."""
    records = [
        request(a, tuple(a + delay_s * (i + 1) for i in range(3)), sent_s=a)
        for a in map(float, range(5))
    ]
    if name != "online-only":
        records += [request(-1.0, (i + 1.0,), request_class=OFFLINE) for i in range(2)]
    return measured(name, records, **options)


def test_targets_follow_from_chat_alone_where_they_are_not_given():
    """Everything takes 100 ms: 250 ms and 125 ms."""
    alone = made_up("online-only").result
    assert targets_from(alone, Slo()) == Slo(ttft_s=0.25, tpot_s=0.125)
    assert targets_from(alone, Slo(tpot_s=0.02)) == Slo(ttft_s=0.25, tpot_s=0.02)
    unanswered = measured("online-only", [request(sent_s=0.0)]).result
    assert targets_from(unanswered, Slo()) == Slo(ttft_s=0.3, tpot_s=0.02)


def test_a_scenario_is_compared_with_online_only_and_a_job_that_ends_early_is_said_to():
    alone = made_up("online-only")
    stock = made_up("sglang", delay_s=0.3, offline_prompts=2)
    row = json.loads(json.dumps(stock.to_row(alone.result)))
    assert row["summary"]["online"]["ttft_s"]["p50"] == pytest.approx(0.3)
    assert row["comparison"]["tpot_p99_ratio"] == pytest.approx(3.0)
    assert row["summary"]["offline"]["requests_per_s"] == pytest.approx(0.1)
    assert row["job"] == {"num_requests": 2, "num_done": 2, "ended_s": 2.0}
    assert any("the job was done 2 s into the window" in line for line in stock.notes())
    assert stock.to_row(None)["comparison"] is None
    assert alone.to_row(alone.result)["job"] is None


def test_a_failed_request_is_pointed_out():
    failed = request(sent_s=0.0, ok=False, finish_reason="HTTP 500: oh")
    run = measured("sglang", [failed], load_average=100.0 * (os.cpu_count() or 1))
    assert (
        "1 of 1 online requests have no whole answer; the first: HTTP 500" in run.result.notes()[0]
    )
    assert "others used the machine" in run.notes()[0]
    unanswered = measured("sglang", [request(sent_s=0.0)])
    assert "not answered when the run ended" in unanswered.result.notes()[0]


def test_a_client_that_was_late_itself_is_marked(capsys):
    late, in_time = (
        measured(name, [request(1.0, (7.0, 7.1), sent_s=1.0 + delay_s)]).result
        for name, delay_s in (("sglang", 5.193), ("hygen", 0.01))
    )
    print_live([late, in_time])
    shown = capsys.readouterr().out
    assert "sglang (!)" in shown and "hygen (!)" not in shown and "up to 5.2 s late" in shown
    assert [result.to_row()["is_client_late"] for result in (late, in_time)] == [True, False]
    assert late.to_row()["max_client_delay_ms"] == pytest.approx(5193)


def test_the_picture_is_drawn_also_where_nothing_was_answered(tmp_path):
    path = tmp_path / "demo.png"
    nothing = measured("priority", [request(sent_s=0.0)])
    draw([made_up("online-only"), made_up("sglang", delay_s=0.3), nothing], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [["--out", "demo.pdf"], ["--scenarios", "sglang", "sglang"], ["--seconds", "-3"]],
)
def test_wrong_options_are_one_clear_line(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("cosched: ") and arguments[0] in error and error.count("\n") == 1


SMALL = ["--size", "tiny", "--scenarios", "sarathi"]


@pytest.mark.server
def test_a_short_run_ends_with_numbers_and_a_picture(tmp_path, forked_own_server, capsys):
    out = tmp_path / "demo.png"
    main([*SMALL, "--seconds", "3", "--offline-prompts", "400", "--out", str(out)])
    shown = capsys.readouterr().out
    entry = json.loads(shown.splitlines()[-1])
    row = entry["scenarios"]["sarathi"]
    online, offline = row["summary"]["online"], row["summary"]["offline"]
    requests, _ = load_requests(Demo(seconds=3).spec("sarathi"))
    assert online["num_finished"] == len(requests)
    assert online["num_failed"] == offline["num_failed"] == 0 < row["job"]["num_done"]
    assert 0 < online["ttft_s"]["p50"] <= online["ttft_s"]["p99"]
    assert "sarathi" in shown and out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.server
def test_ctrl_c_stops_the_server_too(tmp_path, forks):
    shown = tmp_path / "shown"
    out = ("--out", str(tmp_path / "demo.png"))
    process = forks.start_module("cosched", "demo", *SMALL, *out, log=shown)
    until(lambda: _children(process.pid), timeout_s=60)
    children = _children(process.pid)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert shown.read_text().endswith("cosched: interrupted\n")
    assert children and not any(Path(f"/proc/{pid}").exists() for pid in children)


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
