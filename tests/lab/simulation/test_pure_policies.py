"""Every policy is a function of what it is given: asked again about a view, it plans the same."""

from dataclasses import replace

import pytest

from cosched.lab.simulation.run import WorkloadSpec
from tests.small_runs import plans_asked_twice, spec_of

CHEAP = {"duration_s": 2.0}
MANY_PREFIXES = {"offline": WorkloadSpec(name="mmlu-like", num_requests=300), **CHEAP}
OVERLOAD = {"online": WorkloadSpec(name="azure-like", rate=25.0), "duration_s": 3.0}


@pytest.mark.parametrize(
    ("policy", "overlap", "changes", "happens"),
    [
        ("hygen", True, {}, lambda plan: plan.preempt and plan.skipped),
        ("hygen", False, MANY_PREFIXES, lambda plan: plan.prefill),
        ("hygen", True, {"config": (("predictor_error", 0.2),)}, lambda plan: plan.paused),
        ("hygen-throttled", False, {"config": (("offline_rate", 4.0),)}, lambda plan: plan.skipped),
        ("sarathi", True, CHEAP, lambda plan: plan.prefill),
        ("cosched", True, OVERLOAD, lambda plan: plan.late),
        ("echo-bs+e+s", True, MANY_PREFIXES, lambda plan: plan.prefill),
        ("bros", True, CHEAP, lambda plan: plan.prefill),
    ],
)
def test_a_policy_asked_twice_about_one_view_plans_the_same(
    monkeypatch, policy, overlap, changes, happens
):
    plans = plans_asked_twice(replace(spec_of(policy, overlap=overlap), **changes), monkeypatch)
    assert len(plans) > 50 and any(map(happens, plans))
