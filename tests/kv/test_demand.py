"""What is kept for online requests."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.kv.demand import OnlineDemand


def test_nothing_is_kept_before_anything_is_known():
    assert OnlineDemand().reserve == 0


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60), st.floats(0, 3))
def test_mean_and_deviations_of_the_window_and_never_less_than_now(samples, deviations):
    demand = OnlineDemand(window_s=20.0, deviations=deviations)
    for second, value in enumerate(samples):
        demand.sample(value, float(second))
    window = samples[-20:]
    expected = statistics.fmean(window) + deviations * statistics.pstdev(window)
    assert demand.reserve == pytest.approx(max(window[-1], expected), abs=1)


def test_a_burst_counts_at_once_and_is_forgotten_after_the_window():
    demand = OnlineDemand(window_s=60.0)
    for second in range(100):
        demand.sample(1000, float(second))
    assert demand.reserve == 1000
    demand.sample(50_000, 100.0)
    assert demand.reserve >= 50_000
    for second in range(101, 165):
        demand.sample(1000, float(second))
    assert demand.reserve == 1000
