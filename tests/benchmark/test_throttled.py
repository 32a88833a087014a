"""The offline rate at which HyGen* is shown."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.benchmark import suite as suites
from cosched.benchmark import throttled
from cosched.benchmark.suite import run_suite
from cosched.benchmark.throttled import THROTTLED, highest_rate, needs_a_rate, sweep_rates
from cosched.config import ENV_VAR
from cosched.core.request import Slo
from cosched.simulation import slo_search
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.simulation.scenario import scenario
from cosched.simulation.store import ResultStore

SPEC = RunSpec(
    scenario=scenario("s1"),
    machine=Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32),
    online=WorkloadSpec(name="alpaca", rate=6.0),
    offline=WorkloadSpec(name="bros-offline", num_requests=60),
    cost=CostSpec(name="roofline"),
    slo=Slo(ttft_s=1.0, tpot_s=0.015),
    duration_s=4.0,
)


def with_rate(spec):
    return replace(spec, config=(("offline_rate", 2.0),))


def test_a_rate_is_searched_where_there_are_two_classes_and_none_is_given():
    assert needs_a_rate(SPEC)
    assert not needs_a_rate(with_rate(SPEC))
    assert not needs_a_rate(replace(SPEC, online=None))
    assert not needs_a_rate(replace(SPEC, offline=None))


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
    monkeypatch, value, reached, best
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
        SPEC, highest=4.0, num_jobs=1, store=None, on_run=lambda name, _: heard.append(name)
    )
    assert chosen == best
    assert list(tried) == heard == ["1 req/s", "2 req/s", "4 req/s"]


def test_the_comparison_searches_once_and_goes_on_from_its_results(monkeypatch, tmp_path):
    ran = []

    def in_this_process(specs, *, num_jobs, store):
        for index, spec in enumerate(specs):
            result = store.get(spec)
            if result is None:
                ran.append(spec.scenario.name)
                store.put(result := execute(spec))
            yield index, result

    monkeypatch.setattr(slo_search, "execute_all", in_this_process)
    monkeypatch.setattr(suites, "execute_all", in_this_process)
    monkeypatch.setenv(ENV_VAR, "")  # a run sets it
    options = {"num_jobs": 1, "quiet": True, "store": ResultStore(tmp_path)}
    first = run_suite(SPEC, ["s0", THROTTLED], **options)
    assert ran.count("s0") == ran.count("offline-fcfs") == 1
    assert ran.count(THROTTLED) == len(first.sweeps[THROTTLED]) > 1
    row = first.rows[THROTTLED]
    assert row.name.startswith("hygen-throttled (") and row.name.endswith(" req/s)")
    assert replace(row, name=row.name[17:-1]) == first.sweeps[THROTTLED][row.name[17:-1]]
    assert dict(row.result.spec.config).keys() == {"offline_rate"}
    assert row.attainment >= row.baseline_attainment - 0.01

    ran.clear()
    again = run_suite(SPEC, [THROTTLED], **options)
    assert ran == [] and again.rows[THROTTLED].name == row.name
    given = run_suite(with_rate(SPEC), [THROTTLED], **options)
    assert given.rows[THROTTLED].name == THROTTLED and given.sweeps == {}
