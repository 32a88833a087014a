"""The interval about a mean of a few runs."""

import numpy as np
import pytest

from cosched.lab.metrics.stats import MOST_VALUES, Interval, interval_of


@pytest.mark.parametrize("count", [2, 5, MOST_VALUES])
def test_the_true_mean_lies_within_in_95_of_100_draws(count):
    rng = np.random.default_rng(0)
    num_inside = 0
    for values in rng.normal(3.0, 2.0, (4000, count)):
        interval = interval_of(values.tolist())
        num_inside += abs(interval.mean - 3.0) <= interval.half_width
    assert num_inside / 4000 == pytest.approx(0.95, abs=0.012)


def test_one_value_says_nothing_of_its_spread_and_a_missing_one_nothing_at_all():
    assert interval_of([2.0]) == Interval(mean=2.0, half_width=None)
    assert interval_of([]) is None and interval_of([1.0, None]) is None
