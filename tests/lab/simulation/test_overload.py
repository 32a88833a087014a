"""More chat than the device can do: who can still be in time is."""

from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import RequestClass
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import (
    CostSpec,
    RunSpec,
    WorkloadSpec,
    cost_model_of,
    execute,
    execute_requests,
)
from cosched.lab.simulation.setting import setting_of
from cosched.predict.calibration import Calibrator
from cosched_traces.workload import Segment, TraceRequest

SPEC = RunSpec(
    setting=setting_of("cosched"),
    machine=Machine(kv_tokens=120_000, chunk_tokens=2048, max_running_requests=64),
    cost=CostSpec(name="roofline"),
    online=WorkloadSpec(name="azure-like", rate=24.0),
    duration_s=10.0,
)


def online_of(name):
    result = execute(replace(SPEC, setting=setting_of(name)))
    return result.to_dict()["summary"]["online"]


def test_more_are_in_time_than_in_the_order_of_arrival_and_decodes_keep_their_pace():
    ours, by_arrival = online_of("cosched"), online_of("cosched-fcfs")
    met, met_by_arrival = (
        summary["attainment"]["joint"]["num_met"] for summary in (ours, by_arrival)
    )
    assert met > 2 * met_by_arrival > 0
    assert ours["attainment"]["tpot"]["ratio"] > 0.97
    assert ours["num_finished"] >= by_arrival["num_finished"]


def test_a_flood_that_no_policy_can_keep_tpot_for_is_done_as_soon_as_under_stock():
    """Decodes alone take longer than the target. A pace that cannot be kept only makes more
    iterations."""
    slow = replace(SPEC, cost=CostSpec(name="roofline", slower=8.0, slower_after_s=0.0))
    requests = [
        TraceRequest(
            rid=f"r{i}",
            request_class=RequestClass.ONLINE,
            arrival_s=0.0,
            num_output_tokens=15 + i % 30,
            segments=(Segment(i, 400),),
        )
        for i in range(150)
    ]

    def seconds(name):
        spec = replace(slow, setting=setting_of(name), duration_s=500.0)
        return max(record.finish_s for record in execute_requests(spec, requests, []).records)

    assert seconds("cosched") < 1.03 * seconds("s0")


def test_nobody_learns_of_the_waits_for_the_last_moment(monkeypatch):
    """Who took a wait that was too long for the time of the batch would wait longer the next
    time, and every deadline would be counted by that."""
    taught = []
    observe = Calibrator.observe

    def watch(self, batch, seconds):
        taught.append((batch, seconds))
        observe(self, batch, seconds)

    monkeypatch.setattr(Calibrator, "observe", watch)
    state = execute(replace(SPEC, config=(("predictor_error", 0.2),))).to_dict()["cosched"]
    assert state["num_dry"] > 0, "some waits are too long"
    assert len(taught) > 0.9 * state["num_iterations"]
    cost_model = cost_model_of(SPEC)
    for batch, seconds in taught:
        assert seconds == pytest.approx(cost_model.iteration_s(batch), abs=1e-9)
