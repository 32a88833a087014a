"""Servers that are started to be measured, with servers that are none."""

from __future__ import annotations

import asyncio
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
from cosched.lab.benchmark import own_server
from cosched.lab.benchmark.live import LiveResult
from cosched.lab.benchmark.own_server import OwnServers
from cosched.lab.simulation.run import summarize_run
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.setting import setting_of
from tests.lab.metrics.samples import request

SPEC = RunSpec(setting=setting_of("hygen")).configured(latency_budget_ms=70.0)


def start(log_path):
    async def started():
        servers = OwnServers(model_path="m", flags=["--dtype", "float32"])
        async with servers.started(SPEC, log_path=log_path) as target:
            return target

    return asyncio.run(started())


@pytest.fixture
def warm_up(monkeypatch):
    """(flags, configuration) of each server; they answer the warm-up with this record's fields."""
    servers, answer = [], {"times": (0.1, 0.2)}
    monkeypatch.setenv(ENV_VAR, "")

    @contextlib.asynccontextmanager
    async def serving(*, model_path, flags, log_path):
        servers.append((flags, json.loads(os.environ[ENV_VAR])))
        yield "http://127.0.0.1:1"

    async def measure_live(target, spec, online, offline):
        records = [request(0.0, **answer)]
        summary = summarize_run(spec, records, None, end_s=spec.end_s)
        return LiveResult(spec=spec, summary=summary, records=records)

    monkeypatch.setattr(own_server, "serving", serving)
    monkeypatch.setattr(own_server, "measure_live", measure_live)
    return servers, answer


def test_a_server_has_the_policy_and_the_configuration_of_the_run(warm_up):
    servers, _ = warm_up
    assert start(Path("log")).base_url == "http://127.0.0.1:1"
    [(flags, config)] = servers
    assert flags == ["--dtype", "float32", "--cosched-policy", "hygen"]
    assert config["latency_budget_ms"] == 70.0 and not config["strict"], "as it would be served"
    assert os.environ[ENV_VAR] == ""


def test_a_server_that_answers_nothing_is_told_before_it_is_measured(warm_up):
    _, answer = warm_up
    answer |= {"times": (), "ok": False, "finish_reason": "HTTP 500: oh"}
    with pytest.raises(CoschedError, match="does not answer as it should: HTTP 500: oh"):
        start(Path("log"))


def test_a_server_that_dies_is_told_with_the_end_of_its_log(tmp_path, monkeypatch):
    dying = ["sh", "-c", "echo out of memory; exit 3"]
    monkeypatch.setattr(jobs_server, "server_command", lambda **options: dying)
    with pytest.raises(CoschedError, match=r"exited with code 3(.|\n)*out of memory") as caught:
        start(tmp_path / "log")
    assert caught.value.exit_code == ServerGoneError.exit_code == 1
