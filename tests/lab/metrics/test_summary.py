"""Summaries: an example by hand, and what holds for every run."""

from __future__ import annotations

import json
import math
import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.lab.metrics.records import IterationLog, RequestRecord
from cosched.lab.metrics.slo import Attainment
from cosched.lab.metrics.stats import Window
from cosched.lab.metrics.summary import summarize
from tests.lab.metrics.samples import OFFLINE, ONLINE, iterations, logs, request, requests, slos

records_lists = st.lists(requests(), max_size=8)
WINDOW = Window(start_s=10.0, end_s=20.0)


def numbers(value):
    """All numbers in a summary's dictionary."""
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers(part)
    elif value is not None:
        yield value


def by_path(value, path=()):
    if isinstance(value, dict):
        for key, part in value.items():
            yield from by_path(part, (*path, key))
    else:
        yield ".".join(path), value


# -- by hand ------------------------------------------------------------------------------------


def example():
    """Window [10, 20). Two online requests in it and one before it; three offline."""
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    online = [
        request(9.0, (10.5, 11.0), slo=slo),  # arrived before the window
        request(10.0, (10.5, 10.75, 11.5), slo=slo, num_cached_tokens=25),
        request(18.0, (20.0, 21.0, 22.0), slo=slo, num_cached_tokens=75, num_preemptions=1),
    ]
    offline = [
        request(0.0, (5.0, 12.0), num_prompt_tokens=200, num_cached_tokens=50),
        request(0.0, (13.0, 19.0), num_prompt_tokens=300, num_cached_tokens=150),
        request(
            0.0, (19.5, 25.0), num_prompt_tokens=400, num_cached_tokens=0, num_recomputed_tokens=7
        ),
    ]
    log = iterations(
        {"start_s": 9.0, "duration_s": 2.0, "num_online_prefill_tokens": 100, "planning_s": 1e-4},
        {"start_s": 12.0, "duration_s": 4.0, "num_offline_decodes": 3, "predicted_s": 5.0},
        {"start_s": 19.0, "duration_s": 2.0, "num_offline_prefill_tokens": 999},
    )
    return [*online, *(replace(r, request_class=OFFLINE) for r in offline)], log


def test_online_is_about_the_requests_that_arrived_in_the_window():
    online = summarize(*example(), window=WINDOW).online
    assert (online.num_requests, online.num_finished, online.num_unfinished) == (2, 2, 0)
    assert (online.ttft_s.mean, online.ttft_s.max) == (1.25, 2.0)
    assert (online.tpot_s.mean, online.tpot_s.max) == (0.75, 1.0)
    assert online.tbt_s.num_samples == 4
    assert online.tbt_s.mean == (0.25 + 0.75 + 1 + 1) / 4
    assert (online.worst_tbt_s.p50, online.worst_tbt_s.max) == (0.875, 1.0)
    assert (online.e2e_s.mean, online.e2e_s.max) == (2.75, 4.0)
    assert online.normalized_latency_s.mean == pytest.approx((1.5 / 3 + 4 / 3) / 2)
    assert online.attainment.ttft == Attainment(num_met=1, num_missed=1, num_undecided=0, ratio=0.5)
    assert online.attainment.joint.ratio == 0.5
    assert online.goodput_requests_per_s == 0.1
    assert (online.num_prompt_tokens, online.num_cached_tokens, online.hit_ratio) == (200, 100, 0.5)
    assert (online.num_preemptions, online.num_preempted_requests) == (1, 1)


def test_every_gap_between_tokens_is_held_against_the_target():
    slo = Slo(tpot_s=1.0)
    records = [
        request(0.0, (1.0, 2.0, 3.5, 3.75), slo=slo),  # one gap of 1.5; on average in time
        request(0.0, (5.0, 6.0), slo=slo, finish_s=None),  # open: a second later it is not late
        request(0.0, (1.0, 1.5), slo=slo, finish_s=None),  # open, and late
        request(0.0, (1.0,), slo=slo, ok=False),
        request(0.0, (1.0, 9.0)),  # has no target
    ]
    online = summarize(records, observed_until_s=7.0).online
    assert online.attainment.tbt == Attainment(
        num_met=4, num_missed=3, num_undecided=1, ratio=4 / 7
    )
    assert online.attainment.tpot.num_met == 1


def test_rates_are_of_the_work_done_in_the_window():
    summary = summarize(*example(), window=WINDOW)
    online, offline = summary.online, summary.offline
    # Two online replies ended in [10, 20), the one that arrived before it included.
    assert online.requests_per_s == 0.2
    assert online.finished_tokens_per_s == (102 + 103) / 10
    assert online.output_tokens_per_s == (2 + 3) / 10
    # Two offline first tokens (300 and 400 prompt tokens) and four output tokens.
    assert offline.tokens_per_s == (300 + 400 + 4) / 10
    assert offline.output_tokens_per_s == 0.4
    assert offline.requests_per_s == 0.2
    assert offline.finished_tokens_per_s == (202 + 302) / 10
    assert offline.finished_output_tokens_per_s == 0.4
    assert (online.computed_tokens_per_s, offline.computed_tokens_per_s) == (10.0, 0.3)


def test_offline_is_about_what_happened_in_the_window():
    offline = summarize(*example(), window=WINDOW).offline
    assert (offline.num_requests, offline.num_finished, offline.num_unfinished) == (3, 2, 1)
    assert (offline.e2e_s.num_samples, offline.e2e_s.mean) == (2, 15.5)
    assert (offline.ttft_s.num_samples, offline.ttft_s.mean) == (2, 16.25)
    assert (offline.tbt_s.num_samples, offline.tbt_s.mean) == (2, 6.5)
    # By admission, here not known, so by first token: 150 of 300 and 0 of 400.
    assert offline.hit_ratio == 150 / 700
    assert offline.num_recomputed_tokens == 7
    assert offline.recomputed_ratio == 0.0
    assert offline.goodput_requests_per_s is None


def test_iterations_of_the_window():
    summary = summarize(*example(), window=WINDOW)
    ran = summary.iterations
    assert ran.num_iterations == 2
    assert ran.busy_ratio == (1 + 4 + 1) / 10
    assert ran.duration_s.max == 4.0
    assert ran.num_tokens.mean == 51.5
    assert ran.prediction_error_ratio.mean == 0.25
    assert ran.underpredicted_ratio == 0.0
    assert summary.host.planning_total_s == 1e-4
    assert summary.host.planning_s.num_samples == 1


def test_kv_occupancy_is_weighted_by_busy_time():
    held = {"kv_online_tokens": 50, "kv_offline_tokens": 30, "kv_cached_tokens": 20}
    log = iterations(
        {"start_s": 0.0, "duration_s": 1.0, **held},
        {"start_s": 5.0, "duration_s": 3.0, "kv_free_tokens": 100},
    )
    kv = summarize([], log).kv
    assert kv.capacity_tokens == 100
    assert (kv.online.mean_ratio, kv.online.max_ratio) == (0.125, 0.5)
    assert (kv.offline.mean_ratio, kv.cached.mean_ratio) == (0.075, 0.05)
    assert kv.free.mean_ratio == 0.75


def test_a_prompt_without_a_reply_is_work_too():
    """Scoring jobs ask for no output: the prompt counts at the end."""
    scored = request(0.0, finish_s=12.0, request_class=OFFLINE)
    assert summarize([scored], window=WINDOW).offline.tokens_per_s == 10.0
    assert summarize([replace(scored, ok=False)], window=WINDOW).offline.tokens_per_s == 0.0


def test_requests_without_targets_of_their_own_take_the_defaults():
    records = [request(0.0, (0.5,)), request(0.0, (0.5,), slo=Slo(ttft_s=0.1))]
    summary = summarize(records, default_slos={ONLINE: Slo(ttft_s=1.0)})
    assert summary.online.attainment.ttft.ratio == 0.5
    assert summarize(records).online.attainment.ttft.ratio == 0.0


# -- of every run -------------------------------------------------------------------------------


@given(records_lists, logs(), slos)
def test_json_is_strict_with_the_same_keys_and_ratios_between_0_and_1(records, log, slo):
    summary = summarize(records, log, default_slos={ONLINE: slo, OFFLINE: slo}).to_dict()
    json.dumps(summary, allow_nan=False)
    assert all(math.isfinite(number) for number in numbers(summary))
    empty = summarize([]).to_dict()
    assert [path for path, _ in by_path(summary)] == [path for path, _ in by_path(empty)]
    assert set(numbers(empty)) == {0}
    for path, value in by_path(summary):
        is_error = path.startswith("iterations.prediction_error_ratio")
        if path.endswith("ratio") and value is not None and not is_error:
            assert 0 <= value <= 1, path


@given(records_lists, logs(), st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(records, log, rng: random.Random):
    shuffled = records.copy()
    rng.shuffle(shuffled)
    first, second = (json.dumps(summarize(r, log).to_dict()) for r in (records, shuffled))
    assert first == second


def stretched(record: RequestRecord, factor: float) -> RequestRecord:
    times = {
        name: None if getattr(record, name) is None else getattr(record, name) * factor
        for name in ("arrival_s", "first_token_s", "finish_s")
    }
    if record.token_times is not None:
        times["token_times"] = array("d", np.array(record.token_times) * factor)
    slo = {
        name: None if getattr(record.slo, name) is None else getattr(record.slo, name) * factor
        for name in ("ttft_s", "tpot_s", "deadline_s")
    }
    return replace(record, **times, slo=Slo(**slo))


@given(records_lists, st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_a_slower_clock_scales_latencies_and_keeps_verdicts(records, factor):
    window, wide = (Window(start_s=0.0, end_s=4.0 * f) for f in (1.0, factor))
    first = dict(by_path(summarize(records, window=window).to_dict()))
    second = dict(
        by_path(summarize([stretched(r, factor) for r in records], window=wide).to_dict())
    )
    for path, value in first.items():
        name = next(part for part in reversed(path.split(".")) if part not in STATISTICS)
        unit = 1 / factor if name.endswith("_per_s") else factor if name.endswith("_s") else 1.0
        if value is None or path.endswith("num_samples"):
            assert second[path] == value, path
        else:
            assert second[path] == pytest.approx(value * unit, rel=1e-5), path


STATISTICS = {"num_samples", "mean", "p50", "p90", "p95", "p99", "max"}


@given(records_lists)
def test_requests_are_finished_failed_or_unfinished_and_a_failed_one_lowers_attainment(records):
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    failed = request(0.0, ok=False, slo=slo)
    before = summarize(records).online.attainment
    after = summarize([*records, failed]).online.attainment
    for name in ("ttft", "tpot", "joint"):
        assert getattr(after, name).num_missed >= getattr(before, name).num_missed + 1
        assert getattr(after, name).ratio <= (getattr(before, name).ratio or 1.0)
    parts = [summarize(records).online, summarize(records).offline]
    assert all(p.num_requests == p.num_finished + p.num_failed + p.num_unfinished for p in parts)
    assert sum(p.num_requests for p in parts) == len(records)


@given(records_lists, st.integers(1, 7))
def test_adjoining_windows_share_no_work_and_lose_none(records, cut_s):
    def output_tokens(start_s: float, end_s: float) -> float:
        window = Window(start_s=start_s, end_s=end_s)
        summary = summarize(records, window=window, observed_until_s=1000.0)
        return sum(
            part.output_tokens_per_s * window.length_s for part in (summary.online, summary.offline)
        )

    whole = output_tokens(0.0, 2000.0)
    assert output_tokens(0.0, cut_s) + output_tokens(cut_s, 2000.0) == pytest.approx(whole)
    assert whole == pytest.approx(sum(r.num_output_tokens for r in records if r.ok))


@given(records_lists, logs())
def test_without_host_time_the_same_run_gives_the_same_bytes(records, log):
    slower = IterationLog(
        row._replace(planning_s=None if row.planning_s is None else row.planning_s + 1.0)
        for row in log
    )
    first, second = (
        json.dumps(summarize(records, rows).to_dict(with_host=False)) for rows in (log, slower)
    )
    assert first == second
    assert "host" not in json.loads(first)
