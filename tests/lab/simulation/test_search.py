"""Searching for a boundary."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.lab.simulation.search import largest_good, last_good, values_between

AT_ONCE = st.integers(1, 4)


@given(
    low=st.floats(0.01, 100),
    ratio=st.floats(1, 1000),
    tolerance=st.sampled_from([0.01, 0.1, 0.5]),
    is_integer=st.booleans(),
)
def test_a_range_becomes_values_no_further_apart_than_the_tolerance(
    low, ratio, tolerance, is_integer
):
    low, high = (
        (float(round(low) + 1), float(round(low * ratio) + 1))
        if is_integer
        else (
            low,
            low * ratio,
        )
    )
    values = values_between(low, max(low, high), tolerance=tolerance, is_integer=is_integer)
    assert values[0] == low and values[-1] == max(low, high)
    assert values == sorted(set(values))
    for one, other in pairwise(values):
        assert other - one <= max(tolerance * one * 1.001, 1.0 if is_integer else 0.0)
        assert not is_integer or other == int(other)


@given(count=st.integers(1, 200), data=st.data(), at_once=AT_ONCE)
def test_the_boundary_is_found_and_no_value_in_the_middle_is_tried_twice(count, data, at_once):
    num_good = data.draw(st.integers(0, count))
    tried = []

    def probe(values):
        assert 1 <= len(values) <= max(at_once, 2)
        tried.extend(values)
        return [value < num_good for value in values]

    found = last_good(range(count), probe, num_at_once=at_once)
    assert found == (num_good - 1 if num_good else None)
    assert len(tried) == len(set(tried)) <= 2 + at_once * 8


@given(bounds=st.tuples(st.integers(0, 99), st.integers(0, 99)), at_once=AT_ONCE)
def test_values_that_are_too_small_do_not_hide_the_good_ones(bounds, at_once):
    low, high = sorted(bounds)
    tried = []

    def probe(values):
        tried.extend(values)
        return [low <= value <= high for value in values]

    found = largest_good(range(100), probe, num_at_once=at_once)
    assert len(tried) == len(set(tried)) < 30
    if found is None:
        assert high - low < 13, "it fell between two that were scanned"
    else:
        assert found == high


@pytest.mark.parametrize(("answer", "found"), [(True, 9), (False, None)])
def test_all_good_and_none_good(answer, found):
    assert largest_good(range(10), lambda values: [answer] * len(values)) == found
    assert last_good(range(10), lambda values: [answer] * len(values)) == found
