"""Smoothing and interpolation weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.lab.cost_models.interp import isotonic, neighbours, non_decreasing

numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


@given(numbers)
def test_isotonic_never_falls_and_keeps_the_sum(values):
    fitted = isotonic(values)
    assert np.all(np.diff(fitted) >= 0)
    assert fitted.sum() == pytest.approx(sum(values), abs=1e-6)


@given(numbers)
def test_isotonic_leaves_what_is_in_order(values):
    assert isotonic(sorted(values)).tolist() == sorted(values)


def test_a_disturbed_reading_is_cut_not_spread():
    smooth = non_decreasing(np.array([1.0, 1.0, 20.0, 1.1, 1.2, 1.3]))
    assert smooth.max() < 1.35


class TestNeighbours:
    def test_on_the_grid(self):
        assert neighbours([2, 4, 8], 4) == [(4, 1.0)]

    def test_between(self):
        assert neighbours([2, 4, 8], 5) == [(4, 0.75), (8, 0.25)]

    def test_above_work_grows_in_proportion(self):
        assert neighbours([2, 4, 8], 24) == [(8, 3.0)]

    def test_below_time_stays(self):
        assert neighbours([2, 4, 8], 1) == [(2, 1.0)]
