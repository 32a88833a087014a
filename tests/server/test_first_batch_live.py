"""The README's batch, as written, on a server that was given no flag for batches."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import httpx
import pytest

from cosched.batch.jsonl.server import free_port
from tests.adapters import FLAGS as LORA_FLAGS
from tests.adapters import make_adapters
from tests.batch.api import Api, until
from tests.request_lines import chat
from tests.serving import ROOT, start_server

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def data_home(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(tiny_model, forks, data_home):
    env = {"XDG_DATA_HOME": str(data_home)}
    flags = ("--served-model-name", "demo")
    with start_server(tiny_model, *flags, forks=forks, env=env, port=free_port()) as server:
        yield server


def readmes_batch(port):
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert ":30000/" in block
    return block.replace(":30000/", f":{port}/")


def test_the_readmes_batch_runs_as_written(server, data_home):
    done = subprocess.run(
        [sys.executable, "-c", readmes_batch(server.port)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert [record["custom_id"] for record in records] == [f"q{n}" for n in range(100)]
    assert {record["response"]["status_code"] for record in records} == {200}
    folder = data_home / "cosched" / "batches" / f"demo-{server.port}"
    assert f"batches: {folder}, no open batches" in server.log()
    assert (folder / "batches.sqlite").exists()


def offline(server, **limits):
    assert httpx.post(f"{server.url}/cosched/offline", json=limits, timeout=30).is_success


def replica(server):
    headers = {"accept": "application/json"}
    return httpx.get(f"{server.url}/cosched", headers=headers, timeout=30).json()["replicas"][0]


def test_a_pause_by_the_operator_is_the_forecast_and_cancelled_lines_are_not_failures(server):
    api = Api(server.url, key="any")
    before = replica(server)
    offline(server, paused=True)
    try:
        batch = api.create([chat(f"c{n}", model="demo") for n in range(30)], endpoint=CHAT)
        until(lambda: replica(server)["num_waiting_offline"] == 30)
        told = httpx.get(f"{server.url}/v1/batches/{batch.id}", timeout=30).json()["cosched"]
        assert (told["state"], told["finish_s"], told["miss_chance"]) == ("paused", None, None)
        assert told["running"] == 30, "at the scheduler"
        api.batches.cancel(batch.id)
        assert api.wait(batch).status == "cancelled"
        until(lambda: replica(server)["num_waiting_offline"] == 0)
    finally:
        offline(server)
    after = replica(server)
    for name in ("num_aborted_offline", "num_cancelled_offline"):
        assert after[name] - before[name] == 30


def test_a_wrong_model_fails_its_line(server):
    api = Api(server.url, key="any")
    lines = [chat("good", model="demo"), chat("bad", model="gpt-4o"), chat("also good")]
    done = api.wait(api.create(lines, endpoint=CHAT))
    assert done.status == "failed"
    assert [(one.line, one.code) for one in done.errors.data] == [(2, "model_not_found")]


def test_lines_may_name_adapters_alone_or_behind_the_model(tiny_model, tmp_path):
    adapter = make_adapters(tmp_path, ["ada"])["ada"]
    flags = (*LORA_FLAGS, "--lora-paths", f"ada={adapter}", "--served-model-name", "demo")
    named = {name: name for name in ("demo", "default", "demo:ada", "default:ada")}
    named["ada"] = "demo:ada"  # SGLang would answer with the base model
    with start_server(tiny_model, *flags, module="tests.fuzz.server") as server:
        api = Api(server.url)
        done = api.wait(api.create([chat(name, model=name) for name in named], endpoint=CHAT))
        records = api.records(done.output_file_id)
        assert {r["custom_id"]: r["response"]["body"]["model"] for r in records} == named
        done = api.wait(api.create([chat("no", model="demo:eve")], endpoint=CHAT))
        assert [one.code for one in done.errors.data] == ["model_not_found"]
