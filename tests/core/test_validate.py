"""A plan that breaks a limit of the engine is refused, by name."""

import pytest

from cosched.core.plan import Plan, Preemption
from cosched.core.validate import validate
from cosched.errors import PlanError
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled

UNFINISHED = prefilled(offline("u", 500), 100)
RUNNING = decoding(online("r"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(prefill={"a": 0}, preempt=(Preemption(rid="u"),)), "at least 1"),
        (Plan(prefill={"a": 5}), "neither continued nor preempted"),
        (Plan(prefill={"u": 5}, preempt=(Preemption(rid="u"),)), "preempted and prefilled"),
        (Plan(preempt=(Preemption(rid="u"), Preemption(rid="u"))), "twice"),
        (Plan(prefill={"u": 5}, preempt=(Preemption(rid="nobody"),)), "not running"),
        (Plan(prefill={"u": 5}, decode=False), "partial decode"),
    ],
)
def test_broken_plans_are_refused_with_the_reason(plan, message):
    view = FakeView(running=(RUNNING,), unfinished=(UNFINISHED,), online=[online("a")])
    with pytest.raises(PlanError, match=message):
        validate(plan, view)


def test_mixed_batch_is_refused_where_the_engine_has_none():
    view = FakeView(caps=make_caps(mixed_batches=False), running=(RUNNING,), online=[online("a")])
    with pytest.raises(PlanError, match="no mixed batches"):
        validate(Plan(prefill={"a": 5}), view)
    validate(Plan(prefill={"a": 5}, decode=False), view)
