"""examples/batch_size.py: BROS's rule for the batch size, on hand-made views."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.schedule.base import PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online
from tests.schedule.views import views

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CAPS = make_caps(max_running_requests=512, partial_decode=True)


@pytest.fixture(scope="module")
def planned():
    """Call it with a view and the most requests that may run -> (the plan, most for the next)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        example = importlib.import_module("batch_size")
    policy = example.BatchSize(PolicySettings(caps=CAPS, slo=Slo(ttft_s=1.0, tpot_s=0.05)))

    def plan(view, most=128):
        made, after = policy.plan(view, example.Active(most))
        validate(made, view)
        return made, after.most

    return plan


def running(rid, last_token_s=0.0, make=online):
    return decoding(make(rid, first_token_s=0.0, last_token_s=last_token_s), 5)


def test_it_doubles_up_to_the_rows_while_there_is_time(planned):
    view = FakeView(caps=CAPS, running=(running("chat"),), offline=(offline("job"),))
    for most, following in ((128, 256), (256, 512), (512, 512)):
        plan, after = planned(view, most)
        assert (plan.prefill, plan.paused, after) == ({"job": 100}, set(), following)


def test_an_online_request_without_time_takes_it_back_to_128(planned):
    # 5 ms and 0.1 ms for each token: two decodes fit into the 5.2 ms that the first one has left.
    due = tuple(running(f"r{i}", last_token_s=0.0002 - 0.045 + 0.0001 * i) for i in range(5))
    plan, most = planned(FakeView(caps=CAPS, running=due, online=(online("late-comer"),)), 512)
    assert (plan.paused, plan.prefill, most) == ({"r2", "r3", "r4"}, {}, 128)


def test_no_more_than_the_batch_size_run_and_the_least_urgent_are_held(planned):
    chats = tuple(running(f"r{i}", last_token_s=-0.001 * i) for i in range(5))
    plan, most = planned(FakeView(caps=CAPS, running=chats, online=(online("waits"),)), 3)
    assert (plan.paused, plan.prefill, most) == ({"r0", "r1"}, {}, 6)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(view=views(), most=st.sampled_from([1, 3, 128]))
def test_no_plan_is_refused(planned, view, most):
    plan, after = planned(view, most)
    assert after in (128, min(2 * most, view.caps.max_running_requests))
    assert not any(rid in plan.prefill for rid in view.barred)
