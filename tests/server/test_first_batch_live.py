"""The README's batch, as written, on a server that was given no flag for batches."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from cosched.jobs.server import free_port
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
