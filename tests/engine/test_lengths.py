"""Lengths of responses: what an engine learns, and what its plans are told."""

from __future__ import annotations

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from tests.engine.conftest import assert_drained, prompt, view_now

OFFLINE = -1


def estimates_of(engine, rid, *, at=(0, 5)):
    """What the view says of a request, by its output so far: while it runs alone. Median, upper."""
    found = {}

    def look(iteration):
        scheduler = engine.scheduler
        view = view_now(scheduler)
        for request in (*view.running, *view.unfinished, *view.online):
            if request.rid == rid and request.num_output_tokens in at:
                found[request.num_output_tokens] = view.length(request)[:2]

    engine.run_until_idle(on_iteration=look)
    return found


def test_what_ends_teaches_what_comes(make_engine):
    engine = make_engine(config={"length": {"mode": "histogram"}})
    for i in range(12):
        engine.submit(f"r{i}", prompt(i, 30), max_new_tokens=9)
    engine.run_until_idle()
    # Of another limit: nothing but what is known of all.
    engine.submit("new", prompt(50, 30), max_new_tokens=100)
    assert estimates_of(engine, "new")[5] == (4, 4)
    assert_drained(engine)


def test_what_is_aborted_teaches_nothing(make_engine):
    engine = make_engine()
    engine.submit("gone", prompt(1, 30), max_new_tokens=100)

    def abort(iteration):
        if iteration == 6:
            engine.abort("gone")

    engine.run_until_idle(on_iteration=abort)
    assert len(engine.scheduler.cosched.table.lengths.model.histogram) == 0
    assert_drained(engine)


def test_a_hint_reaches_the_plan(make_engine):
    engine = make_engine(config={"length": {"mode": "oracle"}})
    hint = {"cosched": {"output_tokens_hint": 40}}
    engine.submit("told", prompt(1, 30), max_new_tokens=100, custom_params=hint)
    assert estimates_of(engine, "told")[5] == (35, 35)


@pytest.mark.parametrize("wrong", [{"output_tokens_hint": "many"}, {"output_tokens_hint": -1}, 7])
def test_a_wrong_hint_from_within_is_none(make_engine, wrong):
    engine = make_engine()
    engine.submit("r", prompt(1, 30), max_new_tokens=12, custom_params={"cosched": wrong})
    assert estimates_of(engine, "r") == {5: (7, 7)}


def test_a_failure_leaves_the_limit(make_engine, monkeypatch):
    engine = make_engine()
    controller = engine.scheduler.cosched
    controller.guard.is_strict = False

    def fail(*args):
        raise ArithmeticError("made to fail")

    monkeypatch.setattr(controller.table.lengths.model, "belief", fail)
    engine.submit("r", prompt(1, 30), max_new_tokens=12)
    assert estimates_of(engine, "r") == {5: (7, 7)}
    assert controller.guard.failures["length"] > 0
    assert_drained(engine)


def test_grammars_and_classes_are_kinds_of_their_own(make_engine):
    engine = make_engine()
    for i in range(8):
        engine.submit(f"chat{i}", prompt(i, 30), max_new_tokens=9)
        engine.submit(f"job{i}", prompt(i + 20, 30), max_new_tokens=8, priority=OFFLINE)
    engine.run_until_idle()
    engine.submit("job", prompt(60, 30), max_new_tokens=14, priority=OFFLINE)
    assert estimates_of(engine, "job")[5][0] == 3
