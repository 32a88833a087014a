"""Groups of equal length, and the KV of those that wait, from decisions written by hand."""

from cosched.core.plan import PreemptMode
from cosched.core.view import KvState
from cosched.decision_log.groups import read_groups
from cosched.decision_log.read import Entry
from cosched.engine.decision_records import Decision, Outcome, PlanState, Result, ViewState


def entry(running=(), unfinished=(), ran=True, **plan):
    view = ViewState(
        now_s=0.0,
        start_s=0.0,
        kv=KvState(total=1000, free=1000, evictable=0, reserved=0),
        free_slots=9,
        num_offline=0,
        running=list(running),
        unfinished=list(unfinished),
    )
    outcome = Outcome.RAN if ran else Outcome.REPLANNED
    return Entry(
        header=None,
        decision=Decision(
            number=0,
            view=view,
            plan=PlanState(**plan),
            result=Result(outcome=outcome, planning_s=0.0),
        ),
        facts={},
        calibrator=None,
    )


def test_groups_are_those_that_one_plan_promises_equally_many_blocks():
    groups = read_groups(
        [
            # Prompts: nothing is promised to them yet. A plan that was dropped counts for nothing.
            entry(promised=[(1, 64)], ran=False),
            entry(promised=[(1, 0), (2, 0)]),
            entry(running=[(n, 1, 100 * n) for n in range(1, 5)], promised=[(1, 33), (2, 20)]),
            entry(running=[(n, 2, 100 * n) for n in range(1, 5)], promised=[(3, 60), (4, 40)]),
            # More for one that runs is no group; nor is the end of a promise.
            entry(running=[(3, 30, 330)], promised=[(3, 90), (4, 0)]),
            entry(running=[(3, 91, 390)], promised=[(3, 120)]),
        ],
        block_tokens=32,
    )
    assert groups.sizes == [2, 2, 1]


def test_what_waits_is_counted_once_with_the_memory_it_has():
    groups = read_groups(
        [
            entry(running=[(1, 1, 101), (2, 40, 240)], held=[1, 2]),
            entry(running=[(1, 1, 101), (2, 40, 240)], held=[1, 2]),
            entry(running=[(1, 2, 102)], unfinished=[(3, 0, 512)]),
            entry(running=[(1, 9, 109)], preempted=[(1, PreemptMode.KEEP_KV)]),
        ],
        block_tokens=32,
    )
    assert groups.occupied_new == [101]
    assert groups.occupied_stopped == [240, 109]
    assert groups.occupied_chunk == [512]
