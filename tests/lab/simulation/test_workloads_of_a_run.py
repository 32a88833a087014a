"""The requests of a run, from its workloads."""

from dataclasses import replace

from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of


def test_one_workload_may_be_both_online_and_offline():
    one = WorkloadSpec(name="azure-like", num_requests=20)
    spec = RunSpec(setting=setting_of("hygen"), online=one, offline=one, duration_s=600.0)
    online, offline = load_requests(spec)
    rids = [request.rid for request in (*online, *offline)]
    assert online and offline and len(set(rids)) == len(rids)


def test_the_online_workload_is_replayed_faster_at_the_rate_that_is_asked_for():
    spec = RunSpec(
        setting=setting_of("s0"),
        online=WorkloadSpec(name="azure-like", rate=8.0, faster=4.0),
        duration_s=200.0,
    )
    online, _ = load_requests(spec)
    assert 8.0 * 200 * 0.9 < len(online) < 8.0 * 200 * 1.1
    assert online[-1].arrival_s <= 200.0
    slow = replace(spec, online=WorkloadSpec(name="azure-like", rate=2.0), duration_s=800.0)
    assert [r.arrival_s for r in online] == [r.arrival_s / 4 for r in load_requests(slow)[0]]
