"""What is kept for online requests."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.memory.demand import OnlineDemand


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


@pytest.mark.parametrize(("deviations", "least"), [(1.0, 0.8), (2.0, 0.93), (3.0, 0.97)])
def test_the_next_second_of_chat_with_a_burst_stays_below_what_is_kept(deviations, least):
    """Requests of 1,365 tokens that stay for 6 s each; four times as many for a minute."""
    rng = np.random.default_rng(0)
    arrived = rng.poisson([1.5] * 300 + [6.0] * 60 + [1.5] * 240)
    needed = 1365 * np.convolve(arrived, np.ones(6, dtype=int))[: len(arrived)]
    demand = OnlineDemand(deviations=deviations)
    kept = []
    for second, tokens in enumerate(needed):
        demand.sample(int(tokens), float(second))
        kept.append(demand.reserve)
    is_short = needed[1:] > np.array(kept)[:-1]
    assert 1 - is_short[60:].mean() >= least
    behind = max(len(run) for run in "".join("x" if s else " " for s in is_short[60:]).split())
    assert behind <= 6, "after so many seconds a burst has room"
