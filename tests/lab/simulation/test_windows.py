"""Offline work with a window: it rises when what is left of it needs all the time that is left."""

from dataclasses import replace

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import Slo
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import (
    CostSpec,
    RunSpec,
    WorkloadSpec,
    execute_requests,
    load_requests,
)
from cosched.lab.simulation.setting import setting_of

WINDOW_S = 30.0
SPEC = RunSpec(
    setting=setting_of("cosched"),
    machine=Machine(kv_tokens=60_000, chunk_tokens=1024, max_running_requests=32),
    cost=CostSpec(name="roofline"),
    online=WorkloadSpec(name="azure-like", rate=2.0),
    offline=WorkloadSpec(name="bros-offline", num_requests=400),
    duration_s=WINDOW_S,
    # Two seconds before its end are far too late for a job that takes fourteen.
).configured(pool={"deadline_margin_s": 2.0})
NUM_IN_JOB = 100


def served(deadline_s):
    """(requests of the job that ended, online attainment, offline tokens per second)"""
    online, offline = load_requests(SPEC)
    job = [replace(r, slo=Slo(deadline_s=deadline_s)) for r in offline[-NUM_IN_JOB:]]
    result = execute_requests(SPEC, online, [*offline[:-NUM_IN_JOB], *job])
    rids = {request.rid for request in job}
    num_ended = sum(r.finish_s is not None for r in result.records if r.rid in rids)
    summary = result.to_dict()["summary"]
    met = summary["online"]["attainment"]["joint"]["ratio"]
    return num_ended, met, summary["offline"]["tokens_per_s"]


def test_a_job_meets_a_window_that_it_would_miss_in_its_turn_and_chat_does_not_notice():
    num_ended, met, rate = served(WINDOW_S)
    num_in_turn, met_in_turn, rate_in_turn = served(None)
    assert num_ended == NUM_IN_JOB and num_in_turn < NUM_IN_JOB / 10
    assert met >= met_in_turn - 0.01 and rate > 0.95 * rate_in_turn
