"""Runs on servers that are started for them, and the search over such runs. The servers are fakes:
what they would answer follows from the configuration they are started with."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.batch.jsonl import server as jobs_server
from cosched.batch.jsonl.errors import ServerGoneError
from cosched.config import ENV_VAR
from cosched.errors import CoschedError
from cosched.lab import profile
from cosched.lab.benchmark import own_server
from cosched.lab.benchmark.live import LiveResult
from cosched.lab.benchmark.own_server import OwnServers
from cosched.lab.simulation.run import summarize_run
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from tests.lab.metrics.samples import request

SPEC = RunSpec(
    setting=setting_of("hygen"),
    online=WorkloadSpec(name="demo-chat", rate=4.0),
    offline=WorkloadSpec(name="demo-job", num_requests=8),
    duration_s=5.0,
)


@pytest.fixture
def started(monkeypatch):
    """(flags, configuration) of every server that was started. One whose latency budget is larger
    answers later; online requests alone get their first token after 100 ms."""
    servers = []
    monkeypatch.setenv(ENV_VAR, "")

    @contextlib.asynccontextmanager
    async def serving(*, model_path, flags, log_path, port):
        servers.append((flags, json.loads(os.environ[ENV_VAR])))
        yield "http://127.0.0.1:1"

    async def measure_live(target, spec, online, offline, **options):
        ttft_s = 0.1 + (servers[-1][1]["latency_budget_ms"] or 0.0) / 1e3
        records = [
            request(one.arrival_s, (one.arrival_s + ttft_s,) * 2, rid=one.rid, sent_s=one.arrival_s)
            for one in online
        ]
        summary = summarize_run(spec, records, None, end_s=spec.end_s)
        return LiveResult(spec=spec, summary=summary, records=records)

    monkeypatch.setattr(own_server, "serving", serving)
    monkeypatch.setattr(own_server, "measure_live", measure_live)
    return servers


def search(capsys, *options):
    """The last line of `cosched.profile slo` on live servers."""
    workload = ["--online", "demo-chat", "--offline", "demo-job", "--duration", "5"]
    live = ["--model-path", "m", "--", "--dtype", "float32"]
    profile.main(["slo", "--quiet", *options, *workload, *live])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_each_value_is_tried_on_a_server_that_has_it(started, capsys):
    options = ["--slo", "p99_ttft<=300ms", "--low", "50", "--high", "800", "--tolerance", "0.1"]
    answer = search(capsys, *options)
    budgets = [config["latency_budget_ms"] for _, config in started]
    assert sorted(budgets) == [probe["value"] for probe in answer["probes"]]
    assert 180 < answer["value"] <= 200
    assert all(flags == ["--dtype", "float32", "--cosched-policy", "hygen"] for flags, _ in started)
    assert not any(config["strict"] for _, config in started), "as it would be served"
    assert os.environ[ENV_VAR] == ""


def test_a_tolerance_is_relative_to_online_requests_alone_on_a_stock_server(started, capsys):
    answer = search(capsys, "--slo", "mean_ttft<=+100%", "--low", "50", "--high", "800")
    assert started[0][0][-1] == started[0][1]["policy"] == "sglang"
    assert answer["baseline"] == [pytest.approx(0.1)]
    assert 95 <= answer["value"] <= 100


def test_a_server_that_answers_nothing_is_told_before_it_is_measured(started, monkeypatch):
    async def broken(target, spec, online, offline, **options):
        record = request(0.0, ok=False, finish_reason="HTTP 500: oh")
        summary = summarize_run(spec, [record], None, end_s=spec.end_s)
        return LiveResult(spec=spec, summary=summary, records=[record])

    monkeypatch.setattr(own_server, "measure_live", broken)
    with pytest.raises(CoschedError, match="does not answer as it should: HTTP 500: oh"):
        list(OwnServers(model_path="m").run_all([SPEC], log_path=Path("log")))


def test_a_server_that_dies_is_told_with_the_end_of_its_log(tmp_path, monkeypatch):
    dying = ["sh", "-c", "echo out of memory; exit 3"]
    monkeypatch.setattr(jobs_server, "server_command", lambda **options: dying)
    with pytest.raises(CoschedError, match=r"exited with code 3(.|\n)*out of memory") as caught:
        list(OwnServers(model_path="m").run_all([SPEC], log_path=tmp_path / "log"))
    assert caught.value.exit_code == ServerGoneError.exit_code == 1
