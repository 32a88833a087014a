"""BROS on hand-made views: residual times, packing, exchange, the batch size."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from cosched.core.kv_state import Match
from cosched.core.plan import PreemptMode, SkipReason
from cosched.core.request import Slo
from cosched.papers.bros.config import BrosConfig
from cosched.papers.bros.offline import PATIENCE
from cosched.papers.bros.policy import BrosOptions, BrosPolicy, Pressure
from cosched.policies import POLICIES
from cosched.pool.pool import ArrivalQueue
from cosched.schedule.base import Budgets, PolicySettings
from cosched.schedule.preemption import recompute_s
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled

TTFT_S, TPOT_S = 1.0, 0.05
CAPS = make_caps(max_running_requests=512, partial_decode=True)
NAMES = [name for name in POLICIES if name.startswith("bros")]


def bros_settings(caps=CAPS, **budgets):
    slo = Slo(ttft_s=TTFT_S, tpot_s=TPOT_S)
    return PolicySettings(caps=caps, slo=slo, budgets=Budgets(**budgets))


def planned(view, state=None, *, own=None, policy=None, **options):
    if policy is None:
        policy = BrosPolicy(replace(bros_settings(view.caps), own=own), BrosOptions(**options))
    plan, after = policy.plan(view, state or policy.initial)
    validate(plan, view)
    return plan, after


def running(rid, gap_s=0.0, make=online, num_prompt_tokens=100, **fields):
    """One whose latest token came `gap_s` before time 0 and that sat out since then."""
    fields = {"first_token_s": -9.0, "last_token_s": -gap_s, **fields}
    request = decoding(make(rid, num_prompt_tokens, max_new_tokens=200, **fields), 5)
    if gap_s:
        return request
    # Its token is on its way: it has computed all tokens that it has.
    return replace(request, num_computed_tokens=request.num_computed_tokens + 1)


def runs(plan, view):
    return {r.rid for r in view.running} - plan.paused


# 1. What is late already does not stop everything.


def test_the_limit_is_the_least_time_that_can_still_be_kept():
    late, soon, calm = running("late", 2.0), running("soon", 0.03), running("calm", 0.01)
    view = FakeView(caps=CAPS, running=(late, soon, calm))
    plan, _ = planned(view)
    assert plan.limits["online"] == pytest.approx(0.02)
    # 5 ms and 0.1 ms a token: less than that cannot be met whatever is done.
    almost = running("almost", TPOT_S - 0.005)
    plan, _ = planned(replace(view, running=(almost, calm)))
    assert plan.limits["online"] == pytest.approx(0.04)


def test_where_none_can_be_kept_the_limit_is_the_tpot_target_or_what_one_takes():
    view = FakeView(caps=CAPS, running=(running("late", 2.0), running("later", 3.0)))
    plan, _ = planned(view)
    assert plan.limits["online"] == pytest.approx(TPOT_S) and not plan.paused
    waits = online("waits", 600, arrival_s=-5.0)
    plan, _ = planned(FakeView(caps=make_caps(max_chunk_tokens=None), online=(waits,)))
    assert plan.limits["online"] == pytest.approx(0.005 + 0.06) and plan.prefill == {"waits": 600}


# 2. The order of late requests.


def test_late_requests_go_first_as_printed_or_behind_those_in_time():
    late, calm = running("late", 2.0), running("calm", 0.01)
    view = FakeView(caps=CAPS, running=(calm, late))
    one = Pressure(batch_size=1)
    assert runs(planned(view, one, replaces=False)[0], view) == {"late"}
    assert runs(planned(view, one, replaces=False, late_last=True)[0], view) == {"calm"}


def test_a_late_prompt_that_fits_no_iteration_keeps_nobody_out():
    caps = make_caps(max_chunk_tokens=None, partial_decode=True)
    late, chat = online("late", 900, arrival_s=-5.0), running("chat")
    view = FakeView(caps=caps, running=(chat,), online=(late,))
    plan, after = planned(view)
    assert (plan.prefill, plan.paused) == ({}, set()) and after.batch_size == 128
    barred = FakeView(caps=caps, online=(late, online("soon", 100, arrival_s=-0.98)))
    assert planned(barred)[0].prefill, "the limit is what neither can keep"


# 3. Exchange.


def crowd(mean_iteration_s, num_offline=1):
    jobs = tuple(running(f"job{i}", make=offline) for i in range(num_offline))
    chats = (running("urgent", 0.03), running("calm", 0.001))
    return FakeView(caps=CAPS, running=(*jobs, *chats), mean_iteration_s=mean_iteration_s)


def test_where_the_batch_is_full_the_least_urgent_changes_places_with_offline_work():
    plan, _ = planned(crowd(0.01), Pressure(batch_size=2))
    assert plan.paused == {"calm"}
    plan, _ = planned(crowd(0.01), Pressure(batch_size=2), replaces=False)
    assert plan.paused == {"job0"}


def test_nobody_steps_aside_who_would_be_late_for_it():
    # Left out now and in the next iteration's batch: 49 ms less its 45, less 5.2 of this one.
    plan, _ = planned(crowd(0.045), Pressure(batch_size=2))
    assert plan.paused == {"job0"}
    # The second exchange would be at the expense of the urgent one: 20 - 15 < 5.2 ms.
    plan, _ = planned(crowd(0.015, num_offline=2), Pressure(batch_size=2))
    assert plan.paused == {"calm", "job1"}


def test_what_waits_offline_takes_a_place_with_its_whole_prompt_only():
    view = FakeView(
        caps=CAPS, running=(running("chat"),), offline=(offline("job", 200),), mean_iteration_s=0.01
    )
    plan, _ = planned(view, Pressure(batch_size=1))
    assert (plan.prefill, plan.paused) == ({"job": 200}, {"chat"})
    plan, _ = planned(
        replace(view, offline=(offline("long", 500),)), Pressure(batch_size=1)
    )  # 55 ms, and 40 are left
    assert (plan.prefill, plan.paused) == ({}, set())


# 4. Token groups.


def test_a_token_within_a_group_has_the_time_of_the_group_less_what_follows_it():
    # Five tokens and one on its way: after the first token five of a group of eight; three to come.
    view = FakeView(caps=CAPS, running=(running("chat"),), mean_iteration_s=0.03)
    assert planned(view)[0].limits["online"] == pytest.approx(TPOT_S)
    plan, _ = planned(view, own=BrosConfig(token_group=8))
    num_out = view.running[0].num_computed_tokens + 1 - 100
    num_left = 8 - (num_out - 1) % 8
    assert plan.limits["online"] == pytest.approx(8 * TPOT_S - (num_left - 1) * 0.03)


# 5. Chunks.


def test_a_prompt_is_computed_whole_where_it_fits_and_else_cut_beside_the_decodes():
    chats = tuple(running(f"chat{i}", 0.001) for i in range(10))
    caps = make_caps(max_chunk_tokens=2048, max_running_requests=512, partial_decode=True)
    long = FakeView(caps=caps, running=chats, online=(online("p", 480, arrival_s=-0.96),))
    plan, after = planned(long)  # 49 ms, of which ten decodes take one
    assert plan.prefill == {"p": 430} and not plan.paused and after.batch_size == 128
    short = FakeView(caps=caps, running=chats, online=(online("p", 300, arrival_s=-0.95),))
    plan, after = planned(short)
    assert plan.prefill == {"p": 300} and not plan.paused and after.batch_size > 128


def test_only_one_prompt_is_cut():
    waiting = tuple(online(rid, 400, arrival_s=-0.97) for rid in "abc")
    view = FakeView(caps=make_caps(max_chunk_tokens=2048, partial_decode=True), online=waiting)
    plan, _ = planned(view)
    assert plan.prefill == {"a": 400, "b": 50}


def test_chunks_to_come_shorten_the_time_of_a_prompt():
    caps = make_caps(max_chunk_tokens=512, partial_decode=True)
    view = FakeView(caps=caps, online=(online("p", 1500),), mean_iteration_s=0.1)
    assert planned(view)[0].limits["online"] == pytest.approx(TTFT_S - 2 * 0.1)


# 6. Which offline request comes first.


def test_offline_work_that_runs_comes_before_what_waits():
    jobs = tuple(running(f"job{i}", make=offline) for i in range(3))
    view = FakeView(caps=CAPS, running=jobs, offline=(offline("waits"),))
    plan, _ = planned(view, Pressure(batch_size=3))
    assert (plan.prefill, plan.paused) == ({}, set())
    plan, _ = planned(view, Pressure(batch_size=2))
    assert (plan.prefill, plan.paused) == ({}, {"job2"})


def test_of_those_that_were_stopped_the_one_with_least_to_restore_goes_first():
    fresh, far, near = (
        offline("fresh", 100),
        offline("far", 100, num_preemptions=1),
        offline("near", 100, num_preemptions=1),
    )
    view = FakeView(
        caps=CAPS,
        offline=(far, near, fresh),
        cached={
            "near": Match(cached=90, evictable=0),
            "far": Match(cached=95, evictable=0, to_load=95),
        },
    )
    one = Pressure(batch_size=1)
    plan, after = planned(view, one)
    assert list(plan.prefill) == ["near"] and after.num_passed == 1
    plan, _ = planned(replace(view, offline=(far, fresh)), one)
    assert list(plan.prefill) == ["far"]
    plan, after = planned(view, Pressure(batch_size=1, num_passed=PATIENCE))
    assert list(plan.prefill) == ["far"] and after.num_passed == 0
    plan, _ = planned(replace(view, offline=(fresh, near)), one)
    assert list(plan.prefill) == ["fresh"]


def longest_passed_over(seed):
    """Most admissions in a row that pass over who is in front, where requests come, are stopped
    halfway with some of their KV cached, and resume."""
    draw = random.Random(seed)
    caps = make_caps(max_running_requests=4)
    policy, state = BrosPolicy(bros_settings(caps)), Pressure(batch_size=1)
    pool, begun = ArrivalQueue(), []
    longest = passed = 0
    for number in range(120):
        if len(pool) < 12:
            pool.add(offline(f"r{number}", 100))
        front = next(iter(pool))
        cached = {r.rid: Match(cached=draw.randint(0, 99), evictable=0) for r in pool}
        plan, state = planned(
            FakeView(caps=caps, offline=pool, cached=cached), state, policy=policy
        )
        (rid,) = plan.prefill
        passed = 0 if rid == front.rid else passed + 1
        longest = max(longest, passed)
        begun.append(pool.remove(rid))
        while len(begun) > draw.randint(0, 5):
            request = begun.pop(draw.randrange(len(begun)))
            pool.add(replace(request, num_preemptions=request.num_preemptions + 1))
        state = msgspec.structs.replace(state, batch_size=1)
    return longest


def test_who_is_in_front_is_passed_over_as_often_as_patience_allows():
    assert max(map(longest_passed_over, range(60))) == PATIENCE


# 7. Nothing online.


def test_without_online_requests_the_iteration_is_bounded_by_the_ttft_target():
    caps = make_caps(max_chunk_tokens=8192, max_prefill_tokens=8192, max_running_requests=300)
    jobs = tuple(offline(f"job{i}", 1000) for i in range(9))
    view = FakeView(caps=caps, offline=jobs, total_kv=99_999)
    plan, after = planned(view)
    assert 2500 <= sum(plan.prefill.values()) <= 2950  # 0.3 s
    for _ in range(3):
        _, after = planned(view, after)
    assert after.batch_size == 300


# 8. Its own cost model.


# 9. Overlap.


def test_a_token_on_its_way_counts_as_come_when_the_iteration_begins():
    chat = running("chat", last_token_s=-0.04)
    assert chat.num_computed_tokens == chat.num_prompt_tokens + chat.num_output_tokens
    view = FakeView(caps=CAPS, running=(chat,), start_s=0.02)
    assert planned(view)[0].limits["online"] == pytest.approx(TPOT_S)
    view = FakeView(caps=CAPS, running=(running("held", 0.01),), start_s=0.02)
    assert planned(view)[0].limits["online"] == pytest.approx(TPOT_S - 0.03)


# 10. Engines and batches that cannot be divided.


def test_where_nobody_can_sit_out_offline_work_is_only_added():
    caps = make_caps(max_running_requests=512)
    jobs = tuple(running(f"job{i}", make=offline) for i in range(4))
    view = FakeView(
        caps=caps, running=(running("chat", 0.03), *jobs), offline=(offline("new", 500),)
    )
    plan, _ = planned(view, Pressure(batch_size=2))
    assert (plan.prefill, plan.paused) == ({}, set())
    plan, _ = planned(view)
    assert not plan.paused and 100 < plan.prefill["new"] <= 150


# 11. Memory.


def test_offline_work_is_stopped_for_an_online_request_and_none_is_admitted_while_it_waits():
    jobs = tuple(running(f"job{i}", make=offline) for i in range(3))
    view = FakeView(caps=CAPS, total_kv=1000, running=jobs, online=(online("chat", 200),))
    plan, _ = planned(view)
    assert plan.prefill == {"chat": 200} and [p.rid for p in plan.preempt] == ["job2"]
    assert {p.mode for p in plan.preempt} == {PreemptMode.KEEP_KV}
    plan, _ = planned(view, stop=PreemptMode.RECOMPUTE)
    assert {p.mode for p in plan.preempt} == {PreemptMode.RECOMPUTE}
    full = FakeView(
        caps=CAPS,
        total_kv=500,
        running=(running("a"),),
        online=(online("chat", 300),),
        offline=(offline("job", 20),),
    )
    plan, _ = planned(full)
    assert plan.prefill == {} and plan.skipped["job"] is SkipReason.MEMORY_BUDGET


# 12. An unfinished online prefill is not stopped for one that is hardly more urgent.


def computed_until_both_are_done(view, policy, rids=("a", "b"), most=100):
    """Prompt tokens computed in all, where a stop loses everything; and who was stopped."""
    num_computed, stopped, state = 0, [], policy.initial
    waits, part, now_s = {r.rid: r for r in view.online}, None, 0.0
    while (waits or part is not None) and most:
        most -= 1
        view = replace(
            view,
            online=tuple(waits.values()),
            unfinished=() if part is None else (part,),
            now_s=now_s,
            start_s=now_s,
            mean_iteration_s=0.05,
        )
        plan, state = planned(view, state, policy=policy)
        for preemption in plan.preempt:
            stopped.append(preemption.rid)
            waits[preemption.rid], part = replace(part, num_computed_tokens=0), None
        for rid, num_tokens in plan.prefill.items():
            request = part if part is not None and part.rid == rid else waits.pop(rid)
            part = None if request is part else part
            num_computed += num_tokens
            request = replace(request, num_computed_tokens=request.num_computed_tokens + num_tokens)
            if request.num_computed_tokens < request.num_prompt_tokens:
                part = request
        now_s += 0.06
    assert not waits and part is None, f"never done: {waits=} {part=}"
    return num_computed, stopped


@pytest.mark.parametrize("name", NAMES)
def test_two_prompts_that_are_equally_urgent_do_not_stop_each_other(name):
    prompts = tuple(online(rid, 4000, arrival_s=s) for rid, s in (("a", -0.001), ("b", 0.0)))
    view = FakeView(total_kv=6000, online=prompts)
    policy = POLICIES[name].make(bros_settings(view.caps))
    assert computed_until_both_are_done(view, policy) == (8000, [])


def test_an_unfinished_prompt_is_stopped_for_one_that_is_more_urgent_by_more_than_is_lost():
    unfinished = prefilled(online("unfinished", 4000, max_new_tokens=200), 2000)
    # 2,000 tokens lost of 4,100 are 4 chunks of 56 ms; 7 chunks in all are 350 ms at 50 ms each.
    view = FakeView(total_kv=4100, unfinished=(unfinished,), mean_iteration_s=0.05)
    assert view.kv.free == 2100
    lost_s = recompute_s(replace(view, evictable_kv=2100), unfinished)
    assert lost_s == pytest.approx(0.0562 * 2000 / 512)
    for free, margin_s in ((2100, 0.0), (0, lost_s)):
        tight = replace(view, evictable_kv=2100 - free)
        own_s = TTFT_S - 0.35 - margin_s
        for left_s, first in ((own_s - 0.01, "urgent"), (own_s + 0.01, "unfinished")):
            urgent = online("urgent", 500, arrival_s=left_s - TTFT_S)
            plan, _ = planned(replace(tight, online=(urgent,)))
            assert next(iter(plan.prefill)) == first, (free, left_s)


def test_an_unfinished_prompt_does_not_go_on_in_a_slot_that_another_has_taken():
    """The one slot goes to the urgent request, and the unfinished one counts as admitted too."""
    unfinished = prefilled(online("unfinished", 4000), 500)
    urgent = online("urgent", 100, arrival_s=-0.9)
    caps = make_caps(max_running_requests=2, partial_decode=True)
    view = FakeView(caps=caps, unfinished=(unfinished,), online=(urgent,), mean_iteration_s=0.01)
    assert view.free_slots == 1
    plan, _ = planned(view)
    assert plan.prefill == {"urgent": 100} and [p.rid for p in plan.preempt] == ["unfinished"]


# The batch size.


def test_the_batch_size_doubles_up_to_the_rows_and_starts_anew_after_an_early_return():
    calm = FakeView(caps=CAPS, running=(running("chat"),))
    due = tuple(running(f"r{i}", 0.0449 - 0.0001 * i) for i in range(5))
    pressed = FakeView(caps=CAPS, running=due)
    sizes, state = [], Pressure()
    for view in (calm, calm, calm, pressed, calm, pressed, pressed):
        _, state = planned(view, state)
        sizes.append(state.batch_size)
    assert sizes == [256, 512, 512, 128, 256, 128, 128]
    assert planned(pressed)[0].paused == {"r1", "r2", "r3", "r4"}


# The other names.


def test_bros_rt_runs_offline_work_only_while_nothing_is_online():
    job, waits = running("job", make=offline), offline("waits")
    view = FakeView(caps=CAPS, running=(job, running("chat")), offline=(waits,))
    plan, _ = planned(view, beside=False)
    assert (plan.prefill, plan.paused) == ({}, {"job"})
    plan, _ = planned(replace(view, running=(job,)), beside=False)
    assert (plan.prefill, plan.paused) == ({"waits": 100}, set())


def test_round_robin_takes_turns():
    policy = POLICIES["bros-rr"].make(bros_settings())
    chat, job = running("chat"), running("job", make=offline)
    view = FakeView(caps=CAPS, running=(chat, job), online=(online("a"),), offline=(offline("b"),))
    plan, state = planned(view, policy=policy)
    assert (plan.prefill, plan.paused) == ({"a": 100}, {"job"})
    plan, state = planned(view, state, policy=policy)
    assert (plan.prefill, plan.paused) == ({"b": 100}, {"chat"})
    plan, state = planned(view, state, policy=policy)
    assert plan.paused == {"job"}
    # Where the class of the turn has nothing to do the other goes on, and the turn stays.
    alone = FakeView(caps=CAPS, running=(chat,))
    plan, after = planned(alone, state, policy=policy)
    assert not plan.paused and after == state
    plan, _ = planned(FakeView(caps=CAPS), policy=policy)
    assert not plan.prefill
