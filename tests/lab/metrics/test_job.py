"""When a job is done, and the work per second that no order can win."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.lab.metrics.job import EDGE_SHARE, JobSummary, summarize_job
from cosched.predict.line_cost import LineCost
from tests.lab.metrics.samples import OFFLINE, request

CHEAP = LineCost(prompt_s=1.0, token_s=0.0)
DEAR = LineCost(prompt_s=0.0, token_s=0.25)


def line(rid, times, **fields):
    return request(0.0, times, rid=rid, request_class=OFFLINE, **fields)


def test_a_job_is_done_when_its_last_line_is():
    job = summarize_job([line("a", (1.0, 2.0)), line("b", (3.0, 8.0))], end_s=9.0)
    assert job.makespan_s == 8.0
    assert job.completion_mean_s == 5.0
    assert (job.num_lines, job.num_finished) == (2, 2)
    assert job.work_per_s is None
    # A line that did not end leaves the makespan open, and one that failed did no work.
    lines = [line("a", (5.0,)), line("b", (2.0, 3.0), finish_s=None), line("c", (5.0,), ok=False)]
    job = summarize_job(lines, end_s=10.0, costs=dict.fromkeys("abc", CHEAP))
    assert (job.makespan_s, job.completion_mean_s) == (None, 5.0)
    assert (job.num_lines, job.num_finished) == (3, 1)
    assert summarize_job([], end_s=5.0) == JobSummary()


@given(order=st.permutations(range(20)))
def test_no_order_of_the_lines_wins_work(order):
    """One line a second, cheap prompts and dear replies: the same work whichever come first."""
    costs = {f"r{i}": CHEAP for i in range(20)}
    lines = [line(f"r{i}", (place + 0.5,)) for place, i in enumerate(order)]
    job = summarize_job(lines, end_s=20.0, costs=costs)
    assert job.work_per_s == pytest.approx(1.0)


def test_unfinished_replies_count_for_the_part_that_is_done():
    times = tuple(float(t) for t in range(1, 10))
    job = summarize_job([line("a", times, finish_s=None)], end_s=10.0, costs={"a": DEAR})
    inside = [t for t in times[1:] if 10 * EDGE_SHARE <= t < 10 * (1 - EDGE_SHARE)]
    assert job.work_per_s == pytest.approx(0.25 * len(inside) / 8)
