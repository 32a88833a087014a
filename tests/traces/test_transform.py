"""Which requests, and when."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import RequestClass
from cosched_traces.errors import WorkloadError
from cosched_traces.transform import (
    at_once,
    first_requests,
    mean_rate,
    merge,
    period_s,
    repeat,
    rescale_rate,
    sample_to_rate,
    shuffle,
    slice_time,
    with_arrivals,
    with_rids,
)
from tests.traces.samples import common_prefix, evenly, request, rids_of, workload


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


@given(
    gaps=st.lists(st.floats(0.01, 5), min_size=20, max_size=200),
    share=st.floats(0.1, 1),
    seed=st.integers(0, 2**32),
)
def test_sampling_keeps_order_times_and_the_rate(gaps, share, seed):
    requests, now = [], 0.0
    for index, gap in enumerate(gaps):
        requests.append(request(f"r{index}", now))
        now += gap
    whole = workload(*requests)
    rate = mean_rate(whole) * share
    sampled = sample_to_rate(whole, rate, seed=seed)
    assert sampled.requests == sample_to_rate(whole, rate, seed=seed).requests
    kept = {r.rid: r for r in whole.requests}
    assert all(kept[r.rid] is r for r in sampled.requests)
    places = [int(r.rid[1:]) for r in sampled.requests]
    assert all(earlier < later for earlier, later in pairwise(places))
    assert len(sampled.requests) == pytest.approx(rate * period_s(whole), abs=0.5)


def test_sampling_a_window_and_more_than_there_is():
    whole = evenly(100)
    sampled = sample_to_rate(whole, 0.5, seed=0, duration_s=40)
    assert len(sampled.requests) == 20
    assert times(sampled)[-1] < 40
    assert rids_of(sampled) != rids_of(sample_to_rate(whole, 0.5, seed=1, duration_s=40))
    # A window longer than the trace is as long as the trace.
    assert len(sample_to_rate(whole, 0.5, seed=0, duration_s=1000).requests) == 50
    with pytest.raises(WorkloadError, match="2 req/s needs 200 requests, the trace has 100"):
        sample_to_rate(whole, 2, seed=0)


def test_slice_moves_to_zero():
    sliced = slice_time(evenly(10), 2.5, 5)
    assert rids_of(sliced) == ["w3", "w4"]
    assert times(sliced) == [0.5, 1.5]
    with pytest.raises(WorkloadError, match="no time between"):
        slice_time(evenly(10), 5, 5)


def test_repeat_starts_over_with_new_prompts():
    lap = workload(
        request("a", 0.0, prompt=((1, 20), (2, 5))), request("b", 1.0, prompt=((1, 20), (3, 5)))
    )
    long = repeat(lap, 5)
    assert rids_of(long) == ["a", "b", "a/1", "b/1", "a/2"]
    assert times(long) == [0, 1, 2, 3, 4]
    a, _, a1, b1, a2 = (r.prompt(vocab_size=50_000) for r in long.requests)
    assert common_prefix(a1, b1) == 20
    assert common_prefix(a, a1) == common_prefix(a1, a2) == 0
    assert rids_of(repeat(lap, 1.5)) == ["a", "b"]
    tokens = workload(request("a", token_ids=(1,)), request("b", 1.0, token_ids=(2,)))
    with pytest.raises(WorkloadError, match="a: given tokens cannot be repeated"):
        repeat(tokens, 10)


def test_merge_sorts_and_refuses_equal_rids():
    one, other = evenly(3, 2.0, name="x"), evenly(3, 1.0, name="y")
    both = merge(one, other, name="both")
    assert rids_of(both) == ["x0", "y0", "y1", "x1", "y2", "x2"]
    with pytest.raises(WorkloadError, match="rid 'x0' stands 2 times in twice; use with_rids"):
        merge(one, one, name="twice")
    renamed = with_rids(one, "z-")
    assert rids_of(renamed) == ["z-0", "z-1", "z-2"]
    assert len(merge(one, renamed, name="twice").requests) == 6


def test_merge_keeps_the_notes_of_both():
    one, other = first_requests(evenly(3, name="x"), 2), evenly(2, name="y")
    assert merge(one, other, name="both").notes == ("x: first 2 of 3",)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 30))
def test_shuffle_moves_requests_and_not_times(seed, count):
    given_ = evenly(count)
    shuffled = shuffle(given_, seed=seed)
    assert times(shuffled) == times(given_)
    assert sorted(rids_of(shuffled)) == sorted(rids_of(given_))
    assert shuffled == shuffle(given_, seed=seed)


def test_arrivals_given_and_taken_away():
    given_ = with_arrivals(evenly(5), [0.5, 0.5, 9])
    assert times(given_) == [0.5, 0.5, 9]
    offline = at_once(given_, RequestClass.OFFLINE)
    assert times(offline) == [0, 0, 0]
    assert {r.request_class for r in offline.requests} == {RequestClass.OFFLINE}


def test_first_requests():
    assert rids_of(first_requests(evenly(3), 2)) == ["w0", "w1"]
    assert len(first_requests(evenly(3), 9).requests) == 3
    with pytest.raises(WorkloadError, match="num_requests 0"):
        first_requests(evenly(3), 0)


def test_every_step_is_noted_and_the_input_unchanged():
    given_ = evenly(10)
    done = sample_to_rate(slice_time(rescale_rate(given_, 2), 0, 4), 1, seed=3)
    assert given_.notes == ()
    assert len(done.notes) == 3
    assert "seed=3" in done.notes[-1]
