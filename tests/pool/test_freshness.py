"""How fast offline work is served, and what must go first to be in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.pool.freshness import DueRequests, ServedRate
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from tests.factories import offline
from tests.pool.prefixes import prefixed


def rate_of(tokens_per_s, *, longest_s=0.0):
    rate = ServedRate()
    rate.advance(0.0, waits=True)
    rate.ended(5, longest_s)
    for second in range(1, 11):
        rate.advance(float(second), waits=True)
        rate.ended(tokens_per_s, 0.0)
    rate.longest_s = longest_s
    return rate


def test_the_rate_is_of_the_time_in_which_others_waited_and_forgets():
    rate = ServedRate()
    rate.advance(0.0, waits=True)
    rate.ended(1_000_000, 3.0)
    assert rate.tokens_per_s is None, "what the first one took lies before"
    for second in range(1, 101):
        rate.advance(float(second), waits=True)
        rate.ended(200, 3.0)
    assert rate.tokens_per_s == pytest.approx(200, rel=0.02) and rate.longest_s == 3.0
    rate.advance(101.0, waits=False)
    rate.advance(5000.0, waits=False)
    rate.ended(1_000_000, 1.0)
    assert rate.tokens_per_s == pytest.approx(200, rel=0.02), "nobody waited"
    rate.advance(5001.0, waits=True)
    rate.ended(1, 1.0)
    for second in range(1, 3000):
        rate.advance(5001.0 + second, waits=True)
        rate.ended(50, 0.5)
    assert rate.tokens_per_s == pytest.approx(50, rel=0.02) and rate.longest_s == 0.5


jobs = st.lists(st.tuples(st.floats(1, 2000), st.integers(1, 5000)), max_size=20)


@given(jobs, st.floats(0, 100), st.sampled_from([0.0, 20.0]), st.integers(0, 20))
def test_those_rise_for_whom_the_work_before_them_leaves_too_little(
    drawn, spare_s, longest_s, num_gone
):
    rate = rate_of(100, longest_s=longest_s)
    deadlines, now_s = DueRequests(), 30.0
    requests = [offline(f"r{i}", slo=Slo(deadline_s=due_s)) for i, (due_s, _) in enumerate(drawn)]
    for request, (_, num_tokens) in zip(requests, drawn, strict=True):
        deadlines.add(request, num_tokens)
    for request in requests[:num_gone]:
        deadlines.remove(request)
    left = sorted(drawn[num_gone:])
    until_s = deadlines.rise_until_s(now_s, spare_s=spare_s, rate=rate)
    speed = rate.tokens_per_s

    def left_s(due_s):
        """Of the time until a deadline, after the work that is due by then."""
        work_s = longest_s + sum(n for other_s, n in left if other_s <= due_s) / speed
        return due_s - now_s - work_s

    risen = [due_s for due_s, _ in left if due_s <= until_s]
    assert len(list(deadlines.until(until_s))) == len(risen)
    hopeless = [due_s for due_s, _ in left if left_s(due_s) <= spare_s]
    assert risen[: len(hopeless)] == [due_s for due_s, _ in left][: len(risen)][: len(hopeless)]
    assert not hopeless or until_s >= max(hopeless), "who would be late at the rate has risen"
    # With a quarter more time, and ten seconds for deadlines that are looked at together.
    assert until_s <= now_s + spare_s or any(
        due_s - now_s - 10 - longest_s - 1.26 * sum(n for o, n in left if o < due_s + 10) / speed
        <= spare_s
        for due_s in risen
    )


def test_a_job_rises_by_its_work_and_falls_back_once_there_is_time():
    config = PoolConfig(utility_ratio=1.0, deadline_margin_s=5.0)
    pool = PrefixPool(config, num_left=lambda request: 98)
    others = [prefixed([1, n]) for n in range(30)]
    job = [prefixed([2, n], slo=Slo(deadline_s=100.0)) for n in range(30)]
    for request in [*others, *job]:
        pool.add(request)
    pool.advance(0.0)
    pool.ended(100, 1.0)
    for second in range(1, 41):
        pool.advance(float(second))
        pool.ended(100, 1.0)
        assert next(iter(pool)) is others[0], f"{second=}: 38 s of work, 60 s and more left"
    for second in range(41, 60):
        pool.advance(float(second))
        pool.ended(100, 1.0)
    assert next(iter(pool)) is job[0]
    for request in job[:20]:
        pool.remove(request.rid)
    pool.remove(others[0].rid)  # a pass begun earlier may take it
    assert next(iter(pool)) is job[20]
    pool.advance(60.0)
    assert next(iter(pool)) is others[1], "ten are left, and forty seconds"
