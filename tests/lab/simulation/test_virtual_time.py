"""SGLang's scheduler under the virtual clock."""

import os
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from cosched.config import ENV_VAR
from cosched.core.request import Slo
from cosched.errors import ConfigError
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import execute, load_requests
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from tests.simulated import bytes_of, lengths, make_spec, offline, online


def documents(count):
    return WorkloadSpec(name="bros-offline", num_requests=count)


@pytest.mark.parametrize("name", ["priority", "sarathi", "hygen"])
def test_no_policy_sees_how_long_a_reply_will_be(name, tmp_path):
    """Until the first reply ends, lengths make no difference; clients that know them tell the
    scheduler."""
    short, long = (
        make_spec(name, online=None, offline=lengths(tmp_path / f"{n}.csv", [n] * 60))
        for n in (40, 400)
    )

    def plans_until_the_first_end(**changes):
        results = [execute(replace(spec, **changes)) for spec in (short, long)]
        end_s = min(r.finish_s for run in results for r in run.records if r.is_finished)
        plans = []
        for run in results:
            rows = run.iterations
            columns = [rows.column(c) for c in ("start_s", "duration_s", "num_offline_decodes")]
            plans.append([row for row in zip(*columns, strict=True) if row[0] < end_s])
        return plans

    first, second = plans_until_the_first_end()
    assert first == second and len(first) > 5
    first, second = plans_until_the_first_end(clairvoyant=True)
    assert first != second


@pytest.mark.parametrize(
    ("name", "overlap"), [("s1", True), ("priority", False), ("hygen", True), ("bros", False)]
)
def test_two_runs_give_the_same_bytes_however_slow_the_host_is(monkeypatch, name, overlap):
    """Policies that predict times must learn and plan with virtual ones only."""
    from cosched.engine.controller import Controller
    from cosched.lab.simulation.virtual import VirtualEngine

    spec = make_spec(name, duration_s=2.0, machine={"overlap": overlap})
    fast = execute(spec)
    assert len(fast.records) > 60
    draw = random.Random(0)
    num_slowed = Counter()

    def slowed(owner, method):
        original = getattr(owner, method)

        def wait_and_call(*args, **kwargs):
            num_slowed[method] += 1
            time.sleep(draw.choice((0.0, 0.001, 0.004)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, wait_and_call)

    slowed(VirtualEngine, "_forward")
    slowed(Controller, "plan")
    slow = execute(spec)
    assert num_slowed["_forward"] >= len(slow.iterations) > 0
    assert (num_slowed["plan"] > 0) == (name not in ("s1", "priority"))
    assert bytes_of(slow) == bytes_of(fast)


@pytest.mark.parametrize(("name", "overlap"), [("cosched", True), ("hygen", False)])
def test_what_requests_cost_adds_up_to_the_busy_time(monkeypatch, name, overlap):
    from cosched.predict.cost_account import Account

    charged, charge = {}, Account.charge

    def note(account, requests, shape, seconds):
        charge(account, requests, shape, seconds)
        charged.update({request.rid: request for request in requests})

    monkeypatch.setattr(Account, "charge", note)
    result = execute(make_spec(name, duration_s=2.0, machine={"overlap": overlap}))
    busy_s = result.iterations.column("duration_s").sum()
    assert sum(r.device_s for r in charged.values()) == pytest.approx(busy_s, rel=1e-9)
    assert {r.rid for r in result.records if r.num_output_tokens} <= charged.keys()


@pytest.mark.parametrize("name", ["cosched", pytest.param("hygen", marks=pytest.mark.long)])
def test_requests_that_come_during_an_iteration_are_looked_for_before_it_ends(name):
    """Planned ahead, a request waits for the iteration that is under way and for the next."""

    def waits_of(**config):
        chat = WorkloadSpec(name="alpaca", rate=3.0)
        job = replace(documents(300), client="all")
        spec = make_spec(name, duration_s=9.0, online=chat, offline=job)
        result = execute(replace(spec, config=tuple(config.items())))
        rows = result.iterations
        starts = rows.column("start_s")
        later = [r for r in online(result) if r.arrival_s > 2.0 and r.admitted_s is not None]
        assert len(later) > 12
        return [sum(r.arrival_s < s <= r.admitted_s for s in starts) for r in later], rows

    late, rows = waits_of()
    early, rows_early = waits_of(plan_early=True)
    assert min(early) >= 2
    assert late.count(1) > len(late) / 5, "not few, where iterations are short"
    busy = sum(rows.column("duration_s")) / sum(rows_early.column("duration_s"))
    assert 0.97 < busy < 1.03


def test_every_request_is_answered_in_full_when_time_suffices():
    chat = WorkloadSpec(name="alpaca", rate=2.0)
    result = execute(make_spec("sarathi", duration_s=120.0, online=chat, offline=documents(40)))
    done = offline(result)
    assert len(done) == 40 and all(r.is_finished for r in done)
    assert result.end_s < 120.0, "the run ends with its offline set"
    for record in result.records:
        if record.is_finished:
            times = list(record.token_times)
            assert len(times) == record.num_output_tokens > 0
            assert record.arrival_s <= record.admitted_s < times[0]
            assert times == sorted(times)


def test_iterations_fill_time_without_overlapping():
    rows = execute(make_spec("sarathi")).iterations
    starts, ends = rows.column("start_s"), rows.end_s
    assert (starts[1:] >= ends[:-1] - 1e-9).all(), "one GPU runs one iteration at a time"
    kv = sum(rows.column(f"kv_{use}_tokens") for use in ("online", "offline", "cached", "free"))
    assert (kv == 20_000).all()


def test_memory_of_requests_that_skip_an_iteration_is_of_their_class():
    """Stock prefills while no request decodes: the running ones are not in that batch."""
    rows = execute(make_spec("s0")).iterations
    prefills = rows.column("num_online_prefills") > 0
    assert prefills.any() and (rows.column("kv_online_tokens")[prefills] > 0).all()
    assert not rows.column("kv_offline_tokens").any()


def test_idle_time_is_skipped():
    spec = make_spec("s0", online=WorkloadSpec(name="alpaca", rate=0.02), duration_s=1800.0)
    result = execute(spec)
    assert len(online(result)) > 15
    assert result.wall_s < 60, "half an hour with a request every 50 s"
    assert all(r.ttft_s < 0.5 for r in online(result) if r.is_finished)


def test_a_running_batch_that_ends_all_at_once_is_no_hang():
    """Equal lengths: every request of a batch ends in the same iteration, and only then is there
    room for the next ones."""
    spec = make_spec(
        "offline-fcfs",
        machine={"max_running_requests": 4, "overlap": True},
        duration_s=600.0,
        online=None,
        offline=WorkloadSpec(name="mmlu-like", num_requests=40),
    )
    result = execute(spec)
    assert len(offline(result)) == 40 and all(r.is_finished for r in offline(result))
    gaps = result.iterations.column("start_s")[1:] - result.iterations.end_s[:-1]
    assert gaps.max() < 1e-6, "the GPU never waits while requests do"


def test_hygen_attains_what_online_requests_alone_do_and_gets_offline_work_done():
    slo, chat = Slo(ttft_s=0.3, tpot_s=0.02), WorkloadSpec(name="alpaca", rate=14.0)
    online_only, planned, uncontrolled = (
        execute(make_spec(name, slo=slo, duration_s=8.0, online=chat))
        for name in ("s0", "hygen", "s1")
    )
    alone, attained, lost = (
        run.summary.online.attainment.joint.ratio for run in (online_only, planned, uncontrolled)
    )
    assert len(online(online_only)) > 80
    assert attained >= alone - 0.01
    assert lost < alone - 0.1, "the offline work is enough to hurt"
    assert planned.summary.offline.num_finished > 10


@pytest.mark.parametrize(("mode", "is_told"), [("oracle", True), ("histogram", False)])
def test_only_an_oracle_is_told_how_long_responses_get(mode, is_told, monkeypatch):
    from cosched.engine.reply_lengths import ReplyLengths
    from cosched.wire import hint_of_params

    hints = []

    def ended(self, tracked):
        hint = hint_of_params(tracked.req.sampling_params.custom_params)
        hints.append((hint, tracked.num_output_tokens))

    monkeypatch.setattr(ReplyLengths, "ended", ended)
    execute(make_spec("sarathi").configured(length={"mode": mode}))
    assert len(hints) > 5
    assert all(hint == (length if is_told else None) for hint, length in hints)


@pytest.mark.parametrize("name", ["s1", "priority"])
def test_a_run_gives_up_as_soon_as_too_many_missed(name):
    chat, slo = WorkloadSpec(name="alpaca", rate=6.0), Slo(ttft_s=1.0, tpot_s=0.005)
    spec = make_spec(name, online=chat, offline=documents(100), slo=slo, duration_s=12.0)
    whole = execute(spec)
    num_missed = whole.summary.online.attainment.joint.num_missed
    assert num_missed > 5
    early = execute(replace(spec, most_misses=4))
    assert early.gave_up and early.end_s < whole.end_s
    assert early.summary.online.attainment.joint.num_missed >= 5
    same = execute(replace(spec, most_misses=num_missed))
    assert not same.gave_up and same.records == whole.records


def test_a_job_that_ends_is_held_against_the_bound_beside_its_chat():
    spec = make_spec("hygen", duration_s=60.0, offline=documents(120))
    job = execute(spec).summary.job
    assert job.num_finished == 120
    assert 0.6 < job.work_per_s / job.bound_per_s == job.bound_ratio <= 1.02
    assert job.bound_per_s < 1
    assert job.least_makespan_s < job.makespan_s < 60
    alone = execute(replace(spec, setting=setting_of("offline-fcfs"))).summary.job
    assert alone.work_s == pytest.approx(job.work_s)
    assert 0.6 < alone.work_per_s <= 1.02
    assert alone.bound_per_s == pytest.approx(1, rel=0.01)


def test_a_run_leaves_the_configuration_of_the_process_as_it_was(monkeypatch):
    monkeypatch.delenv(ENV_VAR, raising=False)
    assert execute(make_spec("hygen", duration_s=1.0)).cosched["policy"] == "hygen"
    assert ENV_VAR not in os.environ


def test_one_workload_may_be_both_online_and_offline():
    one = WorkloadSpec(name="azure-like", num_requests=20)
    spec = RunSpec(setting=setting_of("hygen"), online=one, offline=one, duration_s=600.0)
    both = load_requests(spec)
    rids = [request.rid for requests in both for request in requests]
    assert all(both) and len(set(rids)) == len(rids)


def test_the_online_workload_is_replayed_faster_at_the_rate_that_is_asked_for():
    def arrivals(duration_s, **changes):
        chat = WorkloadSpec(name="azure-like", **changes)
        spec = RunSpec(setting=setting_of("s0"), online=chat, duration_s=duration_s)
        return [request.arrival_s for request in load_requests(spec)[0]]

    fast = arrivals(200.0, rate=8.0, faster=4.0)
    assert 8.0 * 200 * 0.9 < len(fast) < 8.0 * 200 * 1.1
    assert fast[-1] <= 200.0
    assert fast == [arrival_s / 4 for arrival_s in arrivals(800.0, rate=2.0)]


def test_memory_is_whole_pages_and_one_at_least():
    assert Machine(kv_tokens=1000, page_size=64).capacity() == 960
    with pytest.raises(ConfigError, match="less than one page"):
        Machine(kv_tokens=10, page_size=64).capacity()
