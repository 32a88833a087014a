"""What EcoServe's evaluation measures: on a run made by hand, and on curves made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.benchmark.jct import (
    Unloaded,
    at_rate,
    measure,
    saturated,
    sustained_rate,
    unloaded,
    unloaded_of,
)
from cosched.errors import ConfigError
from cosched.metrics.records import ColumnLog
from cosched.metrics.slo import JctTarget
from cosched.simulation.run import RunResult, RunSpec, WorkloadSpec, load_requests, summarize_run
from cosched.simulation.scenario import scenario
from tests.metrics.samples import iterations, request

SPEC = RunSpec(scenario=scenario("s0"), online=WorkloadSpec(name="alpaca", rate=4.0))
TARGET = JctTarget(prompt_s=0.5, token_s=0.5, scale=2.0)


def result_of(records, log, spec=SPEC, end_s=20.0):
    return RunResult(
        spec=spec,
        summary=summarize_run(spec, records, log, end_s=end_s),
        records=records,
        iterations=log,
        kv=ColumnLog(["time_s"]),
        end_s=end_s,
        wall_s=0.0,
        cost_model={},
        cosched=None,
    )


def by_hand(**changes):
    """Iterations of a second from 1 s on. The first request is in five; the second waits for two
    seconds and is stopped for three; the third sits out two."""
    records = [
        request(1.0, (2.0, 3.0, 4.0, 5.0, 6.0), admitted_s=1.0),
        request(2.0, (5.0, 6.0, 10.0), admitted_s=4.0, pauses=((6.0, 9.0),), num_preemptions=1),
        request(7.0, (8.0, 11.0), admitted_s=7.0),
    ]
    kv = {"kv_online_tokens": 4, "kv_offline_tokens": 1, "kv_cached_tokens": 2, "kv_free_tokens": 3}
    log = iterations(
        *(
            {
                "start_s": float(start),
                "duration_s": 1.0,
                "num_online_prefill_tokens": 100 if start in (1, 4, 7) else 0,
                "num_online_prefills": 1 if start in (1, 4, 7) else 0,
                "num_online_decodes": 1,
                "planning_s": 0.25,
                **kv,
            }
            for start in range(1, 11)
        )
    )
    return result_of(records, log, **changes)


def test_the_numbers_of_a_run_made_by_hand():
    measures = measure(by_hand(spec=replace(SPEC, jct=TARGET)))
    # JCTs of 5, 8 and 4 s; targets of 6, 4 and 3 s.
    assert (measures.num_requests, measures.num_open, measures.num_stops) == (3, 0, 1)
    assert measures.jct_s == pytest.approx(17 / 3)
    assert measures.normalized_latency_s == pytest.approx((1 + 8 / 3 + 2) / 3)
    assert measures.jct_met_share == pytest.approx(1 / 3)
    assert measures.waiting_share == pytest.approx(2 / 17)
    assert measures.stopped_share == pytest.approx(3 / 17)
    assert measures.held_share == pytest.approx(2 / 17)
    assert (measures.tbt_s, measures.max_tbt_s) == (pytest.approx(12 / 7), 4.0)
    assert measures.tbt_p5_s == 1.0


def test_work_is_counted_while_requests_are_sent():
    measures = measure(by_hand())
    # Seven seconds, in which the first request ended: six iterations, and seven tokens.
    assert measures.requests_per_s == pytest.approx(1 / 7)
    assert measures.output_tokens_per_s == pytest.approx(7 / 7)
    assert measures.kv_share == pytest.approx(0.5)
    assert measures.forward_tokens == pytest.approx((5 + 200) / 5)
    assert measures.num_running == pytest.approx((5 + 2) / 5)
    assert measures.idle_share == pytest.approx(4 / 5)
    assert measures.failed_share == pytest.approx(1 / 6)
    assert measures.planning_share == pytest.approx(0.25 * 5 / 6)
    later = measure(by_hand(), warmup_s=5.0)
    assert later.requests_per_s == pytest.approx(1 / 2)
    assert later.jct_s == measures.jct_s


def test_one_that_is_not_answered_is_counted_and_misses_its_target_when_that_is_over():
    records = [request(1.0, (2.0, 3.0)), request(1.0, (2.0,), finish_s=None)]
    measures = measure(result_of(records, iterations(), spec=replace(SPEC, jct=TARGET)))
    assert (measures.num_open, measures.jct_met_share) == (1, 0.5)
    assert measures.kv_share is measures.failed_share is measures.held_share is None


def test_a_run_without_requests_has_no_numbers():
    measures = measure(result_of([], iterations()))
    assert measures.num_requests == 0 and measures.jct_s is measures.jct_met_share is None


def test_requests_have_a_deadline_for_their_length():
    spec = replace(SPEC, duration_s=20.0)
    plain, _ = load_requests(spec)
    given_one, _ = load_requests(replace(spec, jct=TARGET))
    assert len(plain) > 20 and all(r.slo.deadline_s is None for r in plain)
    for before, after in zip(plain, given_one, strict=True):
        assert after.slo.deadline_s == 2.0 * (0.5 + 0.5 * before.num_output_tokens)
        assert replace(after, slo=before.slo) == before


def test_only_online_requests_have_one():
    offline = WorkloadSpec(name="bros-offline", num_requests=3)
    both = replace(SPEC, scenario=scenario("s1"), offline=offline, duration_s=5.0, jct=TARGET)
    online, others = load_requests(both)
    assert all(r.slo.deadline_s for r in online) and len(others) == 3
    assert all(r.slo.deadline_s is None for r in others)


def test_an_unloaded_run_gives_the_terms_of_the_target():
    spec = unloaded(SPEC, num_requests=3)
    assert spec.online.num_requests == 3 and spec.online.rate < 0.01
    times = ((2.0, 3.0), (104.0, 105.0, 106.0))
    records = [request(t[0] - 0.5, t) for t in times]
    alone = unloaded_of(result_of(records, iterations(), spec=spec, end_s=200.0))
    assert alone == Unloaded(
        prompt_s=0.5, token_s=1.0, normalized_latency_s=pytest.approx((1.5 / 2 + 2.5 / 3) / 2)
    )
    assert alone.target(3.0).limit_s(10) == pytest.approx(3 * (0.5 + 10))
    with pytest.raises(ConfigError, match="answered no request"):
        unloaded_of(result_of([], iterations()))


def test_a_run_at_a_rate_goes_on_when_no_more_is_sent():
    spec = at_rate(SPEC, 2.0, duration_s=10.0)
    requests, _ = load_requests(spec)
    assert len(requests) == 20 and requests[-1].arrival_s < 0.5 * spec.duration_s
    assert saturated(SPEC, 40.0, duration_s=10.0).duration_s == 10.0
    with pytest.raises(ConfigError, match="name them"):
        at_rate(replace(SPEC, online=None), 2.0, duration_s=10.0)


@given(
    knee=st.floats(0.05, 20.0),
    steepness=st.floats(0.5, 20.0),
    at_once=st.integers(1, 3),
)
def test_the_sustained_rate_is_the_last_below_the_limit(knee, steepness, at_once):
    """On a curve that rises: one step of the tolerance further is too much."""
    tried = []

    def latency_s(rate):
        return 0.02 * (1 + 2 * (rate / knee) ** steepness)

    def run(rates):
        tried.extend(rates)
        return [latency_s(rate) for rate in rates]

    found = sustained_rate(
        run, limit_s=0.06, low=0.1, high=10.0, tolerance=0.05, num_at_once=at_once
    )
    if knee < 0.1:
        assert found is None
    else:
        assert latency_s(found) <= 0.06
        assert found == 10.0 or latency_s(found * 1.06) > 0.06
    assert len(tried) <= 9 * at_once and len(set(tried)) == len(tried)


def test_a_rate_at_which_nobody_is_answered_is_not_sustained():
    assert sustained_rate(lambda rates: [None] * len(rates), limit_s=1.0, low=1.0, high=2.0) is None
