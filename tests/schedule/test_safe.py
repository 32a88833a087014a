"""The rule that plans where a policy cannot."""

from cosched.core.plan import SkipReason
from cosched.core.request import Traits
from cosched.schedule.safe import SafePolicy
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled


def plan_of(view):
    plan = SafePolicy().plan(view, None)[0]
    validate(plan, view)
    return plan


def test_online_requests_come_in_order_until_one_does_not_fit():
    view = FakeView(
        running=(decoding(offline("runs", 50)),),
        online=[online("a", 100), online("b", 600), online("c", 10)],
        offline=[offline("off", 10)],
    )
    plan = plan_of(view)
    assert plan.prefill == {"a": 100, "b": 411}
    assert plan.skipped == {"c": SkipReason.TOKEN_BUDGET}
    assert not plan.preempt and not plan.paused


def test_offline_requests_are_served_where_no_online_request_is():
    waiting = [offline("a", 100), offline("b", 100)]
    alone = FakeView(running=(decoding(offline("r", 50)),), offline=waiting)
    assert list(plan_of(alone).prefill) == ["a", "b"]
    beside = FakeView(running=(decoding(online("r", 50)),), offline=waiting)
    assert not plan_of(beside).prefill


def test_an_unfinished_prefill_goes_on_or_is_stopped():
    begun = prefilled(offline("begun", 400), 100)
    assert plan_of(FakeView(unfinished=(begun,))).prefill == {"begun": 300}
    tight = FakeView(unfinished=(begun,), total_kv=100)
    assert [p.rid for p in plan_of(tight).preempt] == ["begun"]
    fixed = prefilled(offline("begun", 400, traits=Traits(can_preempt=False)), 100)
    plan = plan_of(FakeView(unfinished=(fixed,), total_kv=100, online=[online("a", 1)]))
    assert not plan.prefill and not plan.preempt


def test_decodes_have_their_turn_where_they_cannot_be_mixed():
    view = FakeView(
        caps=make_caps(mixed_batches=False),
        running=(decoding(online("r")),),
        online=[online("a")],
        must_decode=True,
    )
    assert not plan_of(view).prefill
