"""A live server against its own simulation."""

import pytest

from cosched.benchmark import fidelity
from cosched.benchmark.fidelity import FidelityCase, compare_runs, run_fidelity
from cosched.core.request import RequestClass
from cosched.metrics.records import RequestRecord
from cosched.simulation.machine import Machine
from cosched.simulation.run import WorkloadSpec, execute


def record(rid, request_class=RequestClass.ONLINE, *, first_s, finish_s, cached=0):
    return RequestRecord(
        rid=rid,
        request_class=request_class,
        arrival_s=0.0,
        num_prompt_tokens=100,
        num_output_tokens=11,
        first_token_s=first_s,
        finish_s=finish_s,
        num_cached_tokens=cached,
    )


def test_errors_are_relative_to_the_live_run():
    live = [
        record("a", first_s=1.0, finish_s=2.0),
        record("b", RequestClass.OFFLINE, first_s=1.0, finish_s=4.0, cached=50),
    ]
    simulated = [
        record("a", first_s=1.1, finish_s=3.1),
        record("b", RequestClass.OFFLINE, first_s=1.0, finish_s=3.0, cached=40),
    ]
    compared = compare_runs(live, simulated)
    assert compared["ttft_p50_s"]["error"] == pytest.approx(0.1)
    assert compared["tpot_p50_s"]["error"] == pytest.approx(1.0)
    assert compared["duration_s"]["error"] == pytest.approx(-0.25)
    assert compared["hit_ratio"]["live"] == 0.25
    assert compared["hit_ratio"]["error"] == pytest.approx(-0.2)
    assert compare_runs([], [])["ttft_p50_s"]["error"] is None


def test_the_duration_is_that_of_equal_work():
    def run(*ends):
        return [
            record(f"r{i}", RequestClass.OFFLINE, first_s=end / 2, finish_s=end)
            for i, end in enumerate(ends)
        ]

    compared = compare_runs(run(1.0, 2.0, 4.0, 8.0), run(1.0, 3.0, 5.0))
    assert compared["duration_s"]["live"] == 4.0 and compared["duration_s"]["simulated"] == 5.0


@pytest.mark.server
def test_a_server_is_profiled_run_and_simulated(tiny_model, monkeypatch):
    def in_this_process(specs, *, num_jobs):
        yield from enumerate(map(execute, specs))

    monkeypatch.setattr(fidelity, "execute_all", in_this_process)
    case = FidelityCase(
        name="small",
        model_path=str(tiny_model),
        machine=Machine(
            kv_tokens=20_000, chunk_tokens=256, max_running_requests=8, context_length=32_768
        ),
        online=WorkloadSpec(name="alpaca", rate=2.0),
        offline=WorkloadSpec(name="mmlu-like", num_requests=200),
        duration_s=6.0,
    )
    result = run_fidelity(case, show=lambda text: None)
    # Times are too noisy here to hold against each other, and a busy machine may answer few online
    # requests in time; but offline work was done, and prompts shared their prefix.
    for name in ("offline_requests", "hit_ratio"):
        assert result[name]["live"] > 0 and result[name]["simulated"] > 0, (name, result)
    assert result["profile_held_out_error"] < 2
