"""The Virtual Token Counter among the tenants of online requests, on hand-made views."""

from dataclasses import replace

from cosched.core.request import Slo
from cosched.papers.hygen.token_counters import (
    OUTPUT_WEIGHT,
    TokenCounters,
    VtcPolicy,
    least_served_first,
    lifted,
)
from cosched.schedule.base import PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, decoding, make_caps, online

CAPS = make_caps(max_chunk_tokens=1000, max_prefill_tokens=1000)


def plan_of(state=VtcPolicy.initial, **fields):
    view = FakeView(caps=CAPS, total_kv=99_999, **fields)
    view = replace(view, predictor=Linear())
    policy = VtcPolicy(PolicySettings(caps=CAPS, slo=Slo(ttft_s=1.0, tpot_s=0.05)))
    plan, state = policy.plan(view, state)
    validate(plan, view)
    return plan, state


def test_a_tenant_with_many_requests_does_not_delay_another():
    many = [online(f"many{i}", 100, tenant="many") for i in range(4)]
    few = online("few", 100, tenant="few")
    order = least_served_first([*many, few], {"many": 0.0, "few": 0.0})
    assert [r.rid for r in order] == ["many0", "few", "many1", "many2", "many3"]


def test_the_least_served_tenant_comes_first():
    waiting = [online("a", 800, tenant="a"), online("b", 800, tenant="b")]
    state = TokenCounters(counters={"a": 900.0, "b": 100.0}, waiting=("a", "b"))
    plan, after = plan_of(state, online=waiting)
    assert next(iter(plan.prefill)) == "b" and plan.prefill["b"] == 800
    assert after.counters["b"] == 900.0 and after.counters["a"] == 900.0 + plan.prefill.get("a", 0)


def test_generated_tokens_count_more_than_those_of_prompts():
    running = [replace(decoding(online("a", tenant="a")), first_token_s=0.0)]
    _, after = plan_of(running=running, online=[online("b", 10, tenant="b")])
    assert after.counters == {"a": OUTPUT_WEIGHT, "b": 10.0}


def test_time_without_requests_earns_nothing():
    state = TokenCounters(counters={"idle": 5.0, "busy": 700.0}, waiting=("busy",), last=600.0)
    assert lifted(state, ["busy", "idle", "new"]) == {"idle": 700.0, "busy": 700.0, "new": 700.0}
    assert lifted(state, ["idle"])["idle"] == 600.0
    assert lifted(TokenCounters(counters={"a": 900.0}, last=600.0), ["a"])["a"] == 900.0
