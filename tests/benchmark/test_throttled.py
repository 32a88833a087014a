"""The offline rate at which HyGen* is shown."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cosched.benchmark import throttled
from cosched.benchmark.suite import run_suite
from cosched.benchmark.throttled import THROTTLED, highest_rate, needs_a_rate, sweep_rates


def with_rate(spec):
    return replace(spec, config=(("offline_rate", 2.0),))


def test_a_rate_is_searched_where_there_are_two_classes_and_none_is_given(small_spec):
    assert needs_a_rate(small_spec)
    assert not needs_a_rate(with_rate(small_spec))
    assert not needs_a_rate(replace(small_spec, online=None))
    assert not needs_a_rate(replace(small_spec, offline=None))


@pytest.mark.parametrize(("served", "rate"), [(30.0, 30.0), (0.0, 0.25), (None, 0.25)])
def test_the_range_ends_where_a_rate_throttles_nothing(served, rate):
    offline = SimpleNamespace(requests_per_s=served)
    alone = SimpleNamespace(summary=SimpleNamespace(offline=offline), end_s=4.0)
    assert highest_rate(alone) == rate


@pytest.mark.parametrize(
    ("value", "reached", "best"),
    [(2.0, (0.9, 0.95, 0.5), "2 req/s"), (None, (0.3, 0.4, 0.2), "2 req/s")],
)
def test_the_largest_good_rate_is_shown_else_the_one_nearest_to_the_goal(
    monkeypatch, small_spec, value, reached, best
):
    def found(name, spec, goals, *, on_run, **options):
        assert spec.scenario.name == THROTTLED
        probes = []
        for rate, attainment in zip((1.0, 2.0, 4.0), reached, strict=True):
            on_run(f"{rate:g} req/s", rate)
            probes.append(SimpleNamespace(value=rate, reached=(attainment,)))
        return SimpleNamespace(probes=probes, value=value)

    monkeypatch.setattr(throttled, "find_largest", found)
    heard = []
    tried, chosen = sweep_rates(
        small_spec, highest=4.0, num_jobs=1, store=None, on_run=lambda name, _: heard.append(name)
    )
    assert chosen == best
    assert list(tried) == heard == ["1 req/s", "2 req/s", "4 req/s"]


def test_the_comparison_searches_once_and_goes_on_from_its_results(
    small_spec, ran, store, monkeypatch
):
    monkeypatch.setattr(throttled, "TOLERANCE", 0.9)
    options = {"num_jobs": 1, "quiet": True, "store": store}
    first = run_suite(small_spec, ["s0", THROTTLED], **options)
    names = [spec.scenario.name for spec in ran]
    assert names.count("s0") == names.count("offline-fcfs") == 1
    assert names.count(THROTTLED) == len(first.sweeps[THROTTLED]) > 1
    row = first.rows[THROTTLED]
    rate = row.name.removeprefix("hygen-throttled (").removesuffix(")")
    assert rate.endswith(" req/s")
    assert replace(row, name=rate) == first.sweeps[THROTTLED][rate]
    assert dict(row.result.spec.config) == {"offline_rate": float(rate.split()[0])}
    assert row.attainment >= row.baseline_attainment - 0.01

    ran.clear()
    again = run_suite(small_spec, [THROTTLED], **options)
    assert ran == [] and again.rows[THROTTLED].name == row.name
    given = run_suite(with_rate(small_spec), [THROTTLED], **options)
    assert given.rows[THROTTLED].name == THROTTLED and given.sweeps == {}
