"""A plan that breaks a limit of the engine is refused, by name."""

import math

import pytest

from cosched.core.plan import Loan, Plan, Preemption, PreemptMode
from cosched.core.request import Traits
from cosched.errors import PlanError
from cosched.schedule.validate import validate
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
        (Plan(prefill={"u": 5}, paused=frozenset({"r"})), "cannot pause now"),
        (Plan(prefill={"u": 5, "gone": 5}), "neither waits nor is unfinished"),
        (Plan(prefill={"u": 500}), "500 tokens; 400 fit"),
        (Plan(prefill={"u": 5, "a": 5}), "no room: a .unfinished_prefill"),
        (Plan(limits={"online": math.inf}), "no number of seconds"),
        (Plan(decodes=False), "nothing decodes and nothing is prefilled"),
        (Plan(prefill={"u": 5}, decodes=False), "are paused"),
        (Plan(prefill={"u": 5}, promise={"r": 100}), "keeps its own reserve"),
        (Plan(prefill={"u": 5}, loans={"r": Loan(lender="u", offset=3)}), "lends KV, but"),
        (
            Plan(preempt=(Preemption(rid="r", mode=PreemptMode.CHECKPOINT),)),
            "no host memory for the KV of .'r'",
        ),
    ],
)
def test_broken_plans_are_refused_with_the_reason(plan, message):
    view = FakeView(running=(RUNNING,), unfinished=(UNFINISHED,), online=[online("a")])
    with pytest.raises(PlanError, match=message):
        validate(plan, view)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(paused=frozenset({"nobody"})), "not running"),
        (Plan(paused=frozenset({"r"}), preempt=(Preemption(rid="r"),)), "not running"),
        (Plan(paused=frozenset({"r", "s"})), "all running requests are paused"),
        (Plan(paused=frozenset({"r"}), preempt=(Preemption(rid="s"),)), "all running requests"),
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
    validate(Plan(paused=frozenset({"r"})), view)
    validate(Plan(prefill={"a": 5}, paused=frozenset({"r", "s"})), view)


def test_memory_and_slots_are_counted_again():
    plan = Plan(prefill={"a": 100, "b": 100})
    waiting = [online("a"), online("b")]
    validate(plan, FakeView(online=waiting))
    with pytest.raises(PlanError, match=r"no room: b .memory_budget"):
        validate(plan, FakeView(online=waiting, total_kv=200))
    with pytest.raises(PlanError, match=r"no room: b .request_slots"):
        validate(plan, FakeView(online=waiting, caps=make_caps(max_running_requests=1)))
    with pytest.raises(PlanError, match=r"b is 100 tokens; 50 fit|no room: b .token_budget"):
        validate(plan, FakeView(online=waiting, caps=make_caps(max_chunk_tokens=150)))


def test_decodes_are_said_not_to_run_beside_a_prefill_that_cannot_be_mixed():
    alone = online("alone", traits=Traits(can_mix=False))
    view = FakeView(running=(RUNNING,), online=[alone], caps=make_caps(partial_decode=True))
    validate(Plan(prefill={"alone": 100}, decodes=False), view)
    with pytest.raises(PlanError, match="cannot share"):
        validate(Plan(prefill={"alone": 100}), view)
    # Where the one that runs is held, nothing is left to share it with.
    validate(Plan(prefill={"alone": 100}, paused=frozenset({"r"}), decodes=False), view)


def test_one_that_is_about_to_end_cannot_be_held():
    view = FakeView(
        caps=make_caps(partial_decode=True),
        running=(RUNNING, decoding(online("s"))),
        unholdable={"r"},
    )
    validate(Plan(paused=frozenset({"s"})), view)
    with pytest.raises(PlanError, match="its decode cannot pause now: r"):
        validate(Plan(paused=frozenset({"r"})), view)


@pytest.mark.parametrize(
    ("promise", "message"),
    [
        ({"gone": 5}, "neither runs nor waits"),
        ({"r": 200_000}, "it may generate"),
        ({"r": -1}, "it may generate"),
        ({"r": 900}, "KV tokens more than there are"),
    ],
)
def test_only_what_there_is_can_be_promised(promise, message):
    running = decoding(online("r", 50, max_new_tokens=1000))
    view = FakeView(
        caps=make_caps(promises=True), total_kv=500, running=(running,), promises={"r": 100}
    )
    with pytest.raises(PlanError, match=message):
        validate(Plan(promise=promise), view)
    validate(Plan(promise={"r": 400}), view)
