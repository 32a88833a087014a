"""The default policy on hand-made views."""

from array import array
from dataclasses import replace

import pytest

from cosched.core.estimates import LengthEstimate
from cosched.core.kv_state import Match
from cosched.core.plan import EMPTY_PLAN, SkipReason
from cosched.core.request import Slo, Traits
from cosched.core.view import ToleranceHeadroom as Headroom
from cosched.core.view import TpotHeadroom
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.schedule.base import Budgets, PolicySettings
from cosched.schedule.cosched import GAPS, CoschedOptions, CoschedPolicy, LateTurn, Past
from cosched.schedule.online_order import LATE_TURN
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online, prefilled
from tests.schedule.limits import seconds_of

TTFT_S, TPOT_S = 1.0, 0.05
SLO = Slo(ttft_s=TTFT_S, tpot_s=TPOT_S)
CAPS = make_caps(partial_decode=True, promises=True, max_chunk_tokens=4096, max_prefill_tokens=8192)
BUDGETS = Budgets(aim=1.0, ttft_aim=1.0, burst=2.0, idle_share=0.3)


def planned(view, state=None, *, predictor=None, slo=SLO, **options):
    settings = PolicySettings(caps=view.caps, slo=slo, budgets=BUDGETS)
    # What the deadlines allow; `test_chat_pace` is about shorter iterations.
    policy = CoschedPolicy(settings, CoschedOptions(**{"paced": False, **options}))
    view = replace(view, predictor=predictor or Linear())
    plan, after = policy.plan(view, state or policy.initial)
    validate(plan, view)
    return plan, after


def view_of(*, now_s=10.0, **fields):
    return FakeView(**{"caps": CAPS, "now_s": now_s, "start_s": now_s, "total_kv": 50_000} | fields)


def chat(rid, num_tokens=500, *, age_s=0.1, seq=0, **fields):
    return online(rid, num_tokens, arrival_s=10.0 - age_s, arrival_seq=seq, **fields)


def replying(rid="run", *, num_tokens=2, ago_s=0.05, **fields):
    """Decodes; its first token came `ago_s` ago."""
    request = online(rid, 100, max_new_tokens=200, arrival_s=9.0, **fields)
    return replace(decoding(request, num_tokens), first_token_s=10.0 - ago_s)


def test_those_who_can_be_in_time_come_before_those_who_cannot():
    queue = [chat(f"late{i}", 3000, age_s=3.0 - i / 10, seq=i) for i in range(5)]
    queue += [chat(f"due{i}", 400, seq=10 + i) for i in range(3)]
    plan, _ = planned(view_of(online=queue))
    assert [*plan.prefill][:3] == ["due0", "due1", "due2"]
    plan, _ = planned(view_of(online=queue), feasible=False)
    assert next(iter(plan.prefill)) == "late0", "cosched-fcfs"


def test_a_prompt_that_cannot_run_does_not_block_an_idle_engine():
    """It is longer than a chunk and cannot be cut."""
    stuck = chat("stuck", 5000, traits=Traits(can_cut=False), seq=1)
    plan, _ = planned(view_of(online=[stuck, chat("late", 50, age_s=3.0)]))
    assert [*plan.prefill] == ["late"]


def test_one_of_so_many_is_late_until_it_has_its_first_token():
    late = chat("late", 6000, age_s=3.0)
    queue = [
        late,
        *(chat(f"due{i}", 4200 // (LATE_TURN - 1), seq=1 + i) for i in range(LATE_TURN - 1)),
    ]
    plan, state = planned(view_of(online=queue))
    begun = [rid for rid in plan.prefill if rid.startswith("due")]
    assert state.turns == (LateTurn(len(begun)),) and len(begun) == LATE_TURN - 1
    more = [late, chat("new", 100, seq=99)]
    plan, state = planned(view_of(online=more), state)
    assert next(iter(plan.prefill)) == "late" and state.turns == (LateTurn(0, "late"),)
    going = view_of(unfinished=(prefilled(late, 3000),), online=more[1:])
    plan, state = planned(going, state)
    assert "late" in plan.prefill and state.turns[0].rid == "late"
    plan, state = planned(view_of(online=more[1:]), state)
    assert state.turns[0].rid == ""


@pytest.mark.parametrize(
    ("waited", "num_due"),
    [
        (1.1, LATE_TURN - 1),
        (BUDGETS.late_bound / 2, LATE_TURN // 2),
        (BUDGETS.late_bound, 0),
    ],
)
def test_late_requests_are_served_more_often_the_longer_the_oldest_waits(waited, num_due):
    """num_due: requests that are served before it."""
    queue = [chat("late", age_s=waited * TTFT_S), chat("due", 4000, seq=1)]
    for num_before in range(LATE_TURN):
        plan, _ = planned(view_of(online=queue), Past(turns=(LateTurn(num_before),)))
        assert next(iter(plan.prefill)) == ("due" if num_before < num_due else "late")


def test_an_unfinished_prefill_that_is_late_makes_way_and_goes_on_where_nobody_is_due():
    late = prefilled(chat("late", 9000, age_s=3.0), 4000)
    plan, _ = planned(view_of(unfinished=(late,), online=[chat("due", seq=1)]))
    assert [*plan.prefill] == ["due"] and [p.rid for p in plan.preempt] == ["late"]
    plan, _ = planned(view_of(unfinished=(late,), online=[chat("more", age_s=2.0, seq=1)]))
    assert "late" in plan.prefill and not plan.preempt


def test_late_prefills_do_not_make_decodes_late():
    view = view_of(running=(replying(),), online=[chat("late", 4000, age_s=3.0)])
    plan, _ = planned(view)
    assert plan.prefill and seconds_of(plan, view) <= TPOT_S + 1e-9
    plan, _ = planned(view, feasible=False)
    assert seconds_of(plan, view) <= GAPS * TPOT_S + 1e-9


def test_a_decode_waits_for_a_first_token_where_it_can_win_that_back():
    """4,000 tokens take 0.4 s, 0.42 are left; at the pace of the decodes they would take 0.45."""
    new = chat("new", 4000, age_s=0.58)

    def longest_s(*running, online=(new,)):
        view = view_of(running=running, online=online)
        return seconds_of(planned(view)[0], view)

    many = [replying(f"r{i}", num_tokens=195) for i in range(3)]
    ending = [replace(r, first_token_s=10.0 - 195 * TPOT_S) for r in many]
    lasting = [replying(f"r{i}") for i in range(3)]
    assert longest_s(*lasting) > 1.5 * TPOT_S
    assert longest_s(*ending) <= TPOT_S + 1e-9, "five more tokens: three late for one"
    late = chat("late", 10, age_s=3.0, seq=-1)
    assert longest_s(*lasting, online=(late, new)) <= TPOT_S + 1e-9


def test_who_cannot_keep_its_tpot_any_more_holds_nobody_up():
    lost = replying("lost", num_tokens=2, ago_s=60.0)
    view = view_of(
        running=(lost, replying("run", num_tokens=30, ago_s=0.1)),
        offline=[offline("off", 3000)],
        mean_iteration_s=0.02,
    )
    plan, _ = planned(view)
    assert "off" in plan.prefill
    plan, _ = planned(view, feasible=False)
    assert "off" not in plan.prefill


def test_prompts_are_not_cut_where_no_reply_can_keep_its_tpot():
    """Decodes alone take 60 ms, and three tokens ahead of a target of 50 ms last for 15 more."""
    running = tuple(replying(f"run{i}", num_tokens=3) for i in range(3))
    view = view_of(running=running, online=[chat("new", 4000)], mean_iteration_s=0.06)
    plan, _ = planned(view, predictor=Linear(fixed_s=1.2 * TPOT_S))
    assert plan.prefill == {"new": 4000}
    ending = replying("ending", num_tokens=198, ago_s=196 * TPOT_S)
    for predictor, runs in ((Linear(fixed_s=1.2 * TPOT_S), ending), (Linear(), running[0])):
        beside = replace(view, running=(runs, *running[1:]))
        plan, _ = planned(beside, predictor=predictor)
        assert seconds_of(plan, replace(beside, predictor=predictor)) <= GAPS * TPOT_S + 1e-9


@pytest.mark.parametrize("alone_share", [0.7, 0.9, 0.98])
def test_decodes_that_are_behind_catch_up_beside_prompts(alone_share):
    """However near to the target the decodes alone are, a few of the prompt's tokens are computed
    and the iteration takes less than the target."""
    running = tuple(replying(f"run{i}", num_tokens=20, ago_s=20 * TPOT_S + 0.001) for i in range(3))
    late = chat("late", 4000, age_s=3.0)
    view = view_of(running=running, online=[late], mean_iteration_s=TPOT_S)
    predictor = Linear(fixed_s=alone_share * TPOT_S)
    plan, _ = planned(view, predictor=predictor)
    assert plan.prefill
    assert seconds_of(plan, replace(view, predictor=predictor)) < TPOT_S


def test_offline_work_that_fills_iterations_is_no_reason_to_give_a_decode_up():
    behind = replying("behind", num_tokens=30, ago_s=29 * TPOT_S + 0.5)
    # Iterations of late were as long as the target allows: with offline work in them.
    view = view_of(running=(behind,), offline=[offline("off", 3000)], mean_iteration_s=0.049)
    plan, _ = planned(view)
    assert "off" not in plan.prefill


@pytest.mark.parametrize(
    "rest", [{"online": [chat("new", 4000)]}, {"offline": [offline("o", 4000)]}]
)
def test_a_reader_sees_no_stall_however_much_time_was_saved(rest):
    """Sixty tokens came at once: three seconds of slack."""
    view = view_of(running=(replying(num_tokens=60),), **rest)
    budgets = Budgets(aim=1.0, ttft_aim=1.0, burst=10.0, idle_share=0.3)
    for is_capped in (True, False):
        settings = PolicySettings(caps=CAPS, slo=SLO, budgets=budgets)
        policy = CoschedPolicy(settings, CoschedOptions(gap_cap=is_capped, paced=False))
        plan, _ = policy.plan(replace(view, predictor=Linear()), policy.initial)
        assert (seconds_of(plan, view) <= GAPS * TPOT_S + 1e-9) == is_capped


def test_who_comes_meanwhile_is_in_time_where_decodes_have_all_the_time():
    slo = Slo(ttft_s=0.4, tpot_s=0.2)
    running = (replying(num_tokens=9, ago_s=0.2),)
    view = view_of(running=running, offline=[offline(f"off{i}", 3000) for i in range(9)])
    plan, _ = planned(view, slo=slo)
    assert plan.prefill
    assert plan.limits["offline"] == pytest.approx(BUDGETS.idle_share * slo.ttft_s)


class Disturbed(Linear):
    """As long as `Linear`, and half as much again for disturbances."""

    margin = 0.5

    def predict_s(self, totals):
        return 1.5 * super().predict_s(totals)


def test_disturbances_make_single_iterations_shorter_and_nobody_late():
    """Decodes that take three quarters of the target alone: with what a disturbed iteration takes
    there would be no time for a prompt."""
    base = Linear(fixed_s=0.75 * TPOT_S)
    disturbed = Disturbed(fixed_s=base.fixed_s)
    view = view_of(running=(replying(num_tokens=9, ago_s=0.35),), online=[chat("new", 1000)])
    for predictor in (base, disturbed):
        plan, _ = planned(view, predictor=predictor)
        assert plan.late == {}
        assert plan.prefill["new"] == planned(view, predictor=base)[0].prefill["new"]
    view = view_of(running=(replying(num_tokens=9, ago_s=0.35),), offline=[offline("off", 3000)])
    expected_s = [
        seconds_of(planned(view, predictor=p)[0], replace(view, predictor=base))
        for p in (base, disturbed)
    ]
    assert expected_s[1] < expected_s[0]


def test_a_target_that_is_kept_in_the_mean_counts_however_disturbed_the_machine_is():
    """The shortest iteration takes 20 ms, or 30 with what disturbs it now: 25 ms can be kept."""
    running = (replying(num_tokens=9, ago_s=0.2, slo=Slo(tpot_s=0.025)),)
    view = view_of(running=running, offline=[offline("off", 3000)])
    for predictor in (Linear(fixed_s=0.02), Disturbed(fixed_s=0.02)):
        plan, _ = planned(view, predictor=predictor)
        assert plan.limits["offline"] <= 0.026
    out_of_reach = replace(running[0], slo=Slo(tpot_s=0.015))
    plan, _ = planned(replace(view, running=(out_of_reach,)), predictor=Disturbed(fixed_s=0.02))
    assert plan.limits["offline"] > 0.05


@pytest.mark.parametrize(
    ("short", "long", "cached", "first"),
    [
        ((1000,), (1000,), 0, "short"),
        ((10,), (1000,), 0, "long"),
        ((100,), (400,), 0, "short"),
        pytest.param((100,), (100,), 800, "long", id="cached tokens count as computed"),
        pytest.param((50,) * 8, (*(50,) * 7, 20_000), 0, "long", id="the mean, not the median"),
    ],
)
def test_the_longest_offline_reply_per_prompt_token_goes_first(short, long, cached, first):
    """The prompts have 200 and 900 tokens, and their replies end at one of these lengths. The
    bucket of long prompts is next."""
    pool = PrefixPool(PoolConfig(bucket_boundaries=(300,)))
    pool.add(offline("long", 900, token_ids=array("q", [1] * 900), max_new_tokens=30_000))
    pool.add(offline("short", 200, token_ids=array("q", [2] * 200), max_new_tokens=30_000))
    view = view_of(
        offline=pool,
        total_kv=500_000,
        cached={"long": Match(cached=cached, evictable=0)},
        lengths={
            rid: LengthEstimate(ends[0], ends[-1], ends)
            for rid, ends in (("short", short), ("long", long))
        },
    )
    plan, _ = planned(view)
    assert next(iter(plan.prefill)) == first


def test_a_shared_prefix_in_use_is_finished_before_a_longer_reply():
    pool = PrefixPool(PoolConfig(bucket_boundaries=(300,)))
    for rid, tokens, most in (
        ("short", [1] * 200, 10),
        ("like it", [1] * 190 + [3] * 10, 10),
        ("long", [2] * 900, 4000),
    ):
        pool.add(offline(rid, len(tokens), token_ids=array("q", tokens), max_new_tokens=most))
    plan, _ = planned(view_of(offline=pool))
    assert next(iter(plan.prefill)) == "short"


def test_nobody_waits_for_ever_while_there_is_always_somebody_due():
    """Each iteration brings two new ones, more than the device can do."""
    state, waits, num_plans = None, [chat(f"late{i}", 900, age_s=5.0, seq=i) for i in range(4)], 0
    while any(r.rid.startswith("late") for r in waits):
        num_plans += 1
        assert num_plans < 12 * LATE_TURN, "they wait for ever"
        new = [chat(f"n{num_plans}.{i}", 900, seq=10 * num_plans + i) for i in range(2)]
        plan, state = planned(view_of(online=[*waits, *new]), state)
        waits = [r for r in waits if plan.prefill.get(r.rid, 0) < 900]


def room_of(room):
    """So much of what a promise for TPOT begins with is left."""
    return TpotHeadroom(share=0.05, saved_s=room, usual_s=1.0)


def beside_decodes(headroom, **fields):
    """(seconds without offline work, seconds with it) of the iteration that is planned."""
    running = tuple(replying(f"run{i}", num_tokens=30, ago_s=0.3) for i in range(4))
    queue = [offline(f"job{i}", 400, max_new_tokens=20) for i in range(20)]
    view = view_of(running=running, offline=queue, tolerance_headroom=headroom, **fields)
    alone = seconds_of(planned(replace(view, offline=()))[0], view)
    return alone, seconds_of(planned(view)[0], view)


def test_offline_work_lengthens_iterations_beside_decodes_by_no_more_than_the_headroom():
    alone_s, free_s = beside_decodes(None)
    assert free_s > 2 * alone_s
    for headroom in (Headroom(wait_s=0.003), Headroom(wait_s=0.003, tpot=room_of(10.0))):
        _, seconds = beside_decodes(headroom)
        assert alone_s < seconds <= alone_s + 0.003 + 1e-9
    assert beside_decodes(Headroom(wait_s=0.0))[1] == alone_s
    assert beside_decodes(Headroom(tpot=room_of(0.0)))[1] == alone_s
    assert alone_s < beside_decodes(Headroom(tpot=room_of(100.0)))[1] <= free_s


def test_what_decodes_offline_pauses_where_there_is_no_headroom():
    jobs = [decoding(offline(f"job{i}", 100, max_new_tokens=50), 5) for i in range(8)]
    view = view_of(
        running=(replying(num_tokens=30, ago_s=0.3), *jobs),
        tolerance_headroom=Headroom(tpot=room_of(0.0)),
    )
    plan, _ = planned(view)
    assert set(plan.paused) == {job.rid for job in jobs}
    assert not planned(replace(view, tolerance_headroom=None))[0].paused


def test_prompts_are_not_cut_for_decodes_where_a_share_of_ttft_is_promised():
    view = view_of(running=(replying(num_tokens=2),), online=[chat("new", 3000)])
    cut, _ = planned(view)
    whole, _ = planned(replace(view, tolerance_headroom=Headroom(wait_s=0.001)))
    assert cut.prefill["new"] < 3000 == whole.prefill["new"]
    only_tpot, _ = planned(replace(view, tolerance_headroom=Headroom(tpot=room_of(1.0))))
    assert only_tpot.prefill == cut.prefill


def test_offline_work_does_not_ride_with_prompts_where_a_share_of_ttft_alone_is_promised():
    jobs = [decoding(offline(f"job{i}", 100, max_new_tokens=50), 5) for i in range(8)]
    running = (replying(num_tokens=30, ago_s=0.3), *jobs)
    view = view_of(running=running, online=[chat("new", 100)])
    both = Headroom(wait_s=0.05, tpot=room_of(10.0))
    for headroom, rides in (
        (None, True),
        (Headroom(tpot=room_of(10.0)), True),
        (both, True),
        (Headroom(wait_s=0.05), False),
    ):
        plan, _ = planned(replace(view, tolerance_headroom=headroom))
        assert plan.prefill == {"new": 100}
        assert set(plan.paused) == (set() if rides else {job.rid for job in jobs})
    plan, _ = planned(replace(view, online=[], tolerance_headroom=Headroom(wait_s=0.05)))
    assert not plan.paused, "decodes alone"


def test_prompts_are_cut_as_ever_where_somebody_is_late():
    queue = [chat("late", 500, age_s=3.0), chat("due", 3000, seq=1)]
    view = view_of(running=(replying(num_tokens=2),), online=queue)
    plan, _ = planned(view)
    promised, _ = planned(
        replace(view, tolerance_headroom=Headroom(wait_s=0.001, tpot=room_of(1.0)))
    )
    assert promised.prefill == plan.prefill and promised.prefill["due"] < 3000


def test_an_idle_engine_takes_short_steps_so_that_who_comes_does_not_wait():
    jobs = [offline(f"job{i}", 2000, max_new_tokens=20) for i in range(4)]
    view = view_of(offline=jobs)
    free, careful = (
        planned(replace(view, tolerance_headroom=headroom))[0]
        for headroom in (None, Headroom(wait_s=0.001))
    )
    assert 0 < sum(careful.prefill.values()) < sum(free.prefill.values()) / 5
    assert planned(replace(view, tolerance_headroom=Headroom(tpot=room_of(0.4))))[0] == free, (
        "nothing was promised of TTFT"
    )


def sibling(name, own, **fields):
    """64 tokens of its own after 400 of a prefix."""
    return online(name, 464, token_ids=[*range(400), *range(own, own + 64)], **fields)


@pytest.mark.parametrize("is_launched", [False, True])
def test_siblings_wait_for_the_prefix_that_one_of_them_computes(is_launched):
    """is_launched: its prefill is in the iteration under way, and not yet in the cache."""
    first, second = sibling("first", 1000), sibling("second", 2000)
    other = online("other", 464, token_ids=range(5000, 5464))
    view = FakeView(caps=CAPS, online=(first, second, other))
    if is_launched:
        launched = replace(first, num_computed_tokens=464)
        view = replace(view, running=(launched,), online=(second, other))
    plan, _ = planned(view)
    assert plan.skipped["second"] is SkipReason.SHARED_PREFIX
    assert "other" in plan.prefill, "it is no sibling"
    # Once the prefix is cached they run together.
    cached = {rid: Match(cached=400, evictable=400) for rid in ("second", "third")}
    third = sibling("third", 3000)
    view = FakeView(caps=CAPS, online=(second, third), cached=cached, evictable_kv=400)
    assert planned(view)[0].prefill == {"second": 64, "third": 64}


def test_a_sibling_is_not_late_for_a_prefix_that_is_computed_once():
    """Each prompt takes 0.85 s, of which a sibling's own part is 0.05."""
    siblings = [
        online(
            f"s{i}", 8500, token_ids=[*range(8000), *range(10**6 * (i + 1), 10**6 * (i + 1) + 500)]
        )
        for i in range(3)
    ]
    view = FakeView(caps=CAPS, total_kv=50_000, online=siblings)
    assert not planned(view)[0].late
    strangers = [
        replace(s, token_ids=range(10**6 * i, 10**6 * i + 8500)) for i, s in enumerate(siblings)
    ]
    assert len(planned(replace(view, online=strangers))[0].late) == 2


class Unasked(Linear):
    """A predictor that must not be asked."""

    def predict_s(self, totals):
        raise AssertionError("asked")


def test_chat_that_decodes_alone_needs_no_plan(monkeypatch):
    state = Past(idle_s=0.25)
    view = view_of(running=(replying("a"), replying("b", num_tokens=30)))
    assert planned(view, state, predictor=Unasked()) == (EMPTY_PLAN, state)
    monkeypatch.setattr(CoschedPolicy, "_is_settled", lambda self, view: False)
    plan, after = planned(view, state)
    assert (plan.prefill, plan.paused, plan.preempt, plan.promise) == ({}, frozenset(), (), {})
    assert (after.turns, after.credits) == (state.turns, state.credits)


@pytest.mark.parametrize(
    "more",
    [
        {"online": [chat("new")]},
        {"offline": [offline("job")]},
        {"unfinished": (prefilled(chat("begun"), 64),)},
        {"running": (replying("a"), decoding(offline("job")))},
        {"tolerance_headroom": Headroom(tpot=None, wait_s=1.0)},
        {"total_kv": 101},
    ],
    ids=["chat", "offline", "prefill", "offline decode", "tolerance", "memory"],
)
def test_anything_beside_chat_that_decodes_is_planned(more):
    view = view_of(**{"running": (replying("a"),)} | more)
    with pytest.raises(AssertionError, match="asked"):
        planned(view, predictor=Unasked())
