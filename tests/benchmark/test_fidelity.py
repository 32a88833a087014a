"""A live server against its own simulation."""

from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.benchmark import fidelity
from cosched.benchmark.fidelity import FidelityCase, compare_runs, run_fidelity
from cosched.core.request import RequestClass
from cosched.latency.profile_file import read_iteration_log
from cosched.metrics.records import RequestRecord
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, WorkloadSpec, execute
from tests.in_process import stay_in_process


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


def small_case(model_path, **changes):
    return FidelityCase(
        name="small",
        model_path=str(model_path),
        machine=Machine(
            kv_tokens=20_000, chunk_tokens=256, max_running_requests=8, context_length=32_768
        ),
        online=WorkloadSpec(name="alpaca", rate=2.0),
        offline=WorkloadSpec(name="mmlu-like", num_requests=200),
        **changes,
    )


def test_a_machine_of_known_times_is_simulated_as_it_ran(monkeypatch):
    """In place of a server a run in virtual time, whose iterations last what a roofline says: the
    profile that is fitted to some of them gives the others."""

    async def run_in_virtual_time(case, log, folder, show):
        num_points = 0
        for seed in (case.seed + 1, case.seed):
            spec = fidelity._spec(case, seed=seed, profile=None)
            spec = replace(spec, cost=CostSpec(name="roofline"))
            part = folder / f"{seed}.jsonl"
            records = execute(spec.configured(iteration_log=str(part))).records
            with log.open("a") as file:
                file.write(part.read_text())
            num_profiled, num_points = num_points, len(read_iteration_log(log))
        return records, num_profiled

    stay_in_process(monkeypatch)
    monkeypatch.setattr(fidelity, "_run_server", run_in_virtual_time)
    result = run_fidelity(small_case("none", duration_s=4.0), show=lambda text: None)
    assert result["profile_held_out_error"] < 0.02 and result["iteration_error"] < 0.02
    allowed = dict.fromkeys(("hit_ratio", "offline_requests", "duration_s", "tpot_mean_s"), 0.02)
    allowed |= {"tpot_p50_s": 0.05, "ttft_mean_s": 0.05, "ttft_p50_s": 0.1}
    errors = {name: abs(result[name]["error"]) for name in allowed}
    assert all(errors[name] <= most for name, most in allowed.items()), errors
    assert result["offline_requests"]["live"] > 50 and result["hit_ratio"]["live"] > 0.3


@pytest.mark.server
def test_a_server_is_profiled_run_and_simulated(tiny_model, monkeypatch, forked_own_server):
    stay_in_process(monkeypatch)
    result = run_fidelity(small_case(tiny_model, duration_s=4.0), show=lambda text: None)
    # Others may use the machine in either part of the run, which makes all times of that part
    # longer by the same factor: it is divided out here, and times are compared closely above. What
    # is found in the cache follows from the requests.
    offline, hits = result["offline_requests"], result["hit_ratio"]
    assert offline["live"] >= 5 and abs(hits["simulated"] - hits["live"]) < 0.15, result
    slower, longer = (result[name]["error"] + 1 for name in ("tpot_p50_s", "duration_s"))
    assert 1 / 2.5 < longer / slower < 2.5, result
