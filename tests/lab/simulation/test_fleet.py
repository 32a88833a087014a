"""Replicas that share chats and a store of batches, in virtual time."""

from __future__ import annotations

import math

import pytest

from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.lab.simulation.fleet_spec import FleetSpec, Life, dispatched
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.run_spec import WorkloadSpec
from cosched_traces.workload import TraceRequest
from tests.simulated import make_spec, offline, online


def chat(rid, at_s, session=None):
    return TraceRequest(
        rid=rid,
        request_class=RequestClass.ONLINE,
        arrival_s=at_s,
        token_ids=range(8),
        num_output_tokens=4,
        session=session,
    )


def test_a_replica_that_comes_back_is_another_one():
    lives = FleetSpec(replicas=2, absent="1@20-40 1@60", notice_s=5).lives()
    assert lives == [
        Life(name="replica-0", start_s=0.0),
        Life(name="replica-1", start_s=0.0, closed_s=15.0, end_s=20.0),
        Life(name="replica-1-1", start_s=40.0, closed_s=55.0, end_s=60.0),
    ]
    assert FleetSpec(replicas=1, absent="0@0-7").lives() == [Life(name="replica-0", start_s=7.0)]


@pytest.mark.parametrize(
    ("absent", "wrong"),
    [("1", "REPLICA@FROM"), ("2@5", "replicas are 0 to 1"), ("1@5-3", "ends before it begins")],
)
def test_wrong_absences_are_named(absent, wrong):
    with pytest.raises(ConfigError, match=wrong):
        FleetSpec(replicas=2, absent=absent).lives()


def test_chats_go_in_turn_to_replicas_that_are_open_and_sessions_stay():
    lives = FleetSpec(replicas=2, absent="1@20-40", notice_s=5).lives()
    times = {"a": 1.0, "b": 2.0, "c": 16.0, "d": 17.0, "e": 41.0, "f": 42.0}
    found = dispatched([chat(rid, at_s) for rid, at_s in times.items()], lives)
    by_life = {name: [request.rid for request in some] for name, some in found.items()}
    assert by_life == {"replica-0": ["a", "c", "d", "e"], "replica-1": ["b"], "replica-1-1": ["f"]}
    turns = [chat(f"{n}", float(n), session="one") for n in range(3)]
    assert [len(some) for some in dispatched(turns, lives).values()] == [3, 0, 0]
    gone = FleetSpec(replicas=1, absent="0@3").lives()
    with pytest.raises(ConfigError, match="no replica takes requests at 4 s"):
        dispatched([chat("late", 4.0)], gone)


def test_lines_of_a_killed_replica_are_answered_by_the_other():
    spec = make_spec(
        "cosched",
        offline=WorkloadSpec(name="bros-offline", num_requests=40),
        fleet=FleetSpec(replicas=2, absent="1@1"),
        duration_s=60.0,
        config=(("batches", {"lease_s": 2.0}),),
    )
    ((_, result),) = execute_all([spec], num_jobs=1)
    lines = offline(result)
    assert len({line.rid for line in lines}) == len(lines) == 40
    assert all(line.is_finished and line.ok for line in lines)
    lost = [one for one in online(result) if not one.is_finished and one.arrival_s < 1.0]
    assert lost, "chats of the killed replica have no answer"
    assert max(line.finish_s for line in lines) <= result.end_s < 60.0
    assert math.isclose(result.summary.job.makespan_s, max(line.finish_s for line in lines))


def test_a_fleet_has_no_ranks_and_no_stock_scheduling():
    fleet = FleetSpec(replicas=2)
    for spec, wrong in (
        (make_spec("cosched", machine={"dp_ranks": 2}, fleet=fleet), "exclude each other"),
        (make_spec("s1", fleet=fleet), "a policy with batches"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            list(execute_all([spec], num_jobs=1))
