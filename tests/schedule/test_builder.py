"""Plans are built step by step, and what is built fits."""

import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.core.kv_state import Match
from cosched.core.plan import Preemption, PreemptMode, SkipReason
from cosched.core.request import Traits
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.validate import validate
from tests.factories import FakeRequest, FakeView, decoding, make_caps, offline, online, prefilled
from tests.schedule.views import views

PARTIAL = make_caps(partial_decode=True)
NOTHING = Match(cached=0, evictable=0)
LIMITS = ("tokens", "slots", "unfinished")


def state_of(builder):
    ledger = builder.ledger
    return [getattr(ledger, name) for name in LIMITS], vars(ledger.kv).copy(), ledger.totals.copy()


def test_a_hold_taken_back_leaves_no_trace():
    running = decoding(offline("a"))
    builder = PlanBuilder(FakeView(running=(running, decoding(online("b"))), caps=PARTIAL))
    before = state_of(builder)
    assert builder.pause(running) and builder.skipped == {"a": SkipReason.LATENCY_BUDGET}
    assert state_of(builder) != before
    assert not builder.pause(running), "it is held already"
    builder.resume(running)
    assert state_of(builder) == before and not builder.skipped
    assert builder.build().paused == frozenset()


def test_one_whose_place_was_taken_stays_held():
    running = [decoding(offline(f"r{i}")) for i in range(4)]
    waiting = online("w", 512)
    view = FakeView(running=tuple(running), online=[waiting], caps=PARTIAL)
    builder = PlanBuilder(view)
    for request in running:
        builder.pause(request)
    assert builder.admit(waiting, NOTHING, 511)
    assert builder.resume(running[0]) and not builder.resume(running[1])
    urgent = running[2]
    assert builder.exchange(running[0], urgent) and urgent.rid not in builder.paused
    validate(builder.build(), view)


def test_a_time_limit_cuts_no_prompt_that_cannot_be_cut():
    whole = online("whole", 300, traits=Traits(can_cut=False))
    builder = PlanBuilder(FakeView(online=[whole]))
    assert not builder.admit(whole, NOTHING, 10)
    assert builder.skipped == {"whole": SkipReason.LATENCY_BUDGET}
    assert builder.admit(whole, NOTHING, 300)


def test_less_than_a_page_of_time_is_a_lack_of_time():
    waiting = online("w", 300)
    builder = PlanBuilder(FakeView(online=[waiting], caps=make_caps(page_size=16)))
    assert not builder.admit(waiting, NOTHING, 9)
    assert builder.skipped == {"w": SkipReason.LATENCY_BUDGET}
    full = PlanBuilder(FakeView(online=[waiting], caps=make_caps(max_running_requests=1)))
    full.admit(online("first", 10), NOTHING, 10)
    assert not full.admit(waiting, NOTHING, 9)
    assert full.skipped == {"w": SkipReason.REQUEST_SLOTS}


def test_the_one_that_runs_in_any_case_is_not_said_to_sit_out():
    running = [decoding(offline(f"r{i}")) for i in range(2)]
    builder = PlanBuilder(FakeView(running=tuple(running), caps=PARTIAL))
    for request in running:
        builder.pause(request)
    plan = builder.build()
    assert plan.paused == plan.skipped.keys() == {"r1"}


def test_an_exchange_admits_one_that_waits():
    running, waiting = decoding(online("running")), offline("waiting", 50)
    caps = make_caps(partial_decode=True, max_chunk_tokens=50)
    view = FakeView(running=(running,), offline=[waiting], caps=caps)
    builder = PlanBuilder(view)
    assert not builder.fork().admit(waiting, NOTHING, 50) or builder.ledger.tokens < 50
    assert builder.exchange(running, waiting)
    plan = builder.build()
    validate(plan, view)
    assert (plan.paused, plan.prefill) == ({"running"}, {"waiting": 50})


def test_an_exchange_that_does_not_work_changes_nothing():
    running, waiting = decoding(online("running")), offline("waiting", 50)
    view = FakeView(running=(running,), offline=[waiting], caps=PARTIAL, total_kv=120)
    builder = PlanBuilder(view)
    before = state_of(builder)
    assert not builder.exchange(running, waiting), "there is no memory for it"
    unholdable = PlanBuilder(
        FakeView(running=(running,), offline=[waiting], caps=PARTIAL, unholdable={"running"})
    )
    assert not unholdable.exchange(running, waiting)
    for each in (builder, unholdable):
        assert not each.paused and not each.prefill
    assert state_of(builder) == before


def test_a_fork_is_apart():
    waiting = [online("a"), online("b")]
    builder = PlanBuilder(FakeView(online=waiting))
    fork = builder.fork()
    assert fork.admit(waiting[0], NOTHING, sys.maxsize)
    assert not builder.prefill and builder.ledger.totals.num_new == 0
    assert fork.ledger.totals.num_new == 100


def test_an_unfinished_prefill_that_does_not_go_on_is_stopped():
    unfinished = prefilled(offline("u", 500), 100)
    view = FakeView(unfinished=(unfinished,), online=[online("a")])
    builder = PlanBuilder(view)
    builder.admit(view.online[0], NOTHING, sys.maxsize)
    assert builder.build().preempt == (Preemption(rid="u"),)
    fixed = prefilled(offline("u", 500, traits=Traits(can_preempt=False)), 100)
    builder = PlanBuilder(FakeView(unfinished=(fixed,), online=[online("a")]))
    builder.admit(online("a"), NOTHING, sys.maxsize)
    plan = builder.build()
    assert not plan.prefill and not plan.preempt, "it stays, so nothing is prefilled"


def test_one_that_is_held_can_still_be_preempted():
    held = decoding(offline("held"))
    view = FakeView(running=(held, decoding(online("on"))), caps=PARTIAL)
    builder = PlanBuilder(view)
    builder.pause(held)
    builder.preempt(held, PreemptMode.RECOMPUTE)
    plan = builder.build()
    validate(plan, view)
    assert plan.paused == frozenset()
    assert plan.preempt == (Preemption(rid="held", mode=PreemptMode.RECOMPUTE),)


STEPS = st.sampled_from(
    ["admit", "admit whole", "continue", "pause", "resume", "preempt", "exchange"]
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(views(), st.lists(st.tuples(STEPS, st.integers(0, 9)), max_size=12))
def test_whatever_is_built_passes_the_check(view, steps):
    """Steps in any order: the plan and its replay on a fresh ledger agree."""
    builder = PlanBuilder(view)
    if builder.ledger.kv.available < 0:
        return  # a policy makes room for the decodes first
    for step, index in steps:
        running = [r for r in view.running if not builder.is_preempted(r)]
        waiting = [r for r in view.online if r.rid not in builder.prefill]
        runs = running[index % len(running)] if running else None
        waits = waiting[index % len(waiting)] if waiting else None
        if step == "admit" and waits and not view.unfinished:
            builder.admit(waits, view.match(waits), 1 + 40 * index)
        elif step == "admit whole" and waits:
            if all(u.rid in builder.prefill for u in view.unfinished):
                builder.admit(waits, view.match(waits), sys.maxsize)
        elif step == "continue":
            for request in view.unfinished:
                if not builder.is_preempted(request) and request.rid not in builder.prefill:
                    builder.continue_prefill(request, 16 * (1 + index))
        elif step == "pause" and runs:
            builder.pause(runs)
        elif step == "resume" and runs and runs.rid in builder.paused:
            builder.resume(runs)
        elif step == "preempt" and runs and runs.traits.can_preempt:
            builder.preempt(runs)
        elif step == "exchange" and runs and waits and not view.unfinished:
            builder.exchange(runs, waits)
    plan = builder.build()
    if plan.paused or plan.prefill or plan.preempt:
        validate(plan, view)


def test_a_request_takes_part_as_far_as_it_keeps_a_time():
    """5 ms and 0.1 ms per token: 10 ms are 50 tokens."""
    running, unfinished = decoding(online("running"), 5), prefilled(online("unfinished", 80), 60)
    view = FakeView(running=(running,), unfinished=(unfinished,), online=[online("waiting")])
    builder = PlanBuilder(view)
    assert builder.take(running, 0.010)
    assert builder.take(unfinished, 0.010)
    assert builder.take(view.online[0], 0.010)
    assert builder.prefill == {"unfinished": 20, "waiting": 29} and not builder.skipped
    assert builder.ledger.seconds() == pytest.approx(0.010)
    before = state_of(builder)
    late = decoding(offline("late"))
    assert not builder.take(late, 0.010) and not builder.take(online("next"), 0.010)
    assert set(builder.skipped.values()) == {SkipReason.LATENCY_BUDGET}
    assert state_of(builder) == before, "what does not fit leaves no trace"


@pytest.mark.parametrize(
    ("reason", "fields", "at_most"),
    [
        (SkipReason.LATENCY_BUDGET, {}, 0),
        (SkipReason.MEMORY_BUDGET, {"total_kv": 70}, 40),
        (SkipReason.TOKEN_BUDGET, {"caps": make_caps(max_chunk_tokens=8)}, 40),
        (SkipReason.REQUEST_SLOTS, {"caps": make_caps(max_running_requests=10)}, 40),
    ],
)
def test_a_prefill_that_must_stop_says_why(reason, fields, at_most):
    unfinished = prefilled(offline("unfinished", 100), 60)
    running = tuple(decoding(online(f"r{i}", 1), 1) for i in range(8))
    builder = PlanBuilder(FakeView(unfinished=(unfinished,), running=running, **fields))
    if reason is SkipReason.REQUEST_SLOTS:
        assert builder.admit(online("first", 5), NOTHING, 5)
    assert not builder.continue_prefill(unfinished, at_most)
    assert builder.skipped == {"unfinished": reason}


def test_the_gap_counts_a_token_on_its_way():
    view = FakeView(now_s=9.0, start_s=10.0)
    builder = PlanBuilder(view)
    out = decoding(online("out", last_token_s=8.5), 5)
    assert builder.gap_s(out) == 1.5
    on_its_way = FakeRequest(**{**out.__dict__, "num_computed_tokens": 105})
    assert builder.gap_s(on_its_way) == 0.0
    assert builder.gap_s(online("new")) is None
