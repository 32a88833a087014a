"""Arrival processes follow their rates, and bursts are as high as they say."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosched_traces.arrival_times import (
    RateCurve,
    arrival_times,
    constant_rate,
    correlated_rate,
    diurnal_rate,
    with_bursts,
)
from cosched_traces.errors import WorkloadError


@settings(max_examples=30, deadline=None)
@given(
    rates=st.lists(st.floats(0, 20), min_size=1, max_size=10).filter(lambda r: max(r) > 0.1),
    step_s=st.floats(0.5, 50),
    cv=st.sampled_from([0, 0.5, 1, 3]),
    seed=st.integers(0, 2**32),
)
def test_times_are_sorted_within_the_duration_and_repeatable(rates, step_s, cv, seed):
    curve = RateCurve(step_s=step_s, rates=tuple(rates))
    times = arrival_times(curve, seed=seed, cv=cv)
    assert times == arrival_times(curve, seed=seed, cv=cv)
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert all(0 <= time < curve.duration_s for time in times)


@pytest.mark.parametrize("cv", [0, 0.5, 1, 2])
def test_gaps_have_the_rate_and_the_variation(cv):
    gaps = np.diff(arrival_times(constant_rate(5, duration_s=4000), seed=1, cv=cv))
    assert 1 / gaps.mean() == pytest.approx(5, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05 * max(cv, 1))


def test_the_number_of_requests_follows_the_curve():
    curve = RateCurve(step_s=100, rates=(1, 0, 10))
    counts = np.histogram(arrival_times(curve, seed=3), bins=[0, 100, 200, 300])[0]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(100, abs=40)
    assert counts[2] == pytest.approx(1000, abs=120)


def test_a_day_has_its_peak_at_midday_and_its_ratio():
    curve = diurnal_rate(3, duration_s=86_400, peak_to_trough=4)
    hours = np.array(curve.rates).reshape(24, -1).mean(axis=1)
    assert curve.mean == pytest.approx(3)
    assert hours.argmax() in (12, 13)
    assert hours.argmin() in (0, 1)
    assert max(curve.rates) / min(curve.rates) == pytest.approx(4, rel=0.01)
    fast = diurnal_rate(3, duration_s=3600, day_s=3600)
    assert np.argmax(fast.rates) / len(fast.rates) == pytest.approx(13 / 24, abs=0.01)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_burst_is_as_high_as_asked_within_minutes(factor):
    calm = constant_rate(4, duration_s=3600)
    curve = with_bursts(calm, seed=5, factor=factor)
    assert curve.mean == pytest.approx(4)
    assert max(curve.rates) / min(curve.rates) == pytest.approx(factor)
    above = np.array(curve.rates) > np.mean([max(curve.rates), min(curve.rates)])
    rises = np.flatnonzero(above[1:] & ~above[:-1])
    assert len(rises) + above[0] == 3  # one in each 20 minutes
    # From the calm rate to the height of the burst in one ramp of a minute.
    start = rises[0]
    around = curve.rates[max(start - 6, 0) : start + 8]
    assert max(around) / min(around) == pytest.approx(factor)


def test_the_rate_wanders_as_measured():
    curve = correlated_rate(5.53, duration_s=600_000, seed=0)
    rates = np.array(curve.rates)
    assert curve.mean == pytest.approx(5.53)
    assert rates.std() / rates.mean() == pytest.approx(0.22, abs=0.01)
    assert np.corrcoef(rates[:-1], rates[1:])[0, 1] == pytest.approx(0.83, abs=0.02)
    assert curve != correlated_rate(5.53, duration_s=600_000, seed=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RateCurve(step_s=1, rates=()), "rate curve"),
        (lambda: RateCurve(step_s=1, rates=(-1.0, 2.0)), "rate curve"),
        (lambda: with_bursts(constant_rate(1, duration_s=100), seed=0, every_s=100), "do not fit"),
        (lambda: arrival_times(constant_rate(1, duration_s=1), seed=0, cv=-1), "cv -1 is negative"),
        (lambda: diurnal_rate(1, duration_s=0), "covers nothing"),
        (lambda: diurnal_rate(1, duration_s=10, peak_to_trough=0.5), "below 1"),
    ],
)
def test_what_makes_no_curve_is_refused(make, message):
    with pytest.raises(WorkloadError, match=message):
        make()
