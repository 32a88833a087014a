"""When requests are stopped and run again, whoever decides it; their deadlines on the way."""

from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.lab.metrics.records import read_records, write_records
from cosched.lab.metrics.slo import JctTarget
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import (
    CostSpec,
    RunSpec,
    WorkloadSpec,
    engine_flags,
    execute,
    execute_requests,
)
from cosched.lab.simulation.setting import setting_of
from cosched_traces.workload import Segment, TraceRequest
from tests.small_runs import watch_plans

TARGET = JctTarget(prompt_s=0.02, token_s=0.02)


def make_spec(name, **machine):
    """Where stock admits by a tenth of what it would take requests to need."""
    return RunSpec(
        setting=setting_of(name),
        machine=Machine(
            kv_tokens=3_000,
            chunk_tokens=512,
            max_running_requests=64,
            schedule_conservativeness=0.1,
            **machine,
        ),
        online=WorkloadSpec(name="sharegpt", rate=8.0, num_requests=24),
        cost=CostSpec(name="roofline"),
        duration_s=120.0,
        jct=TARGET,
    )


@pytest.fixture(scope="module", params=[True, False], ids=["radix cache", "none"])
def stopped(request):
    """Requests that soon need several times the memory that there is."""
    requests = [
        TraceRequest(
            rid=f"r{number}",
            request_class=RequestClass.ONLINE,
            arrival_s=0.02 * number,
            num_output_tokens=200 + 10 * number,
            max_new_tokens=1000,
            segments=(Segment(key=number, num_tokens=50),),
        )
        for number in range(48)
    ]
    return execute_requests(make_spec("s0", radix_cache=request.param), requests, [])


def test_each_stop_of_the_engine_is_noted_and_when_the_request_ran_again(stopped):
    records = stopped.records
    assert all(record.is_finished for record in records)
    assert sum(len(record.pauses) for record in records) >= 2
    starts = set(stopped.iterations.column("start_s"))
    for record in records:
        assert len(record.pauses) == record.num_preemptions
        times = [time_s for pause in record.pauses for time_s in pause]
        assert times == sorted(times) and all(again_s in starts for again_s in times[1::2])
        assert not times or record.admitted_s <= times[0] <= times[-1] <= record.finish_s
        for stopped_s, again_s in record.pauses:
            assert not [t for t in record.token_times if stopped_s < t <= again_s]


def test_pauses_are_written_and_read(stopped, tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(stopped.records, path)
    assert list(read_records(path)) == list(stopped.records)


def test_deadlines_reach_the_policy_and_are_judged(monkeypatch):
    seen = {}

    def look(policy, view, state, made):
        seen.update((r.rid, r.slo.deadline_s) for r in (*view.online, *view.running))

    watch_plans(monkeypatch, look)
    result = execute(make_spec("sarathi"))
    records = result.records
    # The server takes no target below a quarter of its own for the first token.
    limits = {r.rid: TARGET.limit_s(r.num_output_tokens) for r in records}
    assert seen == {rid: pytest.approx(max(limit, 0.25)) for rid, limit in limits.items()}
    met = sum(r.e2e_s <= limits[r.rid] for r in records)
    attainment = result.summary.online.attainment
    assert 0 < met < len(records)
    assert attainment.jct.num_met == attainment.deadline.num_met == met


def test_only_stock_scheduling_goes_without_a_radix_cache():
    spec = make_spec("sarathi", radix_cache=False)
    assert "--disable-radix-cache" in engine_flags(spec)
    assert "--disable-radix-cache" not in engine_flags(
        replace(spec, machine=replace(spec.machine, radix_cache=True))
    )
    with pytest.raises(ConfigError, match="--disable-radix-cache True cannot go with"):
        execute(spec)
