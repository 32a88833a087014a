"""What is kept for online requests."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.memory.demand import DemandReservation, NoReservation


@given(st.lists(st.integers(0, 10**6), max_size=60), st.floats(0, 3))
def test_mean_and_deviations_of_the_window_and_never_less_than_now(samples, deviations):
    reservation = DemandReservation(window_s=20.0, deviations=deviations)
    for second, value in enumerate(samples):
        reservation.sample(value, float(second))
    kept = reservation.tokens(10**9)
    if not samples:
        assert kept == 0
        return
    window = samples[-20:]
    expected = statistics.fmean(window) + deviations * statistics.pstdev(window)
    assert kept == pytest.approx(max(window[-1], expected), abs=1)


def test_nothing_is_kept_where_the_reservation_is_off():
    reservation = NoReservation()
    reservation.sample(500, 0.0)
    assert reservation.tokens(1000) == 0
