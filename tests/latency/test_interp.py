"""Smoothing, interpolation weights, non-negative least squares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.latency.interp import isotonic, neighbours, non_decreasing
from cosched.latency.nnls import nnls_normal

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


class TestNnls:
    @given(st.integers(0, 10_000))
    def test_meets_the_conditions_of_a_minimum(self, seed):
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((20, 6)), rng.standard_normal(20)
        x = nnls_normal(a.T @ a, a.T @ b)
        gradient = a.T @ (b - a @ x)
        assert np.all(x >= 0)
        assert np.all(gradient <= 1e-6)
        assert np.allclose(gradient[x > 0], 0, atol=1e-6)

    def test_columns_of_very_different_size(self):
        rng = np.random.default_rng(0)
        a = rng.random((50, 3)) * [1.0, 1e5, 1e9]
        truth = np.array([0.01, 2e-6, 3e-11])
        assert nnls_normal(a.T @ a, a.T @ a @ truth) == pytest.approx(truth, rel=1e-6)

    def test_a_column_of_zeros_gets_nothing(self):
        a = np.array([[1.0, 0.0], [2.0, 0.0]])
        assert nnls_normal(a.T @ a, a.T @ np.array([2.0, 4.0])).tolist() == pytest.approx(
            [2.0, 0.0]
        )


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_a_coefficient_of_just_nothing_ends_the_search(scale):
    found = nnls_normal(np.eye(3), np.array([scale, 0.0, -scale]))
    assert found.tolist() == pytest.approx([scale, 0.0, 0.0])
