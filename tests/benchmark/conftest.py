"""Comparisons whose runs are small and stay in this process."""

from __future__ import annotations

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.benchmark import days, robustness, suite, tolerance
from cosched.config import ENV_VAR
from cosched.core.request import Slo
from cosched.simulation import slo_search
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.simulation.scenario import scenario
from cosched.simulation.store import ResultStore


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
    done = []

    def in_this_process(specs, *, num_jobs, store):
        for index, spec in enumerate(specs):
            result = None if store is None else store.get(spec)
            if result is None:
                done.append(spec)
                result = execute(spec)
                if store is not None:
                    store.put(result)
            yield index, result

    for module in (days, robustness, suite, tolerance, slo_search):
        monkeypatch.setattr(module, "execute_all", in_this_process)
    monkeypatch.setenv(ENV_VAR, "")  # a run sets it
    return done
