"""The largest value of a parameter that meets all goals."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.errors import ConfigError
from cosched.lab.metrics.goals import parse_goal
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.lab.simulation.slo_search import SEARCHES, find_largest
from tests.in_process import stay_in_process

SPEC = RunSpec(
    setting=setting_of("hygen"),
    machine=Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32),
    online=WorkloadSpec(name="alpaca", rate=8.0),
    offline=WorkloadSpec(name="bros-offline", num_requests=60),
    cost=CostSpec(name="roofline"),
    duration_s=3.0,
)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"online": None}, {}, "needs both classes"),
        ({}, {"low": 5.0, "high": 4.0}, "the range is 5 to 4"),
        ({}, {"tolerance": 1.5}, r"tolerance is 1\.5"),
        ({"config": (("latency_budget_mss", 3),)}, {}, "latency_budget_mss"),
        ({"config": (("latency_model", 3),)}, {}, r"latency_model"),
    ],
)
def test_bad_questions_are_refused_before_anything_runs(changes, arguments, message):
    with pytest.raises(ConfigError, match=message):
        find_largest("budget", replace(SPEC, **changes), [parse_goal("p99_ttft<=1s")], **arguments)


def test_a_search_without_a_goal_is_refused():
    with pytest.raises(ConfigError, match="name at least one --slo"):
        find_largest("budget", SPEC, [])
    assert set(SEARCHES) == {"budget", "offline-rate"}


def test_a_real_search_meets_its_goals_and_the_next_value_does_not(monkeypatch):
    stay_in_process(monkeypatch)
    goals = [parse_goal("p99_tbt<=25ms"), parse_goal("p99_ttft<=2s"), parse_goal("mean_tbt<=+900%")]
    ran = []
    answer = find_largest(
        "budget",
        SPEC,
        goals,
        low=10.0,
        high=80.0,
        tolerance=0.6,
        on_run=lambda what, _: ran.append(what),
    )
    assert answer.value is not None
    assert ran[0] == "online requests alone" and len(ran) == len(answer.probes) + 1
    assert answer.bounds[:2] == (0.025, 2.0)
    assert answer.bounds[2] == pytest.approx(10 * answer.baseline[2])
    by_value = {probe.value: probe for probe in answer.probes}
    assert by_value[answer.value].is_good
    assert all(r <= b for r, b in zip(by_value[answer.value].reached, answer.bounds, strict=True))
    above = min(value for value in by_value if value > answer.value)
    assert not by_value[above].is_good and above <= answer.value * 1.601
