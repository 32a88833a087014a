"""Echo's estimate of the arrival rate, and the memory that is kept by it."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.papers.echo.arrival_rate import BIN_S, ArrivalRate, ArrivalReservation


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 6))
def test_the_rate_is_mean_and_deviations_of_the_bins_of_the_window(counts, num_bins):
    rate = ArrivalRate(window_s=num_bins * BIN_S)
    for place, count in enumerate(counts):
        for _ in range(count):
            rate.arrived(place * BIN_S + 1.0)
        rate.advance(place * BIN_S + 2.0)
    rate.advance(len(counts) * BIN_S)
    window = counts[-num_bins:] or [0]
    mean, spread = statistics.fmean(window), statistics.pstdev(window)
    assert rate.mean == pytest.approx(mean / BIN_S)
    assert rate.predicted == pytest.approx((mean + 2 * spread) / BIN_S)


def test_a_bin_that_is_not_over_does_not_count():
    rate = ArrivalRate()
    for _ in range(50):
        rate.arrived(BIN_S / 2)
    assert rate.mean == 0.0
    rate.advance(BIN_S)
    assert rate.mean == 50 / BIN_S


def reservation_of(counts, *, held):
    kept = ArrivalReservation(window_s=1e6)
    for place, count in enumerate(counts):
        for _ in range(count):
            kept.arrived(place * BIN_S)
        kept.sample(held, place * BIN_S)
    kept.sample(held, len(counts) * BIN_S)
    return kept


def test_bursts_of_arrivals_are_kept_for_and_steady_ones_are_not():
    assert reservation_of([5, 5, 5, 5], held=1000).tokens(10_000) == 1000
    assert reservation_of([0, 10, 0, 10], held=1000).tokens(10_000) == 3000
    assert reservation_of([0, 10, 0, 10], held=1000).tokens(2000) == 2000
    assert reservation_of([], held=700).tokens(10_000) == 700
