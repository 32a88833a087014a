"""Non-negative least squares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.predict.fitted import nnls


class TestNnls:
    @given(st.integers(0, 10_000))
    def test_meets_the_conditions_of_a_minimum(self, seed):
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((20, 6)), rng.standard_normal(20)
        x = nnls(a.T @ a, a.T @ b)
        gradient = a.T @ (b - a @ x)
        assert np.all(x >= 0)
        assert np.all(gradient <= 1e-6)
        assert np.allclose(gradient[x > 0], 0, atol=1e-6)

    def test_columns_of_very_different_size(self):
        rng = np.random.default_rng(0)
        a = rng.random((50, 3)) * [1.0, 1e5, 1e9]
        truth = np.array([0.01, 2e-6, 3e-11])
        assert nnls(a.T @ a, a.T @ a @ truth) == pytest.approx(truth, rel=1e-6)

    def test_a_column_of_zeros_gets_nothing(self):
        a = np.array([[1.0, 0.0], [2.0, 0.0]])
        assert nnls(a.T @ a, a.T @ np.array([2.0, 4.0])).tolist() == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_a_coefficient_of_just_nothing_ends_the_search(scale):
    found = nnls(np.eye(3), np.array([scale, 0.0, -scale]))
    assert found.tolist() == pytest.approx([scale, 0.0, 0.0])
