"""The operator's hand on offline work: pause, limits, a cap, letting go, on real schedulers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.view import OfflineLimits
from cosched.engine.offline_gate import (
    HOLD,
    LET_GO,
    adapter_to_message,
    limits_from_message,
    limits_to_message,
)
from cosched.engine.read_state import state_of
from tests.crossed import crossed
from tests.engine.conftest import assert_drained, prompt, without_model

POLICIES = ["sarathi", "hygen", "echo-bs+e+s"]


def send_limits(engine, **limits):
    from sglang.srt.managers.io_struct import SetInternalStateReq

    engine.send(SetInternalStateReq(server_args=limits_to_message(OfflineLimits(**limits))))


def let_go(engine):
    from sglang.srt.managers.io_struct import SetInternalStateReq

    engine.send(SetInternalStateReq(server_args={LET_GO: 1}))


def submit_offline(engine, count, *, tokens=30, length=40):
    for i in range(count):
        rid = f"off{i}"
        engine.submit(rid, prompt(100 + i, length), max_new_tokens=tokens, priority=-1)


def running_offline(engine):
    return state_of(engine.scheduler.cosched).num_running_offline


@pytest.mark.parametrize(
    "limits",
    [
        OfflineLimits(),
        OfflineLimits(paused=True),
        OfflineLimits(max_running=0, stop_running=True),
        OfflineLimits(paused=True, max_running=7),
    ],
)
def test_limits_travel_as_numbers(limits):
    message = limits_to_message(limits)
    assert all(isinstance(value, int) for value in message.values())
    assert limits_from_message(message) == limits


@crossed(policy=POLICIES, overlap=[False, True])
def test_a_paused_pool_admits_nobody_and_chat_goes_on(make_engine, policy, overlap):
    engine = make_engine(policy=policy, overlap=overlap)
    send_limits(engine, paused=True)
    submit_offline(engine, 6)
    engine.submit("chat", prompt(1, 50), max_new_tokens=8, priority=0)
    engine.run_until_idle(max_iterations=500)  # idle: what is paused is no work
    assert len(engine.replies["chat"].output_ids) == 8
    assert set(engine.replies) == {"chat"}
    assert len(engine.scheduler.waiting_queue) == 6
    num_plans = engine.scheduler.cosched.counters.num_plans
    count = iter(range(50))
    engine.run(lambda: next(count) == 49)
    assert engine.scheduler.cosched.counters.num_plans == num_plans, "nothing to plan"
    assert engine.scheduler.flush_cache()
    send_limits(engine, paused=False)
    engine.run_until_idle(max_iterations=2000)
    assert all(len(engine.replies[f"off{i}"].output_ids) == 30 for i in range(6))
    assert_drained(engine)


@crossed(policy=POLICIES, stop_running=[False, True])
def test_no_more_run_than_the_limit_says(make_engine, policy, stop_running):
    engine = without_model(make_engine(policy=policy, overlap=True))
    submit_offline(engine, 8)
    seen, stopped, waiting = [], [], []

    def watch(iteration):
        stopped.append(engine.scheduler.cosched.counters.num_preemptions)
        if iteration == 12:
            assert running_offline(engine) > 2, "the limit shall have something to do"
            waiting.append(len(engine.scheduler.waiting_queue))
            send_limits(engine, max_running=2, stop_running=stop_running)
        seen.append(running_offline(engine))

    engine.run_until_idle(on_iteration=watch, max_iterations=5000)
    assert all(len(engine.replies[f"off{i}"].output_ids) == 30 for i in range(8))
    limited = seen[12:]
    settled = next(i for i, count in enumerate(limited) if count <= 2)
    # Where all of them ran by then, on a slow machine, and may end, nobody comes after them.
    assert max(limited[settled:]) == 2 or (waiting == [0] and not stop_running)
    assert max(limited[settled:]) <= 2
    if stop_running:
        assert settled <= 4
        assert stopped[-1] > stopped[12]
    assert_drained(engine)


def test_a_full_pool_answers_429_and_takes_stopped_requests_back(make_engine):
    engine = make_engine(policy="hygen", max_running_requests=4, config={"max_offline_waiting": 3})
    send_limits(engine, paused=True)
    submit_offline(engine, 5)
    engine.submit("chat", prompt(1, 50), max_new_tokens=4, priority=0)
    engine.run_until_idle(max_iterations=200)
    refused = {rid for rid, reply in engine.replies.items() if reply.finish_reason == "abort"}
    assert refused == {"off3", "off4"}
    assert "--cosched-max-offline-waiting" in engine.replies["off3"].message
    assert engine.scheduler.cosched_offline.num_turned_away == 2
    send_limits(engine)

    def stop_all(iteration):
        if iteration == 8:
            assert running_offline(engine) == 3
            for i in range(10, 13):  # fills the pool again
                engine.submit(f"off{i}", prompt(i, 40), max_new_tokens=5, priority=-1)
        if iteration == 10:
            send_limits(engine, max_running=1, stop_running=True)

    engine.run_until_idle(on_iteration=stop_all, max_iterations=2000)
    assert engine.scheduler.cosched.counters.num_preemptions >= 2
    assert all(len(engine.replies[f"off{i}"].output_ids) == 30 for i in range(3))
    assert all(len(engine.replies[f"off{i}"].output_ids) == 5 for i in range(10, 13))


@crossed(policy=["sglang", "priority", *POLICIES], overlap=[False, True])
def test_letting_go_ends_all_offline_work_and_no_chat(make_engine, policy, overlap):
    switches = ["--enable-priority-scheduling"] if policy == "priority" else []
    engine = make_engine(policy=policy, overlap=overlap, switches=switches)
    submit_offline(engine, 20, length=150)
    engine.submit("chat", prompt(1, 50), max_new_tokens=40, priority=0)

    def watch(iteration):
        if iteration == 15:
            let_go(engine)
        if iteration == 20:
            engine.submit("late", prompt(3, 40), max_new_tokens=5, priority=-1)

    engine.run_until_idle(on_iteration=watch, max_iterations=2000)
    assert len(engine.replies["chat"].output_ids) == 40
    assert engine.replies["chat"].finish_reason == "length"
    rest = {rid: reply for rid, reply in engine.replies.items() if rid != "chat"}
    assert len(rest) == 21
    aborted = [reply for reply in rest.values() if reply.finish_reason == "abort"]
    assert len(aborted) >= 15
    assert {reply.finish_reason for reply in rest.values()} <= {"abort", "length"}
    assert "shutting down" in engine.replies["late"].message
    assert engine.scheduler.is_fully_idle() and len(engine.scheduler.waiting_queue) == 0
    if policy in POLICIES:
        assert_drained(engine)


@pytest.mark.parametrize("is_paused", [False, True])
def test_while_an_operation_waits_no_offline_request_begins_and_the_begun_ones_end(
    make_engine, is_paused
):
    engine = make_engine(policy="hygen", max_running_requests=4)
    gate = engine.scheduler.cosched_offline
    submit_offline(engine, 8)

    def begin(iteration):
        if iteration == 12:
            assert running_offline(engine) == 4
            assert gate.set({HOLD: 1}) is False, "four have begun"
            send_limits(engine, paused=is_paused)  # the operator's order does not end it

    engine.run_until_idle(on_iteration=begin, max_iterations=2000)
    assert len(engine.replies) == len(engine.scheduler.waiting_queue) == 4
    assert gate.set({HOLD: 1}) is True
    assert engine.scheduler.flush_cache(), "what waits in the pool is no work"
    gate.set({HOLD: 0})
    engine.run_until_idle(max_iterations=2000)
    assert len(engine.replies) == (4 if is_paused else 8)


def test_waiting_offline_requests_let_go_of_an_adapter_and_no_others(make_engine):
    engine = make_engine(policy="hygen")
    send_limits(engine, paused=True)
    submit_offline(engine, 3)
    engine.run_until_idle(max_iterations=100)
    for req, lora_id in zip(list(engine.scheduler.waiting_queue), "aba", strict=True):
        req.cosched.traits = replace(req.cosched.traits, adapter=lora_id)
    assert engine.scheduler.cosched_offline.set(adapter_to_message("a"))
    engine.run_until_idle(max_iterations=100)
    assert {rid: reply.finish_reason for rid, reply in engine.replies.items()} == {
        "off0": "abort",
        "off2": "abort",
    }
    assert "adapter of this request is being unloaded" in engine.replies["off0"].message


def test_limits_are_refused_where_sglang_schedules(make_engine):
    engine = make_engine(policy="sglang")
    gate = engine.scheduler.cosched_offline
    assert not gate.set(limits_to_message(OfflineLimits(paused=True)))
    assert not gate.set({HOLD: 1}), "operations wait for every request, as in SGLang"


def test_a_setting_of_sglangs_still_is_sglangs(make_engine):
    from sglang.srt.managers.io_struct import SetInternalStateReq

    scheduler = make_engine(policy="hygen").scheduler
    good = SetInternalStateReq(server_args={"pp_max_micro_batch_size": 4})
    assert scheduler.set_internal_state(good).updated
    unknown = SetInternalStateReq(server_args={"cosched_offline_paused": 1})
    assert not scheduler.set_internal_state(unknown).updated
