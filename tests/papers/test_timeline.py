"""The peak of the memory to come, against running it step by step."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cosched.papers.ecoserve.timeline import Need, Timeline

needs = st.lists(
    st.builds(Need, held=st.integers(0, 40), remaining=st.integers(0, 25)), max_size=12
)
one = st.builds(Need, held=st.integers(0, 40), remaining=st.integers(0, 25))


def timeline_of(running):
    return Timeline([need.held for need in running], [need.remaining for need in running])


def peak_of(running):
    return timeline_of(running).peak


def by_steps(running):
    """Tokens held just before each iteration's ends, the worst of them."""
    worst = 0
    for step in range(26):
        worst = max(worst, sum(n.held + step for n in running if n.remaining >= step))
    return worst


@given(needs)
@example([])
@example([Need(5, 0)])
def test_the_peak_is_that_of_all_iterations(running):
    assert peak_of(running) == by_steps(running)


@given(needs, one)
def test_one_more_is_reckoned_as_if_it_were_there(running, more):
    timeline, wanted = timeline_of(running), by_steps([*running, more])
    assert timeline.peak_with(more) == timeline.with_one(more).peak == wanted
    assert timeline.with_one(more).peak_with(more) == by_steps([*running, more, more])


@given(needs, needs)
def test_many_more_are_as_one_after_the_other(running, more):
    both = timeline_of(running).with_all([n.held for n in more], [n.remaining for n in more])
    assert both.peak == by_steps([*running, *more])


@given(needs, one)
def test_asking_changes_nothing_and_more_is_never_less(running, more):
    timeline = timeline_of(running)
    before = timeline.peak
    assert timeline.peak_with(more) >= before
    assert timeline.peak == before


@given(needs, st.permutations(range(12)))
def test_order_does_not_matter(running, order):
    shuffled = [running[i] for i in order if i < len(running)]
    assert peak_of(shuffled) == peak_of(running)


@given(needs)
def test_it_lies_between_what_is_held_and_what_is_reserved_in_full(running):
    held = sum(need.held for need in running)
    assert held <= peak_of(running) <= held + sum(need.remaining for need in running)


def test_those_that_end_soon_leave_room_for_those_that_stay():
    assert peak_of([Need(10, 10), Need(10, 10)]) == 40
    assert peak_of([Need(10, 2), Need(10, 10)]) == 24
