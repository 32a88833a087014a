"""Memory given out by expected lengths, against following everybody to the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.estimates import LengthEstimate
from cosched.memory import kv_forecast
from cosched.memory.kv_forecast import KvForecast
from cosched.schedule.base import UNLIMITED
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import two_phases
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled

CAPS = make_caps(promises=True, max_chunk_tokens=None)


def view_of(running, waiting, total_kv):
    """Of each its prompt and the tokens still to come."""
    here = [decoding(offline(f"r{i}", p, max_new_tokens=900)) for i, (p, _) in enumerate(running)]
    there = [offline(f"w{i}", p, max_new_tokens=900) for i, (p, _) in enumerate(waiting)]
    lengths = {f"r{i}": n for i, (_, n) in enumerate(running)}
    lengths |= {f"w{i}": n for i, (_, n) in enumerate(waiting)}
    return FakeView(
        caps=CAPS,
        running=tuple(here),
        offline=there,
        total_kv=total_kv,
        lengths={rid: LengthEstimate(n, n) for rid, n in lengths.items()},
        promises={request.rid: 1 for request in here},
    )


def most_held(view, admitted):
    """Tokens held at the worst of all iterations, each taking one more until it ends."""
    held = {r.rid: r.num_computed_tokens for r in view.running}
    held |= {r.rid: r.num_prompt_tokens for r in admitted}
    left = {rid: view.lengths[rid].upper for rid in held}
    worst = sum(held.values())
    while held:
        held = {rid: n + 1 for rid, n in held.items()}
        left = {rid: n - 1 for rid, n in left.items()}
        worst = max(worst, sum(held.values()))
        held = {rid: n for rid, n in held.items() if left[rid] > 0}
    return worst


pairs = st.tuples(st.integers(1, 60), st.integers(1, 60))


@given(st.lists(pairs, max_size=6), st.lists(pairs, min_size=1, max_size=8), st.integers(0, 500))
def test_what_is_admitted_fits_until_everybody_has_ended(running, waiting, more):
    view = view_of(running, waiting, sum(p + n for p, n in running) + 20 + more)
    builder = PlanBuilder(view, forecast=KvForecast(view))
    admitted = [r for r in view.offline if builder.admit(r, view.match(r), r.num_prompt_tokens)]
    plan = builder.build()
    validate(plan, view)
    assert plan.promise == {r.rid: 0 for r in admitted}
    # On an idle engine the first one is admitted in any case.
    alone = most_held(view, admitted[:1]) if not running else 0
    assert most_held(view, admitted) <= max(view.total_kv, alone)
    # A page of each that was admitted stays free, as SGLang counts.
    for request in view.offline:
        if request not in admitted:
            assert most_held(view, [*admitted, request]) + len(admitted) + 1 > view.total_kv - 20


@given(st.integers(1, 590), st.lists(st.integers(1, 10**6), min_size=1, max_size=8).map(sorted))
def test_what_fits_an_idle_engine_is_admitted_to_it_whatever_the_forecast(num_prompt_tokens, ends):
    for waiting in (offline("w", num_prompt_tokens), online("w", num_prompt_tokens)):
        view = FakeView(
            caps=CAPS,
            **{waiting.request_class.value: [waiting]},
            total_kv=600,
            lengths={"w": LengthEstimate(ends[0], ends[-1], tuple(ends))},
        )
        builder = PlanBuilder(view, forecast=KvForecast(view))
        assert builder.admit(waiting, view.match(waiting), num_prompt_tokens)


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_request_is_admitted_beside_endless_ones_if_they_all_fit_until_it_ends(now, own):
    """4 replies that are expected to need far more memory than there is, later."""
    until_it_ends = 4 * (now + own) + 10 + 1 + own  # it may begin a page
    for total_kv in (until_it_ends, until_it_ends - 1):
        view = view_of([(now, 100_000)] * 4, [(10, own)], total_kv)
        waiting = view.offline[0]
        fits = KvForecast(view).fits(waiting, view.match(waiting))
        assert fits is (total_kv == until_it_ends)


@pytest.mark.parametrize("num_computed", [None, 1, 60])
def test_a_request_that_is_stopped_leaves_its_room_to_another(num_computed):
    """num_computed: it is in the middle of its prefill."""
    view = view_of([(100, 300)], [(100, 300)], 600)
    waiting, victim = view.offline[0], view.running[0]
    if num_computed is not None:
        victim = prefilled(replace(victim, num_output_tokens=0), num_computed)
        view = replace(view, running=(), unfinished=(victim,))
    builder = PlanBuilder(view, forecast=KvForecast(view))
    assert not builder.admit(waiting, view.match(waiting), 100)
    trial = builder.fork()
    trial.preempt(victim)
    assert trial.admit(waiting, view.match(waiting), 100)
    assert not builder.admit(waiting, view.match(waiting), 100), "the copy has changed nothing"


def fits_beside_many(waiting, total_kv):
    """Beside 30 that hold 110 tokens and have 10 of at most 800 tokens of output. Each may end with
    any 50th token."""
    running = [decoding(offline(f"r{i}", 100, max_new_tokens=800), 10) for i in range(30)]
    ends = tuple(range(50, 801, 50))
    lengths = {request.rid: LengthEstimate(395, 592, ends) for request in running}
    view = FakeView(
        caps=CAPS,
        running=tuple(running),
        **{waiting.request_class.value: [waiting]},
        total_kv=total_kv,
        lengths=lengths | {waiting.rid: LengthEstimate(400, 600, ends)},
        promises={request.rid: 1 for request in running},
    )
    builder = PlanBuilder(view, forecast=KvForecast(view))
    return builder.admit(waiting, view.match(waiting), 100)


def test_many_outputs_of_unknown_length_need_less_than_all_of_them_at_their_upper_end():
    waiting = offline("w", 100, max_new_tokens=800)
    at_their_upper_ends = 31 * (100 + 600)
    assert fits_beside_many(waiting, at_their_upper_ends * 2 // 3)
    assert not fits_beside_many(waiting, at_their_upper_ends // 3)


def test_an_online_request_that_would_be_late_is_admitted_where_offline_work_leaves_room():
    rooms = range(6000, 14000, 100)
    least = [
        next(room for room in rooms if fits_beside_many(make("w", 100, max_new_tokens=800), room))
        for make in (online, offline)
    ]
    assert least[0] < least[1]


def test_a_preemption_reads_the_running_requests_once(monkeypatch):
    """For the trial and for the plan."""
    num_made = 0

    class Counted(kv_forecast.LoadAhead):
        def __init__(self, *args, **fields):
            nonlocal num_made
            num_made += 1
            super().__init__(*args, **fields)

    monkeypatch.setattr(kv_forecast, "LoadAhead", Counted)
    view = FakeView(
        caps=make_caps(promises=True, max_running_requests=4),
        running=tuple(decoding(offline(f"r{i}", 50)) for i in range(4)),
        online=[online("w", 50)],
    )
    builder = PlanBuilder(view, forecast=KvForecast(view))
    two_phases(builder, UNLIMITED)
    plan = builder.build()
    assert (len(plan.preempt), [*plan.prefill]) == (1, ["w"])
    assert num_made == 1
