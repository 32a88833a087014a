"""Which requests, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched_traces.errors import WorkloadError
from cosched_traces.transform import (
    busiest_window,
    mean_rate,
    period_s,
    replay_faster,
    rescale_rate,
    rescale_think_times,
)
from tests.traces.samples import evenly, request, workload


def times(given):
    return [r.arrival_s for r in given.requests]


def test_period_and_rate_count_the_gap_after_the_last():
    assert period_s(evenly(10, 0.5)) == pytest.approx(5)
    assert mean_rate(evenly(10, 0.5)) == pytest.approx(2)
    for at_0 in (workload(), workload(request()), workload(request("a"), request("b"))):
        with pytest.raises(WorkloadError, match="arrive at once"):
            period_s(at_0)


def test_rescale_rate_scales_time_and_nothing_else():
    scaled = rescale_rate(evenly(10, 0.5), 4)
    assert times(scaled) == pytest.approx([0.25 * i for i in range(10)])
    assert mean_rate(scaled) == pytest.approx(4)
    with pytest.raises(WorkloadError, match="rate 0 is not above 0"):
        rescale_rate(evenly(10), 0)


def test_a_workload_is_replayed_faster_and_nothing_else_changes():
    faster = replay_faster(evenly(10, 0.5), 2)
    assert times(faster) == pytest.approx([0.25 * i for i in range(10)])
    assert replay_faster(faster, 1) is faster
    with pytest.raises(WorkloadError, match="factor -1 is not above 0"):
        replay_faster(faster, -1)
    turns = workload(request("a"), request("b", after="a", session="s", think_s=4.0))
    with pytest.raises(WorkloadError, match="session"):
        replay_faster(turns, 2)


def test_think_times_are_scaled_and_nothing_else():
    turns = workload(request("a"), request("b", after="a", session="s", think_s=4.0))
    scaled = rescale_think_times(turns, 0.25)
    assert [r.think_s for r in scaled.requests] == [0.0, 1.0]
    assert rescale_think_times(scaled, 4).requests == turns.requests
    with pytest.raises(WorkloadError, match="factor of think times 0 is not above 0"):
        rescale_think_times(turns, 0)


@given(
    gaps=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=30),
    length_s=st.floats(0.5, 60.0),
)
def test_no_window_of_that_length_holds_more_tokens_than_the_busiest(gaps, length_s):
    starts = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    whole = workload(*(request(str(i), time_s) for i, time_s in enumerate(starts)))

    def weight(requests):
        return sum(r.num_prompt_tokens + r.num_output_tokens for r in requests)

    busiest = busiest_window(whole, length_s).requests
    assert all(0 <= r.arrival_s < length_s for r in busiest)
    assert weight(busiest) == max(
        weight(r for r in whole.requests if start <= r.arrival_s < start + length_s)
        for start in starts
    )
