"""What holds for the plans of every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.core.kv_state import Match
from cosched.core.request import RequestClass, Slo
from cosched.core.view import OfflineLimits
from cosched.papers.bros.policy import Pressure
from cosched.papers.ecoserve.coupled import Groups
from cosched.policies import POLICIES
from cosched.schedule.base import PolicySettings
from cosched.schedule.cosched import LateTurn, Past
from cosched.schedule.online_order import LATE_TURN
from cosched.schedule.safe import SafePolicy
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled
from tests.schedule.views import views

MAKERS = {name: entry.make for name, entry in POLICIES.items() if entry.make is not None}


ONLINE_FIRST = ("cosched", "hygen", "echo", "sarathi")
"""Names of policies that never preempt an online decode, nor admit offline work before it."""


def policy_of(name, caps):
    slo = Slo(ttft_s=1.0, tpot_s=0.05)
    return MAKERS[name](PolicySettings(caps=caps, slo=slo, offline_rate=2.0))


def plan_of(name, view, state=None):
    policy = policy_of(name, view.caps)
    plan, _ = policy.plan(view, policy.initial if state is None else state)
    validate(plan, view)
    return plan


rids = st.sampled_from(["run0", "run1", "part0", "on0", "on1", "off0", "off1", "gone"])
groups = st.lists(st.lists(rids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
STATES = {
    Pressure: st.builds(Pressure, batch_size=st.sampled_from([1, 3, 128])),
    Groups: st.builds(Groups, chosen=groups, is_open=st.booleans()),
    Past: st.integers(0, LATE_TURN).map(lambda n: Past(turns=(LateTurn(n),))),
}


@pytest.mark.parametrize(
    "family", ["cosched", "hygen", "sarathi", "echo", "bros", "eco-", "ecoserve"]
)
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(view=views(), data=st.data())
def test_no_plan_is_refused_and_no_engine_is_left_idle(family, view, data):
    name = data.draw(st.sampled_from([name for name in MAKERS if name.startswith(family)]))
    if family == "cosched":  # it promises nothing: its forecast keeps what outputs need
        view = replace(view, promises=dict.fromkeys(view.promises, 0))
    initial = policy_of(name, view.caps).initial
    state = data.draw(STATES.get(type(initial), st.just(initial)))
    plan = plan_of(name, view, state)
    assert not plan.prefill.keys() & view.barred, "the engine has refused it"
    under_way = {r.rid: r for r in (*view.running, *view.unfinished)}
    assert all(under_way[stop.rid].traits.can_preempt for stop in plan.preempt)
    if not under_way:
        safe, _ = SafePolicy().plan(view, None)
        assert plan.prefill or not safe.prefill
    if name.startswith(ONLINE_FIRST):
        running = {r.rid: r.request_class for r in view.running}
        stopped = {running[stop.rid] for stop in plan.preempt if stop.rid in running}
        assert stopped <= {RequestClass.OFFLINE}
        if any(rid.startswith("off") for rid in plan.prefill):
            # A prompt that cannot mix waits for decodes that are due.
            may_run = {r.rid for r in view.online if r.traits.can_mix or not view.must_decode}
            assert may_run <= plan.prefill.keys() | view.barred


CAPS = make_caps(partial_decode=True, promises=True)


@pytest.mark.parametrize("name", MAKERS)
def test_the_operators_limits_are_obeyed(name):
    jobs = tuple(decoding(offline(f"job{i}"), 5) for i in range(3))
    # It has more output than they, so that it stops none of them.
    waits = offline("waits", num_output_tokens=30, max_new_tokens=400)
    limits = OfflineLimits(max_running=1, stop_running=True)
    view = FakeView(caps=CAPS, running=jobs, offline=(waits,), offline_limits=limits)
    plan = plan_of(name, view)
    assert {stop.rid for stop in plan.preempt} == {"job1", "job2"} and not plan.prefill
    idle = FakeView(caps=CAPS, offline=(waits, offline("more")), offline_limits=limits)
    assert len(plan_of(name, idle).prefill) == 1


# EcoServe sets KV aside for whole outputs, so that it seldom recomputes.
@pytest.mark.parametrize("name", [name for name in MAKERS if not name.startswith("ecoserve")])
def test_no_offline_request_is_admitted_beside_others_while_recomputation_is_owed(name):
    running = (decoding(offline("job")),)
    view = FakeView(caps=CAPS, running=running, offline=(offline("waits"),), recompute_debt_s=1.0)
    assert not plan_of(name, view).prefill


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_else_is_prefilled_before_an_unfinished_online_prompt_that_lacks_memory(name):
    """A short prompt whose beginning is cached would find some."""
    unfinished = prefilled(online("unfinished", 4000), 2000)
    chats = tuple(
        decoding(online(f"chat{i}", 600, max_new_tokens=200, first_token_s=-9.0), 5)
        for i in range(3)
    )
    view = FakeView(
        caps=CAPS,
        total_kv=2000 + sum(r.num_computed_tokens for r in chats) + 3,
        running=chats,
        unfinished=(unfinished,),
        online=(online("waits", 10),),
        offline=(offline("job", 10),),
        cached={rid: Match(cached=9, evictable=0) for rid in ("waits", "job")},
    )
    plan = plan_of(name, view)
    assert "unfinished" not in [stop.rid for stop in plan.preempt]
    assert plan.prefill.keys() <= {"unfinished"}
