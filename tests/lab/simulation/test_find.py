"""Capacity questions."""

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import Slo
from cosched.errors import ConfigError
from cosched.lab.simulation.find import QUESTIONS, find
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from tests.in_process import stay_in_process


def test_bad_questions_are_refused_before_anything_runs():
    spec = RunSpec(setting=setting_of("s0"))
    with pytest.raises(ConfigError, match=r"unknown question 'x'; choose from max-offline"):
        find("x", spec)
    with pytest.raises(ConfigError, match="name --online"):
        find("max-online-rate", spec)
    with pytest.raises(ConfigError, match=r"attainment is 1\.5"):
        find("min-kv", spec, attainment=1.5)
    assert set(QUESTIONS) == {"min-kv", "min-gpus", "max-offline", "max-online-rate"}


def test_a_question_is_answered_by_simulations(monkeypatch):
    """The answer was simulated and is good; just above it, within the tolerance, it is not."""
    ran = stay_in_process(monkeypatch)
    spec = RunSpec(
        setting=setting_of("s0"),
        machine=Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=16),
        online=WorkloadSpec(name="alpaca", rate=16.0),
        cost=CostSpec(name="roofline"),
        slo=Slo(ttft_s=0.3, tpot_s=0.05),
        duration_s=2.0,
    )
    answer = find("max-online-rate", spec, attainment=0.9, tolerance=0.9, quiet=True)
    tried = {probe["value"]: probe["attainment"] for probe in answer.probes}
    assert {one.online.rate for one in ran} == set(tried)
    assert answer.bounds == (1.0, 256.0)
    assert answer.value is not None and tried[answer.value] >= 0.9
    above = min(value for value in tried if value > answer.value)
    assert tried[above] < 0.9
    assert above - answer.value <= 0.9 * answer.value
    assert f"{answer.value:g} req/s" in answer.sentence()


def test_a_capacity_that_refuses_the_whole_offline_set_is_not_enough(monkeypatch):
    """Such a run is over at once, with all of its few online requests in time."""

    def execute(specs, *, num_jobs):
        for index, spec in enumerate(specs):
            num_failed = 5 if spec.machine.kv_tokens < 10_000 else 0
            offline = SimpleNamespace(num_requests=5, num_failed=num_failed, tokens_per_s=0.0)
            met = SimpleNamespace(joint=SimpleNamespace(ratio=1.0))
            online = SimpleNamespace(attainment=met)
            summary = SimpleNamespace(online=online, offline=offline)
            yield index, SimpleNamespace(summary=summary)

    monkeypatch.setattr("cosched.lab.simulation.find.execute_all", execute)
    spec = RunSpec(setting=setting_of("s0"), machine=Machine(kv_tokens=40_000))
    answer = find("min-kv", spec, quiet=True)
    assert answer.value is not None and 10_000 <= answer.value <= 10_500
