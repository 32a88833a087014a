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
        (Plan(prefill={"u": 5}, hold=frozenset({"r"})), "cannot be divided"),
    ],
)
def test_broken_plans_are_refused_with_the_reason(plan, message):
    view = FakeView(running=(RUNNING,), unfinished=(UNFINISHED,), online=[online("a")])
    with pytest.raises(PlanError, match=message):
        validate(plan, view)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(hold=frozenset({"nobody"})), "not running"),
        (Plan(hold=frozenset({"r"}), preempt=(Preemption(rid="r"),)), "not running"),
        (Plan(hold=frozenset({"r", "s"})), "all running requests are held"),
        (Plan(hold=frozenset({"r"}), preempt=(Preemption(rid="s"),)), "all running requests"),
    ],
)
def test_only_some_of_the_running_requests_can_be_held(plan, message):
    view = FakeView(
        caps=make_caps(partial_decode=True),
        running=(RUNNING, decoding(online("s"))),
        online=[online("a")],
    )
    with pytest.raises(PlanError, match=message):
        validate(plan, view)
    validate(Plan(hold=frozenset({"r"})), view)
    validate(Plan(prefill={"a": 5}, hold=frozenset({"r", "s"})), view)
