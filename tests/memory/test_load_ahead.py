"""What many requests hold together, against going through all ways in which they may end."""

from __future__ import annotations

from itertools import product
from math import sqrt
from statistics import fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.memory import load_ahead
from cosched.memory.load_ahead import LoadAhead, MostHeld

ends_of_one = st.lists(st.integers(1, 25), min_size=1, max_size=3).map(sorted)
one = st.tuples(st.integers(0, 40), ends_of_one)
few = st.lists(one, max_size=4)


def load_of(requests, *, page=1):
    return LoadAhead(*table_of(requests), page=page)


def most_of(requests, *, page=1):
    return MostHeld.of(*table_of(requests), page=page)


def table_of(requests):
    """Of each what it holds and its ends; those that are passed come first."""
    most = max((len(ends) for _, ends in requests), default=0)
    table = [[-i for i in range(most - len(ends))] + ends for _, ends in requests]
    return [held for held, _ in requests], [*map(list, zip(*table, strict=True))]


def by_all_ways(requests, deviations, until=25):
    """The most that is wanted at any step."""
    ways = [*product(*(ends for _, ends in requests))]
    worst = 0.0
    for step in range(1, until + 1) if requests else ():
        held = [
            sum(held + step for (held, _), end in zip(requests, way, strict=True) if end >= step)
            for way in ways
        ]
        most = sum(held + step for held, ends in requests if ends[-1] >= step)
        worst = max(worst, min(fmean(held) + deviations * sqrt(pvariance(held)), most))
    return worst


@given(few, st.sampled_from([0.0, 1.0, 2.5]))
def test_it_is_the_mean_of_all_ways_and_so_many_deviations(requests, deviations):
    found = load_of(requests)
    assert found.peak(deviations) == pytest.approx(by_all_ways(requests, deviations), abs=1e-6)


@given(few, one, st.sampled_from([0.0, 2.0]))
def test_until_one_of_them_ends_it_is_the_peak_of_the_steps_until_then(requests, own, deviations):
    last = own[1][-1]
    found = load_of([*requests, own]).peak(deviations, until=last)
    assert found == pytest.approx(by_all_ways([*requests, own], deviations, last), abs=1e-6)


def test_one_request_is_never_expected_to_hold_more_than_until_its_last_end():
    assert load_of([(25_500, [20, 400])]).peak(2.0) == 25_900


@given(few, one, st.sampled_from([0.0, 2.0]))
def test_one_more_is_reckoned_as_if_it_were_there_and_taken_out_again(requests, more, deviations):
    without = load_of(requests)
    both = without.with_one(*more)
    assert both.peak(deviations) == pytest.approx(by_all_ways([*requests, more], deviations))
    again = both.without(*more)
    assert again.peak(deviations) == pytest.approx(without.peak(deviations), abs=1e-5)


def test_one_that_has_passed_all_its_ends_ends_with_the_next_iteration():
    assert LoadAhead([10, 10], [[-5, 3], [0, 3]], page=1).peak(2.0) == 22
    assert LoadAhead([10], [[-5], [0]], page=1).peak(0.0) == 11


def test_the_last_page_of_each_is_filled_to_an_unknown_part():
    requests = [(300, [50])] * 48
    assert load_of(requests, page=1).peak(2.0) == 48 * 350
    most = load_of(requests, page=32).peak(2.0) - 48 * 350
    assert most == pytest.approx(2 * sqrt(48 * (32 * 32 - 1) / 12))


@given(
    st.lists(st.tuples(st.integers(0, 2000), ends_of_one), min_size=30, max_size=60),
    st.sampled_from([0.0, 2.0]),
)
def test_where_there_are_too_many_times_to_look_at_it_is_no_less(requests, deviations):
    exact = load_of(requests).peak(deviations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_ahead, "_MOST_TIMES", 16)
        roughly = load_of(requests)
    assert roughly.peak(0.0) >= load_of(requests).peak(0.0) - 1e-6
    assert roughly.peak(deviations) == pytest.approx(exact, rel=0.1)


@given(few, one, st.sampled_from([0.0, 1.0, 2.5]), st.sampled_from([1, 16]))
def test_without_looking_at_the_ends_it_is_never_less(requests, more, deviations, page):
    load, most = load_of(requests, page=page), most_of(requests, page=page)
    assert most.held == sum(held for held, _ in requests)
    assert most.most >= load.peak(deviations) - 1e-6
    both = most.with_one(*more)
    assert both == most_of([*requests, more], page=page)
    assert both.most >= load.with_one(*more).peak(deviations) - 1e-6
