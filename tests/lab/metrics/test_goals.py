"""Goals: how they are written, and what a run reaches of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.errors import ConfigError
from cosched.lab.metrics.goals import METRICS, STATISTICS, parse_goal
from cosched.lab.metrics.stats import Window
from cosched.lab.metrics.summary import summarize
from tests.lab.metrics.samples import ONLINE, request


@given(
    statistic=st.sampled_from(STATISTICS),
    metric=st.sampled_from(METRICS),
    number=st.integers(1, 10**6),
    unit=st.sampled_from(["ms", "s", "%"]),
    blank=st.sampled_from(["", " "]),
)
def test_every_goal_that_can_be_written_is_read(statistic, metric, number, unit, blank):
    plus = "+" if unit == "%" else ""
    goal = parse_goal(f"{blank}{statistic}_{metric}{blank}<={blank}{plus}{number}{unit}")
    assert (goal.statistic, goal.metric, goal.is_relative) == (statistic, metric, unit == "%")
    assert goal.limit == pytest.approx(number / {"ms": 1000, "s": 1, "%": 100}[unit])
    assert parse_goal(goal.text) == goal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "p99_ttft",
        "p98_ttft<=1s",
        "p99_ttft<=1000",
        "p99_ttft<=0ms",
        "p99_ttft<=+5ms",
        "attainment>=0.99",
        "attainment>=101%",
        "attainment>=+1%",
    ],
)
def test_anything_else_is_refused_with_the_form(text):
    with pytest.raises(ConfigError, match=r"is not a goal; write STATISTIC_METRIC<=LIMIT"):
        parse_goal(text)


def test_a_relative_goal_is_bound_to_what_online_requests_alone_reach():
    goal = parse_goal("p99_tbt<=+5%")
    assert goal.bound(0.1) == pytest.approx(0.105)
    assert goal.bound(None) is None
    assert parse_goal("p99_tbt<=80ms").bound(None) == 0.08
    points = parse_goal("attainment>=-1%")
    assert points.bound(0.95) == pytest.approx(0.94)
    assert points.bound(None) is None
    assert points.is_met(0.945, 0.94) and not points.is_met(0.93, 0.94)


@given(st.floats(0, 10), st.floats(0.001, 10))
def test_latencies_are_limited_from_above_and_attainment_from_below(value, bound):
    assert parse_goal("mean_ttft<=1s").is_met(value, bound) == (value <= bound)
    assert parse_goal("attainment>=90%").is_met(value, bound) == (value >= bound)
    assert not parse_goal("mean_ttft<=1s").is_met(None, bound)


def reached(text, records, *, end_s=10.0):
    summary = summarize(
        records,
        window=Window(start_s=0.0, end_s=end_s),
        default_slos={ONLINE: Slo(ttft_s=1.0, tpot_s=0.5)},
    )
    return parse_goal(text).measure(summary, records)


def test_what_a_run_reaches_is_what_its_summary_says():
    records = [request(0.0, (0.1 * (i + 1), 0.5 + i, 1.0 + i)) for i in range(5)]
    online = summarize(
        records, window=Window(start_s=0.0, end_s=10.0), default_slos={ONLINE: Slo()}
    ).online
    for metric in METRICS:
        distribution = getattr(online, f"{metric}_s")
        for statistic in STATISTICS:
            value = reached(f"{statistic}_{metric}<=1s", records)
            assert value == pytest.approx(getattr(distribution, statistic))
    assert reached("attainment>=1%", records) == pytest.approx(1 / 5)


def test_a_request_that_is_never_served_makes_a_run_look_slow_not_fast():
    served = [request(0.0, (0.1, 0.2, 0.3)) for i in range(3)]
    starved = request(1.0)
    stuck = request(0.0, (0.1, 0.2), finish_s=None)
    just_came = request(9.99)
    assert reached("p99_ttft<=1s", [*served, starved]) > 8
    assert reached("p99_ttft<=1s", [*served, just_came]) == reached("p99_ttft<=1s", served)
    assert reached("p99_tbt<=1s", [*served, stuck]) > 8
    assert reached("p99_tpot<=1s", [*served, stuck]) > 4
    assert reached("p99_e2e<=1s", [*served, stuck]) > 9
    assert reached("p99_ttft<=1s", []) is None
