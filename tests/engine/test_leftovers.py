"""An engine in this process leaves no files behind, on disk or in memory."""

import os
import tempfile
from pathlib import Path

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.lab.simulation.setting import setting_of
from tests.engine.conftest import prompt


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def shared_memory():
    """Files of SGLang in /dev/shm that this process has open."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:  # that of this listing
            continue
    return [target for target in targets if target.startswith("/dev/shm/sgl")]


def test_an_engine_leaves_nothing(make_engine, folder):
    engine = make_engine()
    engine.submit("r", prompt(1, 50), max_new_tokens=3)
    engine.run_until_idle()
    assert len(engine.replies["r"].output_ids) == 3
    engine.close()
    assert list(folder.iterdir()) == [] and shared_memory() == []


def test_a_simulation_leaves_nothing_even_if_it_is_killed(folder):
    """There are no files while it runs, so none are left when it cannot clean up."""
    seen = []
    spec = RunSpec(
        setting=setting_of("sarathi"),
        machine=Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32),
        online=WorkloadSpec(name="alpaca", rate=8.0),
        cost=CostSpec(name="roofline"),
        duration_s=1.0,
    )
    result = execute(spec, on_progress=lambda now_s: seen.append(list(folder.iterdir())))
    assert any(record.is_finished for record in result.records)
    assert seen and not any(seen) and list(folder.iterdir()) == [] and shared_memory() == []
