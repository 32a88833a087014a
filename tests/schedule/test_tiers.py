"""Tiers of online requests in the default policy, on hand-made views."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.core.plan import SkipReason
from cosched.core.request import RequestClass, Slo
from cosched.core.tiers import Tier
from cosched.schedule.base import PolicySettings
from cosched.schedule.cosched import CoschedOptions, CoschedPolicy, LateTurn, Past
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online, prefilled
from tests.schedule.views import views

TIERS = (
    Tier(name="high", priority=10, share=0.1),
    Tier(name="default", priority=5, share=0.25),
    Tier(name="low", priority=0, share=0.1),
)
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
CAPS = make_caps(partial_decode=True, promises=True, max_chunk_tokens=2048, max_prefill_tokens=4096)


def policy_of(view, tiers=TIERS, **options):
    return CoschedPolicy(
        PolicySettings(caps=view.caps, slo=SLO, tiers=tiers), CoschedOptions(**options)
    )


def planned(view, state=None, **options):
    policy = policy_of(view, **options)
    plan, after = policy.plan(view, state or policy.initial)
    validate(plan, view)
    return plan, after


def view_of(**fields):
    return FakeView(**{"caps": CAPS, "now_s": 10.0, "start_s": 10.0, "total_kv": 50_000} | fields)


def chat(rid, tier, num_tokens=500, *, age_s=0.1, **fields):
    return online(rid, num_tokens, tier=tier, arrival_s=10.0 - age_s, **fields)


def replying(rid, tier, *, ago_s=0.03, **fields):
    """Decodes its second token; its first came `ago_s` ago."""
    request = online(rid, 100, tier=tier, max_new_tokens=200, arrival_s=9.0, **fields)
    return replace(decoding(request, 1), first_token_s=10.0 - ago_s)


def test_a_higher_tier_comes_before_a_lower_one():
    queue = [chat("low", 2, age_s=0.8), chat("mid", 1, age_s=0.5), chat("high", 0)]
    plan, _ = planned(view_of(online=queue))
    assert [*plan.prefill] == ["high", "mid", "low"]
    plan, _ = planned(view_of(online=[*queue, chat("late", 0, age_s=3.0)]))
    assert [*plan.prefill][:2] == ["high", "late"], "its late requests too"


def test_an_unfinished_prefill_of_a_lower_tier_makes_way():
    low = prefilled(chat("low", 1, 9000), 4000)
    plan, _ = planned(view_of(unfinished=(low,), online=[chat("high", 0)]))
    assert [*plan.prefill] == ["high"] and [one.rid for one in plan.preempt] == ["low"]
    plan, _ = planned(view_of(unfinished=(low,), online=[chat("lowest", 2)]))
    assert next(iter(plan.prefill)) == "low" and not plan.preempt


def test_a_lower_tier_comes_first_in_its_share_of_the_iterations():
    view = view_of(online=[*(chat(f"h{i}", 0, 2000) for i in range(9)), chat("mid", 1, 3000)])
    state, first = None, []
    for _ in range(10):
        plan, state = planned(view, state)
        first.append(next(iter(plan.prefill)))
    assert first.count("mid") == 2, "one in five: four plans earn the credit of one"
    _, state = planned(view_of(online=[chat("high", 0)]), state)
    assert state.credits == (0.0, 0.0, 0.0), "a tier without work saves nothing up"


def test_decodes_of_a_lower_tier_wait_where_a_higher_one_would_be_late():
    """Each decode takes 1 ms beside 5 ms for all."""
    slow = Linear(fixed_s=0.005, token_s=0.001)
    high = tuple(replying(f"high{i}", 0, ago_s=0.03) for i in range(5))
    low = tuple(replying(f"low{i}", 1, ago_s=0.03) for i in range(20))
    view = view_of(running=(*high, *low), online=[chat("more", 1, 30)], predictor=slow)
    plan, _ = planned(view)
    assert 11 <= len(plan.paused) < 20 and plan.paused <= {r.rid for r in low}
    assert not plan.prefill and plan.skipped["more"] is SkipReason.HIGHER_TIER
    plan, _ = planned(replace(view, running=(*high, *low[:5])))
    assert not plan.paused


def test_offline_decodes_wait_before_those_of_a_lower_tier():
    slow = Linear(fixed_s=0.005, token_s=0.001)
    high = tuple(replying(f"high{i}", 0) for i in range(5))
    low = tuple(replying(f"low{i}", 1) for i in range(12))
    jobs = tuple(decoding(offline(f"job{i}"), 5) for i in range(5))
    plan, _ = planned(view_of(running=(*high, *low, *jobs), predictor=slow))
    assert {r.rid for r in jobs} <= plan.paused and len(plan.paused) < 5 + 12


def test_a_lower_tier_gives_its_memory_to_a_higher_one_after_offline_work():
    low = [replying(f"low{i}", 1 + i % 2, arrival_seq=i) for i in range(4)]
    job = decoding(offline("job", 100), 5)
    view = view_of(running=(*low, job), online=[chat("high", 0, 200)], total_kv=620)
    plan, _ = planned(view, timeline=False)
    victims = [one.rid for one in plan.preempt]
    assert "high" in plan.prefill and victims[:2] == ["job", "low3"]
    plan, _ = planned(replace(view, online=[chat("same", 1, 200)]), timeline=False)
    assert not {"low0", "low2"} & {one.rid for one in plan.preempt}, "never of its own tier"


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(view=views(), credits=st.tuples(*[st.sampled_from([0.0, 1.0])] * 3))
def test_no_plan_is_refused_and_a_higher_tier_is_never_preempted_for_a_lower_one(view, credits):
    def tiered(requests):
        return tuple(replace(r, tier=int(r.rid[-1]) % 3) for r in requests)

    view = replace(
        view,
        running=tiered(view.running),
        unfinished=tiered(view.unfinished),
        online=tiered(view.online),
    )
    plan, _ = planned(view, Past(turns=(LateTurn(),) * 3, credits=(0.0, *credits[1:])))
    stopped = {one.rid for one in plan.preempt}
    chats = [r for r in view.running if r.request_class is RequestClass.ONLINE]
    # One that waits may come before all that run.
    highest = min((r.tier for r in (*chats, *view.online)), default=0)
    assert not stopped & {r.rid for r in chats if r.tier == highest}
    if not view.running and not view.unfinished:
        most = view.caps.max_chunk_tokens or view.total_kv
        fitting = [r for r in view.online if r.traits.can_cut or r.num_prompt_tokens <= most]
        assert plan.prefill or not [r for r in fitting if r.rid not in view.barred]


@pytest.mark.parametrize("feasible", [True, False])
def test_one_tier_is_as_none(feasible):
    queue = [chat("late", 0, 3000, age_s=3.0), *(chat(f"due{i}", 0) for i in range(3))]
    view = view_of(online=queue, running=(replying("run", 0),), offline=(offline("job"),))
    one, _ = planned(view, tiers=TIERS[:1], feasible=feasible)
    none, _ = planned(view, tiers=(), feasible=feasible)
    assert one == none
