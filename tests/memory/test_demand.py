"""What is kept for online requests."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.memory.demand import DemandReservation, NoReservation
from cosched.papers.echo.kv_order import EchoReservation


@pytest.mark.parametrize("kind", [DemandReservation, EchoReservation])
@given(st.lists(st.integers(0, 10**6), max_size=60), st.floats(0, 3))
def test_mean_and_deviations_of_the_window_are_kept(kind, samples, deviations):
    """By cosched never less than the demand of now; by Echo never more than the memory."""
    reservation = kind(window_s=20.0, deviations=deviations)
    for second, value in enumerate(samples):
        reservation.sample(value, float(second))
    kept = reservation.tokens(10**9)
    if not samples:
        assert kept == 0
        return
    window = samples[-20:]
    expected = statistics.fmean(window) + deviations * statistics.pstdev(window)
    if kind is EchoReservation:
        assert kept == pytest.approx(expected, abs=1)
        assert reservation.tokens(5) == min(kept, 5)
    else:
        assert kept == pytest.approx(max(window[-1], expected), abs=1)


def test_nothing_is_kept_where_the_reservation_is_off():
    reservation = NoReservation()
    reservation.sample(500, 0.0)
    assert reservation.tokens(1000) == 0
