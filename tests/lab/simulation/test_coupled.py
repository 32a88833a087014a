"""The coupled schedulers in the simulator: with memory for a few of the requests all are served."""

import random

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import RequestClass
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.lab.simulation.setting import setting_of
from cosched.policies import POLICIES

NAMES = [name for name in POLICIES if name.startswith("eco-")]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Far more at once than fits: 1,216 tokens of memory, 30 to 500 for each request."""
    rng = random.Random(0)
    rows = [f"{rng.randint(10, 300)},{rng.randint(20, 200)}" for _ in range(24)]
    path = tmp_path_factory.mktemp("coupled") / "job.csv"
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return WorkloadSpec(name=str(path))


@pytest.mark.parametrize("mode", ["histogram", "oracle"])
@pytest.mark.parametrize("name", NAMES)
def test_all_are_served(name, mode, job):
    page_size = 32 if mode == "oracle" else 1
    spec = RunSpec(
        setting=setting_of(name),
        machine=Machine(kv_tokens=1_216, page_size=page_size, max_running_requests=64),
        online=WorkloadSpec(name="alpaca", rate=1.0),
        offline=job,
        cost=CostSpec(name="roofline"),
        duration_s=120.0,
    ).configured(length={"mode": mode})
    result = execute(spec)
    offline = [r for r in result.records if r.request_class is RequestClass.OFFLINE]
    assert len(offline) == 24 and all(r.is_finished for r in offline)
    assert result.summary.online.num_finished > 3
    told = result.to_dict()["cosched"]
    assert not told["failures"] and not told["num_engine_refusals"] and not told["num_safe_plans"]
    if name in ("eco-vllm", "eco-fastgen", "eco-syncfastgen", "eco-srtf", "eco-fastserve"):
        assert told["num_preemptions"]
    elif mode == "oracle":
        # What is set aside is enough.
        assert not told["num_preemptions"]
