"""Plans for a real SGLang scheduler keep the time that the deadlines of online requests leave."""

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.lab.simulation.run import execute
from cosched.papers.echo.policy import EchoPolicy
from cosched.papers.hygen.policy import HygenPolicy
from tests.lab.simulation.test_virtual_time import make_spec
from tests.schedule.limits import decoding_in, has_offline_work, offline_limit_s, seconds_of


@pytest.mark.parametrize(("name", "policy"), [("hygen", HygenPolicy), ("echo-bs+e+s", EchoPolicy)])
def test_offline_work_keeps_the_deadlines_of_online_requests(monkeypatch, name, policy):
    """The time of each plan as the predictor has it, and the limit from the requests alone."""
    shares = []
    plan_of = policy.plan

    def plan(self, view, state):
        plan, after = plan_of(self, view, state)
        is_alone = len(decoding_in(plan, view)) + len(plan.prefill) == 1  # runs however long
        if has_offline_work(plan, view) and not is_alone:
            limit_s = offline_limit_s(view, self._settings.slo, self._settings.budgets)
            assert seconds_of(plan, view) <= limit_s + 1e-9
            shares.append(seconds_of(plan, view) / limit_s)
        return plan, after

    monkeypatch.setattr(policy, "plan", plan)
    execute(make_spec(name, duration_s=2.0))
    assert len(shares) > 50
    assert sum(share > 0.8 for share in shares) > 10, "the limits mattered"
