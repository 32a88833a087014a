"""examples/batch_size.py: BROS's rule for the batch size, on hand-made views."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.schedule.base import PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online
from tests.schedule.views import views

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CAPS = make_caps(max_running_requests=512, partial_decode=True)


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("batch_size")


@pytest.fixture(scope="module")
def policy(example):
    return example.BatchSize(PolicySettings(caps=CAPS, slo=Slo(ttft_s=1.0, tpot_s=0.05)))


def planned(policy, view, state=None):
    plan, after = policy.plan(view, policy.initial if state is None else state)
    validate(plan, view)
    return plan, after.most


def running(rid, last_token_s=0.0, make=online, **fields):
    fields = {"first_token_s": 0.0, "last_token_s": last_token_s, **fields}
    return decoding(make(rid, **fields), 5)


def test_it_doubles_up_to_the_rows_while_there_is_time(policy, example):
    view = FakeView(caps=CAPS, running=(running("chat"),), offline=(offline("job"),))
    assert policy.initial.most == 128
    sizes, state = [], policy.initial
    for _ in range(4):
        plan, most = planned(policy, view, state)
        assert plan.prefill == {"job": 100} and not plan.paused
        sizes.append(most)
        state = example.Active(most)
    assert sizes == [256, 512, 512, 512]


def test_an_online_request_without_time_takes_it_back_to_128(policy, example):
    # 5 ms and 0.1 ms for each token: two decodes fit into the 5.2 ms that the first one has left.
    due = tuple(running(f"r{i}", last_token_s=0.0002 - 0.045 + 0.0001 * i) for i in range(5))
    view = FakeView(caps=CAPS, running=due, online=(online("late-comer"),))
    plan, most = planned(policy, view, example.Active(512))
    assert (plan.paused, plan.prefill, most) == ({"r2", "r3", "r4"}, {}, 128)


def test_an_offline_request_without_time_does_not(policy):
    chat, job = running("chat", last_token_s=-0.0448), running("job", make=offline)
    due = running("other", last_token_s=-0.0448)
    view = FakeView(caps=CAPS, running=(job, chat, due))
    plan, most = planned(policy, view)
    assert (plan.paused, most) == ({"job"}, 256)


def test_no_more_than_the_batch_size_run_and_the_least_urgent_are_held(policy, example):
    chats = tuple(running(f"r{i}", last_token_s=-0.001 * i) for i in range(5))
    view = FakeView(caps=CAPS, running=chats, online=(online("waits"),))
    plan, most = planned(policy, view, example.Active(3))
    assert (plan.paused, plan.prefill, most) == ({"r0", "r1"}, {}, 6)


def test_who_waits_goes_before_who_has_more_time(policy, example):
    waits = online("waits", arrival_s=-0.97)
    view = FakeView(
        caps=CAPS, running=(running("chat"),), online=(waits,), offline=(offline("job"),)
    )
    plan, _ = planned(policy, view, example.Active(1))
    assert (plan.prefill, plan.paused) == ({"waits": 100}, {"chat"})


def test_a_prompt_is_cut_where_the_time_ends(policy):
    view = FakeView(caps=CAPS, running=(running("chat"),), online=(online("long", 2000),))
    plan, most = planned(policy, view)
    assert (plan.prefill, plan.paused, most) == ({"long": 449}, set(), 256)


def test_where_nobody_can_be_held_all_that_runs_counts_first(policy):
    caps = make_caps(max_running_requests=512)
    jobs = tuple(running(f"j{i}", make=offline) for i in range(100))
    waits = online("waits", arrival_s=-0.98)  # 20 ms left, of which 15 ms are taken
    view = FakeView(caps=caps, total_kv=40_000, running=jobs, online=(waits,))
    plan, _ = planned(policy, view)
    assert (plan.prefill, plan.paused) == ({"waits": 50}, set())


def test_nothing_waits_for_late_requests(policy):
    view = FakeView(caps=CAPS, online=(online("late", arrival_s=-5.0),))
    plan, _ = planned(policy, view)
    assert plan.prefill == {"late": 100}


@given(view=views(), most=st.sampled_from([1, 3, 128]))
def test_no_plan_is_refused(policy, example, view, most):
    plan, after = planned(policy, view, example.Active(most))
    assert after in (128, min(2 * most, view.caps.max_running_requests))
    assert not any(rid in plan.prefill for rid in view.barred)
