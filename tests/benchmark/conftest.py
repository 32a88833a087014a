"""Comparisons whose runs are small and stay in this process."""

from __future__ import annotations

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import Slo
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, WorkloadSpec
from cosched.simulation.scenario import scenario
from cosched.simulation.store import ResultStore
from tests.in_process import stay_in_process


@pytest.fixture
def small_spec():
    return RunSpec(
        scenario=scenario("s1"),
        machine=Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32),
        online=WorkloadSpec(name="alpaca", rate=6.0),
        offline=WorkloadSpec(name="bros-offline", num_requests=60),
        cost=CostSpec(name="roofline"),
        slo=Slo(ttft_s=1.0, tpot_s=0.015),
        duration_s=4.0,
    )


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path / "results")


@pytest.fixture
def ran(monkeypatch):
    """Specifications that were really run, one after the other in this process."""
    return stay_in_process(monkeypatch)
