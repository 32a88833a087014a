"""What forecasts would have said of simulated jobs (`tests.batch.replay`)."""

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.lab.simulation.setting import setting_of
from tests.batch.replay import errors

SHARES = (0.4, 0.6, 0.8, 0.9)


@pytest.mark.parametrize(
    ("job", "limit", "num_lines"), [("documents", 150, 80), ("bros-offline", 128, 400)]
)
def test_a_job_is_done_about_when_its_forecast_says(job, limit, num_lines):
    spec = RunSpec(
        setting=setting_of("cosched"),
        machine=Machine(kv_tokens=60_000, chunk_tokens=1024, max_running_requests=32),
        cost=CostSpec(name="roofline"),
        online=WorkloadSpec(name="azure-like", rate=1.0),
        offline=WorkloadSpec(name=job, num_requests=num_lines),
        duration_s=600.0,
    )
    records = execute(spec).records
    cost_model = make_cost_model("roofline", model=spec.machine.model, gpu=spec.machine.gpu)
    _, found = errors(records, cost_model=cost_model, limit=limit, shares=SHARES)
    assert all(abs(one) < 0.15 for one in found)
    assert abs(found[-1]) < 0.1
