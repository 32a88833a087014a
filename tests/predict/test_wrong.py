"""Predictions made wrong on purpose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, BatchTotals
from cosched.predict.calibration import Calibrator, error_factor
from tests.predict.test_calibration import TRUTH, learned


@pytest.mark.parametrize("error", [0.05, 0.2, 0.5, 1.0])
def test_factors_scatter_as_asked_around_one(error):
    factors = np.array([error_factor(error, number) for number in range(20_000)])
    assert factors.mean() == pytest.approx(1, abs=0.05 * error)
    assert factors.std() == pytest.approx(error, rel=0.1)
    assert factors.min() > 0
    assert abs(np.corrcoef(factors[1:], factors[:-1])[0, 1]) < 0.05


def test_no_error_changes_nothing():
    assert {error_factor(0.0, number) for number in range(100)} == {1.0}


@given(
    error=st.floats(0.05, 1.0),
    number=st.integers(0, 1000),
    limit_s=st.floats(1e-3, 0.5),
    num_cached=st.integers(0, 5000),
)
def test_the_inverse_stays_exact(error, number, limit_s, num_cached):
    calibrator = Calibrator()
    calibrator.error = error_factor(error, number)
    totals = BatchTotals()
    totals.add_decodes([100, 2000])
    most = calibrator.max_prefill(totals, num_cached, limit_s, 4096)

    def seconds(num_new):
        trial = totals.copy()
        trial.add_prefill(num_new, num_cached)
        return calibrator.predict_s(trial)

    assert most == 0 or seconds(most) <= limit_s
    assert most == 4096 or seconds(most + 1) > limit_s


def test_the_error_is_neither_learned_nor_learned_from():
    right, wrong = learned(num=200), Calibrator()
    wrong.error = 1.5
    learned(num=200, calibrator=wrong)
    batch = BatchShape(decodes=[300] * 20)
    totals = BatchTotals.of(batch)
    assert wrong.estimate_s(totals) == right.estimate_s(totals)
    assert wrong.predict_s(totals) == pytest.approx(1.5 * right.predict_s(totals))
    assert right.estimate_s(totals) == pytest.approx(TRUTH.iteration_s(batch), rel=0.1)
