"""Baselines at their best settings."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.benchmark import tuned
from cosched.benchmark.suite import num_runs, run_suite
from cosched.benchmark.tuned import CHUNK_TOKENS, TOLERANCE, TUNINGS, best_of, highest_rate, tune
from cosched.errors import ConfigError

SHARE = st.floats(0, 1)


@dataclass(frozen=True)
class Run:
    attainment: float
    offline_tokens_per_s: float
    baseline_attainment: float = 0.99
    gave_up: bool = False


@given(
    st.dictionaries(
        st.integers(), st.builds(Run, SHARE, st.floats(0, 1e5), SHARE), min_size=1, max_size=9
    )
)
def test_most_throughput_among_those_near_online_only_else_the_nearest(tried):
    best = tried[best_of(tried)]
    lacking = {
        setting: max(run.baseline_attainment - run.attainment, 0.0)
        for setting, run in tried.items()
    }
    near = [tried[setting] for setting in tried if lacking[setting] <= TOLERANCE]
    if near:
        assert best in near
        assert best.offline_tokens_per_s == max(run.offline_tokens_per_s for run in near)
    else:
        assert max(best.baseline_attainment - best.attainment, 0.0) == min(lacking.values())


@pytest.mark.parametrize("name", TUNINGS)
@given(data=st.data())
def test_the_best_setting_of_all_is_found_in_a_part_of_the_runs(name, data):
    """Chunks from a smallest to a largest bear a number of requests that grows with the chunk;
    throughput grows with both."""
    tuning = TUNINGS[name]
    amounts = [float(n) for n in range(1, 31)] if tuning.unit else [None]
    smallest = data.draw(st.sampled_from(CHUNK_TOKENS))
    largest = data.draw(st.sampled_from([c for c in CHUNK_TOKENS if c >= smallest]))
    bears = data.draw(st.integers(1, 25))
    gives_up = data.draw(st.booleans())

    def outcome(setting):
        chunk = setting.chunk_tokens or smallest
        amount = setting.amount or 0
        is_good = smallest <= chunk <= largest and amount <= bears + chunk / 1000
        served = chunk / 1e4 + (amount or chunk)
        return Run(0.99 if is_good else 0.5, served, gave_up=gives_up and not is_good)

    ran = []

    def run(settings, may_give_up):
        assert may_give_up, "there is a good one"
        ran.extend(settings)
        return [outcome(setting) for setting in settings]

    tried = tune(tuning, amounts, run, num_at_once=data.draw(st.integers(1, 3)))
    best = best_of(tried)
    assert len(ran) == len(set(ran)) == len(tried) <= 200, "not all 960"
    assert tried[best].attainment == 0.99
    if tuning.chunks:
        assert best.chunk_tokens == largest
        first = next(i for i, chunk in enumerate(CHUNK_TOKENS) if chunk == largest)
        too_large = {s.chunk_tokens for s in tried if s.chunk_tokens > largest}
        assert len(too_large) <= min(7, len(CHUNK_TOKENS) - first - 1), "it stops soon"
    if tuning.unit:
        chunk = best.chunk_tokens or smallest
        assert best.amount == min(int(bears + chunk / 1000), 30)


@pytest.mark.parametrize("name", TUNINGS)
def test_where_none_is_good_the_nearest_of_a_few_whole_runs_is_shown(name):
    amounts = [1.0, 2.0, 3.0] if TUNINGS[name].unit else [None]

    def run(settings, may_give_up):
        return [
            Run((s.chunk_tokens or 100) / 1e5, 1.0, gave_up=may_give_up and s.chunk_tokens != 640)
            for s in settings
        ]

    tried = tune(TUNINGS[name], amounts, run)
    best = best_of(tried)
    assert not tried[best].gave_up
    assert best.chunk_tokens == (8192 if TUNINGS[name].chunks else None)


def test_a_setting_says_what_it_is_and_its_run_has_it(small_spec):
    tuning = TUNINGS["priority-tuned"]
    tried = tune(tuning, [None], lambda settings, _: [Run(1.0, 1.0) for _ in settings])
    assert {str(s).split()[-1] for s in tried} == {"fcfs", "lof"}
    setting = next(s for s in tried if str(s) == "448 mixed fcfs")
    spec = tuning.spec(small_spec, setting)
    assert spec.scenario.policy == "priority" and spec.machine.mixed_chunk is True
    assert spec.machine.chunk_tokens == 448 and spec.machine.schedule_policy == "fcfs"
    rate = replace(setting, mixed_chunk=None, schedule_policy=None, amount=2.5, unit="req/s")
    assert str(rate) == "448 2.5 req/s"
    spec = TUNINGS["hygen-throttled-tuned"].spec(small_spec, rate)
    assert dict(spec.config) == {"offline_rate": 2.5} and spec.scenario.name == "hygen-throttled"
    cap = TUNINGS["cap-tuned"].spec(small_spec, replace(rate, amount=7.0))
    assert cap.cap == 7 and cap.scenario.name == "cap"


@pytest.mark.parametrize(("served", "rate"), [(30.0, 30.0), (0.0, 0.25), (None, 0.25)])
def test_the_range_ends_where_a_rate_throttles_nothing(served, rate):
    offline = SimpleNamespace(requests_per_s=served)
    alone = SimpleNamespace(summary=SimpleNamespace(offline=offline), end_s=4.0)
    assert highest_rate(alone) == rate


def test_the_comparison_searches_once_and_goes_on_from_its_results(
    small_spec, ran, store, monkeypatch
):
    monkeypatch.setattr(tuned, "AMOUNT_TOLERANCE", 0.9)
    options = {"num_jobs": 1, "quiet": True, "store": store}
    throttled = "hygen-throttled"
    assert num_runs(small_spec, ["s0", throttled])[1], "an estimate"
    first = run_suite(small_spec, ["s0", throttled], **options)
    names = [spec.scenario.name for spec in ran]
    assert names.count("s0") == names.count("offline-fcfs") == 1
    assert names.count(throttled) == len(first.sweeps[throttled]) > 1
    row = first.rows[throttled]
    rate = row.name.removeprefix("hygen-throttled (").removesuffix(")")
    assert rate.endswith(" req/s")
    assert replace(row, name=rate) == first.sweeps[throttled][rate]
    assert dict(row.result.spec.config) == {"offline_rate": float(rate.split()[0])}
    assert row.attainment >= row.baseline_attainment - TOLERANCE

    ran.clear()
    again = run_suite(small_spec, [throttled], **options)
    assert ran == [] and again.rows[throttled].name == row.name
    given_rate = replace(small_spec, config=(("offline_rate", 2.0),))
    given = run_suite(given_rate, [throttled], **options)
    assert given.rows[throttled].name == throttled and given.sweeps == {}


def test_a_search_for_one_class_alone_is_refused(small_spec):
    with pytest.raises(ConfigError, match="sarathi-tuned needs both classes"):
        run_suite(replace(small_spec, online=None), ["sarathi-tuned"], num_jobs=1)
