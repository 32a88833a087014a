"""Whatever of cosched's own fails, the scheduler goes on: faults are put in at each place."""

import contextlib
import json
import logging
import math
import threading
from types import SimpleNamespace

import pytest

from cosched.core.plan import Plan
from cosched.engine.guard import MOST_FAILURES
from cosched.engine.read_state import state_of
from tests.crossed import crossed
from tests.engine.conftest import assert_drained, prompt

OFFLINE = -1


def fail(*args, **kwargs):
    raise ZeroDivisionError("on purpose")


def unguarded(engine):
    """As a server runs: errors are planned around."""
    controller = engine.scheduler.cosched
    controller.guard.is_strict = False
    return controller


def submit_some(engine, count=6):
    for i in range(count):
        priority = OFFLINE if i % 2 else 0
        engine.submit(f"r{i}", prompt(i, 40 + 30 * i), max_new_tokens=12, priority=priority)


def answers(engine, **options):
    engine.run_until_idle(max_iterations=4000, **options)
    assert_drained(engine)
    return {rid: reply.output_ids for rid, reply in engine.replies.items()}


@pytest.fixture
def said():
    """What cosched logs; SGLang takes the place of pytest's own handlers."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("cosched")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


EXPECTED = {}


@pytest.fixture
def expected(make_engine):
    """What is answered where nothing fails; found once."""
    if not EXPECTED:
        engine = make_engine()
        submit_some(engine)
        EXPECTED.update(answers(engine))
    return EXPECTED


class FailsSometimes:
    def __init__(self, inner, fails):
        self._inner = inner
        self._fails = fails
        self.num_calls = 0
        self.initial = inner.initial

    def plan(self, view, state):
        self.num_calls += 1
        return self._fails(self.num_calls) or self._inner.plan(view, state)


@crossed(policy=["sarathi", "hygen", "echo-bs+e+s"], overlap=[True, False])
def test_a_policy_that_fails_now_and_then_costs_nobody_a_token(
    make_engine, expected, policy, overlap, said
):
    engine = make_engine(policy=policy, overlap=overlap)
    controller = unguarded(engine)
    controller.planner.policy = FailsSometimes(
        controller.planner.policy, lambda n: fail() if n % 3 == 0 and n < 60 else None
    )
    submit_some(engine)
    assert answers(engine) == expected
    state = state_of(controller)
    assert state.failures["plan"] == state.num_safe_plans > 1
    assert not state.policy_given_up
    (line,) = [line for line in said if "Decision record" in line]
    assert "ZeroDivisionError" in line and '"running":[' in line


def test_a_policy_that_always_fails_is_not_asked_for_ever(make_engine, expected, said):
    engine = make_engine()
    controller = unguarded(engine)
    controller.planner.policy = FailsSometimes(controller.planner.policy, lambda n: fail())
    submit_some(engine)
    assert answers(engine) == expected
    assert controller.planner.policy.num_calls == MOST_FAILURES
    assert state_of(controller).policy_given_up
    assert "until the server is restarted" in said[-1]


def spin():
    """As a policy that catches what it should not."""
    while True:
        with contextlib.suppress(Exception):
            sum(range(1000))


@pytest.mark.parametrize("hang", [spin, threading.Event().wait], ids=["loop", "lock"])
def test_a_policy_that_never_returns_is_interrupted_and_not_asked_again(
    make_engine, expected, said, monkeypatch, hang
):
    monkeypatch.setattr("cosched.engine.guard.PLAN_LIMIT_S", 0.2)
    engine = make_engine()
    controller = unguarded(engine)
    controller.planner.policy = FailsSometimes(controller.planner.policy, lambda n: hang())
    submit_some(engine)
    assert answers(engine) == expected
    assert controller.planner.policy.num_calls == 1
    assert state_of(controller).policy_given_up
    (line,) = said
    assert "no plan within 0.2 s" in line and "until the server is restarted" in line


def test_slow_plans_are_used_and_named_and_too_many_in_a_row_are_the_last(
    make_engine, expected, said, monkeypatch
):
    now_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr("cosched.engine.guard.time", clock)
    engine = make_engine()
    controller = unguarded(engine)
    slow = {*range(1, MOST_FAILURES), *range(10, 10 + MOST_FAILURES)}

    def plan_slowly(number):
        now_s[0] += 1.5 if number in slow else 0.5

    controller.planner.policy = FailsSometimes(controller.planner.policy, plan_slowly)
    submit_some(engine)
    assert answers(engine) == expected
    assert controller.planner.policy.num_calls == 9 + MOST_FAILURES
    state = state_of(controller)
    assert state.policy_given_up and state.failures == {"slow_plan": 2 * MOST_FAILURES - 1}
    assert "took 1.5 s for a plan" in said[0]
    assert "the safe rule plans: it is not asked again" in said[-1]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(prefill={"nobody": 5}),
        Plan(prefill={"r0": 0}),
        Plan(paused=frozenset({"nobody"})),
    ],
    ids=["unknown request", "no tokens", "held, not running"],
)
def test_a_plan_that_the_engine_cannot_run_is_not_applied(make_engine, expected, plan):
    engine = make_engine()
    controller = unguarded(engine)
    controller.planner.policy = FailsSometimes(
        controller.planner.policy, lambda n: plan if n % 4 == 1 and n < 40 else None
    )
    submit_some(engine)
    assert answers(engine) == expected
    assert controller.guard.failures["plan"] > 1


def test_where_even_the_safe_rule_fails_what_runs_goes_on(make_engine, monkeypatch):
    engine = make_engine()
    controller = unguarded(engine)
    submit_some(engine)
    failing = []

    def act(iteration):
        if iteration == 6:
            failing.append(controller.planner.policy)
            controller.planner.policy = FailsSometimes(controller.planner.policy, lambda n: fail())
            monkeypatch.setattr(controller.guard._safe, "plan", fail)
        if iteration == 9:
            controller.planner.policy = failing[0]

    answers(engine, on_iteration=act)
    assert controller.guard.failures["safe_plan"] == 3


WATCHERS = {
    "timekeeper": lambda c, m: m.setattr(c.planner.timekeeper, "moment", fail),
    "first tokens": lambda c, m: m.setattr(c.planner.timekeeper, "on_result", fail),
    "predictor": lambda c, m: m.setattr(c.predictor, "observe", fail),
    "prediction": lambda c, m: m.setattr(c.predictor, "predict_s", fail),
    "launch": lambda c, m: m.setattr("cosched.engine.port.shape_of", fail),
    "listener": lambda c, m: c.observer.add_listener(fail),
    "pool": lambda c, m: m.setattr(c.waiting.offline, "advance", fail),
    "pool order": lambda c, m: m.setattr(type(c.waiting.offline), "order", fail),
    "pool arrival": lambda c, m: m.setattr(c.waiting.offline, "add", fail),
    "pool admission": lambda c, m: m.setattr(c.waiting.offline, "remove", fail),
    "pool promotion": lambda c, m: m.setattr(c.waiting.offline, "promote", fail),
}


@crossed(place=WATCHERS.keys(), overlap=[True, False])
def test_what_only_watches_or_orders_may_fail(make_engine, expected, monkeypatch, place, overlap):
    engine = make_engine(policy="hygen", overlap=overlap)
    controller = unguarded(engine)
    submit_some(engine, count=3)

    def act(iteration):
        if iteration == 3:
            WATCHERS[place](controller, patched)
            for i in range(3, 6):
                priority = OFFLINE if i % 2 else 0
                tokens = prompt(i, 40 + 30 * i)
                engine.submit(f"r{i}", tokens, max_new_tokens=12, priority=priority)

    with monkeypatch.context() as patched:
        assert answers(engine, on_iteration=act) == expected
    assert state_of(controller).failures, f"{place} did not fail"


def test_a_server_whose_state_cannot_be_read_says_so(make_engine, monkeypatch):
    from sglang.srt.managers.io_struct import GetInternalStateReq

    engine = make_engine()
    unguarded(engine)
    monkeypatch.setattr("cosched.engine.read_state.state_of", fail)
    state = engine.scheduler.get_internal_state(GetInternalStateReq()).internal_state
    assert state["cosched"] == {"error": "ZeroDivisionError('on purpose')"}


def test_figures_of_the_state_that_are_not_finite_are_null(make_engine, said):
    from sglang.srt.managers.io_struct import GetInternalStateReq

    engine = make_engine()
    controller = unguarded(engine)
    controller.counters.budget_s = math.nan
    controller.observer.busy_s = math.inf
    for _ in range(2):
        state = engine.scheduler.get_internal_state(GetInternalStateReq()).internal_state["cosched"]
        assert state["budget_s"] is None and state["busy_s"] is None
        json.dumps(state, allow_nan=False)  # or the server answers 400
    assert controller.guard.failures["state"] == 2
    [line] = said
    assert "not finite: .busy_s, .budget_s" in line


@pytest.mark.parametrize("seam", ["_abort_on_queued_limit", "_poll_timeout_aborts"])
def test_seams_about_limits_fall_back_to_none(make_engine, monkeypatch, seam, expected):
    engine = make_engine(max_queued_requests=3)
    controller = unguarded(engine)
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "100")
    monkeypatch.setattr("cosched.engine.waiting.WaitingQueue.__iter__", fail, raising=False)
    monkeypatch.setattr(type(controller.waiting), "online", property(fail), raising=False)
    scheduler = engine.scheduler
    if seam == "_poll_timeout_aborts":
        assert list(scheduler._poll_timeout_aborts()) == []
    else:

        class Received:
            priority = 0

        assert scheduler._abort_on_queued_limit(Received()) is False
    assert controller.guard.failures
