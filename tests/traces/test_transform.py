"""Transformations change what they say, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched_traces.errors import WorkloadError
from cosched_traces.transform import (
    busiest_window,
    period_s,
    replay_faster,
)
from tests.traces.samples import evenly, request, workload


def times(given):
    return [r.arrival_s for r in given.requests]


def test_a_workload_that_arrives_at_once_has_no_period():
    with pytest.raises(WorkloadError, match="arrive at once"):
        period_s(workload(request("a"), request("b")))


def test_a_workload_is_replayed_faster_and_nothing_else_changes():
    faster = replay_faster(evenly(10, 0.5), 2)
    assert times(faster) == pytest.approx([0.25 * i for i in range(10)])
    assert replay_faster(faster, 1) is faster
    with pytest.raises(WorkloadError, match="factor -1 is not above 0"):
        replay_faster(faster, -1)
    turns = workload(request("a"), request("b", after="a", session="s", think_s=4.0))
    with pytest.raises(WorkloadError, match="session"):
        replay_faster(turns, 2)


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
