"""HyGen's budgets of predicted time on hand-made views."""

from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.plan import SkipReason
from cosched.core.request import RequestClass, Slo, Traits
from cosched.papers.hygen.policy import HygenPolicy
from cosched.schedule.base import Budgets, PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, PerKv, decoding, make_caps, offline, online, prefilled
from tests.schedule.limits import decoding_in, has_offline_work, offline_limit_s, seconds_of

TTFT_S, TPOT_S = 1.0, 0.05


CAPS = make_caps(partial_decode=True, max_chunk_tokens=4096, max_prefill_tokens=8192)
BUDGETS = Budgets(aim=1.0, ttft_aim=1.0, burst=2.0, idle_share=0.3)


def plan_of(view, *, predictor=None, latency_budget_s=None, budgets=BUDGETS):
    settings = PolicySettings(
        caps=view.caps,
        slo=Slo(ttft_s=TTFT_S, tpot_s=TPOT_S),
        latency_budget_s=latency_budget_s,
        budgets=budgets,
    )
    view = replace(view, predictor=predictor or Linear())
    plan, _ = HygenPolicy(settings).plan(view, None)
    validate(plan, view)
    return plan


@pytest.mark.parametrize("rest", [[], [offline("off", 500)]])
def test_a_budget_below_the_shortest_iteration_slows_but_does_not_stop(rest):
    view = FakeView(online=[online("on", 500)], offline=rest, caps=CAPS)
    plan = plan_of(view, latency_budget_s=0.001)
    assert list(plan.prefill) == ["on"] and 0 < plan.prefill["on"] < 100
    begun = FakeView(unfinished=[prefilled(online("on", 500), 64)], offline=rest, caps=CAPS)
    assert list(plan_of(begun, latency_budget_s=0.001).prefill) == ["on"]
    busy = FakeView(running=[running_online("run")], online=[online("on", 500)], caps=CAPS)
    assert not plan_of(busy, latency_budget_s=0.001).prefill


def running_online(rid="on", *, num_tokens=2, first_token_s=0.0, **fields):
    return replace(
        decoding(online(rid, 100, max_new_tokens=200, **fields), num_tokens),
        first_token_s=first_token_s,
    )


def test_offline_prefill_stops_where_the_next_online_token_would_be_late():
    # One token came at 0 and one later; the third is due at 0.10, and it is 0.06 now.
    view = FakeView(
        caps=CAPS,
        running=(running_online(num_tokens=2),),
        offline=[offline("off", 5000)],
        now_s=0.06,
        start_s=0.06,
    )
    plan = plan_of(view)
    assert 0.03 < seconds_of(plan, view) <= 0.10 - 0.06 + 1e-9


def test_a_request_that_ran_ahead_lends_its_slack_up_to_the_burst():
    ahead = running_online(num_tokens=30)  # thirty tokens at once: a second and a half ahead
    view = FakeView(caps=CAPS, running=(ahead,), offline=[offline("off", 5000)])
    assert 0.09 < seconds_of(plan_of(view), view) <= 2 * TPOT_S


def test_an_online_chunk_leaves_some_of_the_slack_that_it_borrows():
    """Or an iteration that lasts longer than predicted would make the last token late."""
    ahead = running_online(num_tokens=11)  # ten gaps, half a second, at once
    new = online("new", 9000, slo=Slo(ttft_s=9.0))
    caps = replace(CAPS, max_chunk_tokens=16_384, max_prefill_tokens=16_384)
    view = FakeView(caps=caps, running=(ahead,), online=[new], total_kv=99_999)
    slack_s = 11 * TPOT_S
    assert 0.6 * slack_s < seconds_of(plan_of(view), view) < 0.9 * slack_s


@pytest.mark.parametrize(
    ("total_kv", "limit_s"), [(1000, 0.06), (202, 0.05 * 0.5 / 0.8), (101, 0.0)]
)
def test_the_fuller_online_requests_make_the_memory_the_shorter_iterations_get(total_kv, limit_s):
    # A token ahead of its deadlines: with room the slack is 0.06.
    running = running_online(num_tokens=3, first_token_s=0.0)
    view = FakeView(caps=CAPS, running=(running,), total_kv=total_kv, now_s=0.09, start_s=0.09)
    assert plan_of(view).limits["offline"] == pytest.approx(limit_s, rel=0.02, abs=2e-3)


def test_decodes_that_do_not_fit_sit_out_youngest_first_and_nothing_new_begins():
    fast = running_online(num_tokens=1)
    old = [decoding(offline(f"o{i}", 50), 3) for i in range(600)]
    view = FakeView(
        caps=make_caps(partial_decode=True, max_running_requests=999, max_chunk_tokens=4096),
        running=(fast, *old),
        offline=[offline("waits", 100)],
        total_kv=999_999,
    )
    plan = plan_of(view)
    held = {f"o{i}" for i in range(600 - len(plan.paused), 600)}
    assert 0 < len(plan.paused) < 600 and plan.paused == held
    assert not plan.prefill
    assert seconds_of(plan, view) <= TPOT_S + 1e-9


def test_decodes_that_cannot_sit_out_take_their_time():
    jobs = tuple(decoding(offline(f"o{i}", 20), 3) for i in range(200))
    view = FakeView(
        caps=replace(CAPS, partial_decode=False, max_running_requests=300),
        running=(running_online(num_tokens=2), *jobs),
        offline=[offline("off", 3000)],
        total_kv=99_999,
        now_s=0.05,
        start_s=0.05,
    )
    plan = plan_of(view)
    assert plan.prefill and not plan.paused
    assert seconds_of(plan, view) <= 0.05 + 1e-9


def test_something_always_runs():
    running = tuple(decoding(offline(f"o{i}", 50), 3) for i in range(3))
    view = FakeView(caps=CAPS, running=running)
    slow = Linear(fixed_s=10.0)
    assert len(plan_of(view, predictor=slow).paused) == 2
    idle = FakeView(caps=CAPS, offline=[offline("off", 500)])
    assert plan_of(idle, predictor=slow).prefill == {"off": 64}
    waiting = FakeView(caps=CAPS, online=[online("on", 100)])
    assert plan_of(waiting, predictor=Linear(fixed_s=0.04, token_s=0.001)).prefill["on"] > 0


def test_a_fixed_budget_holds_beside_online_requests_and_the_idle_share_where_there_are_none():
    ahead = running_online(num_tokens=30)
    view = FakeView(caps=CAPS, running=(ahead,), offline=[offline("off", 5000)])
    assert seconds_of(plan_of(view, latency_budget_s=0.03), view) <= 0.03
    idle = FakeView(caps=CAPS, offline=[offline("off", 4000)])
    waits = FakeView(caps=CAPS, online=[online("on", 100)], offline=[offline("off", 4000)])
    assert 0.015 < seconds_of(plan_of(waits, latency_budget_s=0.03), waits) <= 0.03
    for idle_share in (0.3, 0.03):
        budgets = msgspec.structs.replace(BUDGETS, idle_share=idle_share)
        plan = plan_of(idle, latency_budget_s=0.03, budgets=budgets)
        most_s = idle_share * TTFT_S
        assert 0.7 * most_s < seconds_of(plan, idle) <= most_s + 1e-9


@dataclass(frozen=True)
class Stairs(Linear):
    """Each begun tile of 256 tokens costs the whole tile."""

    def predict_s(self, totals):
        tokens = totals.num_new + totals.num_decodes
        return self.fixed_s + 0.015 * -(-tokens // 256) + 1e-6 * tokens if tokens else 0.0


@pytest.mark.parametrize("num_slots", [2, 3, 4, 5, 6])
def test_the_last_prompt_that_finds_a_slot_is_cut_where_a_tile_ends(num_slots):
    view = FakeView(
        caps=replace(CAPS, max_running_requests=num_slots),
        offline=[offline(f"o{i}", 90) for i in range(20)],
        total_kv=99_999,
    )
    plan = plan_of(view, predictor=Stairs())
    assert len(plan.prefill) == num_slots
    beyond = 90 * num_slots % 256
    # Two prompts do not fill a tile; three reach 14 tokens into the second, six 28 into the third.
    assert sum(plan.prefill.values()) == 90 * num_slots - (beyond if num_slots in (3, 6) else 0)


@pytest.mark.parametrize(
    ("waited_s", "has_offline", "is_cut"),
    [(0.1, True, True), (0.1, False, False), (0.7, True, False)],
)
def test_an_online_prompt_is_cut_where_a_tile_ends_when_there_is_time_and_other_work(
    waited_s, has_offline, is_cut
):
    # The online decode has no slack, so offline work cannot fill the second tile.
    decodes = [decoding(offline(f"d{i}", 100), 2) for i in range(9)]
    view = FakeView(
        caps=CAPS,
        running=(running_online(num_tokens=2, first_token_s=0.5), *decodes),
        online=[online("late", 300, arrival_s=1.0 - waited_s)],
        offline=[offline(f"o{i}", 90) for i in range(9)] if has_offline else [],
        now_s=1.0,
        start_s=1.0,
        total_kv=99_999,
    )
    num_tokens = plan_of(view, predictor=Stairs()).prefill["late"]
    assert num_tokens == (256 - 10 if is_cut else 300)


@pytest.mark.parametrize(("spare_s", "is_longer"), [(0.006, True), (0.0, False), (-0.1, False)])
def test_an_iteration_is_a_little_longer_where_a_prompt_ends_in_it_and_no_decode_is_late(
    spare_s, is_longer
):
    # Two tokens came, so the third is due two TPOT after the first.
    reply = running_online(num_tokens=2, first_token_s=1.0 + spare_s - TPOT_S)

    def tokens(num_tokens):
        new = online("new", num_tokens, arrival_s=1.0)
        return plan_of(
            FakeView(caps=CAPS, running=(reply,), online=[new], now_s=1.0, start_s=1.0)
        ).prefill["new"]

    most = tokens(3000)
    assert 300 < most < 500 and (tokens(most + 40) == most + 40) is is_longer
    assert tokens(most + 80) == most


def only_the_least(plan, view):
    """What an idle engine computes however long it takes: one decode, or 64 tokens of a prompt."""
    num_decodes = len(decoding_in(plan, view))
    return num_decodes + len(plan.prefill) == 1 and sum(plan.prefill.values()) <= 64


@given(
    online_tokens=st.lists(st.integers(1, 60), max_size=6),
    offline_lengths=st.lists(st.integers(1, 900), max_size=12),
    prompts=st.lists(st.integers(1, 3000), max_size=3),
    now_s=st.floats(0, 3),
    token_s=st.floats(1e-6, 1e-2),
)
def test_every_plan_is_valid_and_offline_work_keeps_the_limits(
    online_tokens, offline_lengths, prompts, now_s, token_s
):
    view = FakeView(
        caps=CAPS,
        running=(
            *(running_online(f"r{i}", num_tokens=n) for i, n in enumerate(online_tokens)),
            *(decoding(offline(f"d{i}", n), 2) for i, n in enumerate(offline_lengths)),
        ),
        online=[online(f"w{i}", n) for i, n in enumerate(prompts)],
        offline=[offline(f"q{i}", n) for i, n in enumerate(offline_lengths)],
        total_kv=99_999,
        now_s=now_s,
        start_s=now_s,
    )
    view = replace(view, predictor=Linear(token_s=token_s))
    plan = plan_of(view, predictor=view.predictor)
    if has_offline_work(plan, view) and not only_the_least(plan, view):
        limit_s = offline_limit_s(view, Slo(ttft_s=TTFT_S, tpot_s=TPOT_S), BUDGETS)
        assert seconds_of(plan, view) <= limit_s + 1e-9
    has_work = view.running or prompts or offline_lengths
    decodes = [r for r in view.running if r.rid not in plan.paused]
    assert bool(decodes or plan.prefill) == bool(has_work)
    assert all(r.rid not in plan.paused for r in view.running if r.rid.startswith("r"))
    if any(rid.startswith("q") for rid in plan.prefill):
        assert not plan.paused, "running before waiting"
        classes = [r.request_class for r in view.online if r.rid not in plan.prefill]
        assert RequestClass.ONLINE not in classes, "online before offline"


def test_a_target_that_no_iteration_can_meet_counts_as_none():
    absurd = running_online("absurd", num_tokens=30, slo=Slo(tpot_s=1e-6))
    view = FakeView(
        caps=CAPS,
        running=(absurd,),
        online=[online("new", 2000)],
        offline=[offline("off", 5000)],
        now_s=1.0,
        start_s=1.0,
    )
    plain = replace(absurd, slo=Slo())
    assert plan_of(view).prefill == plan_of(replace(view, running=(plain,))).prefill
    assert plan_of(view).prefill["new"] > 400
    # One that can be met is: 30 tokens at 6 ms each are due by 0.18, and it is 1.0 now.
    strict = replace(absurd, slo=Slo(tpot_s=0.006))
    assert plan_of(replace(view, running=(strict,), online=[])).prefill == {}


def test_a_first_token_that_would_be_late_at_the_pace_of_the_decodes_goes_faster():
    """6 ms of 20 are the decode's; at that pace 2,000 tokens take 0.286 s, with 0.25 s left."""
    view = FakeView(
        caps=CAPS,
        running=(running_online(num_tokens=2, first_token_s=0.98, slo=Slo(tpot_s=0.02)),),
        online=[online("new", 2000, arrival_s=0.25)],
        offline=[offline("off", 5000)],
        now_s=1.0,
        start_s=1.0,
    )
    relaxed = replace(view, online=[online("new", 2000, arrival_s=0.9)])
    assert seconds_of(plan_of(relaxed), relaxed) <= 0.02 + 1e-9
    plan = plan_of(view)
    assert list(plan.prefill) == ["new"]
    # In iterations of L the prefill has (L - 5.1 ms) / L of the 0.25 s, and needs 0.2 s.
    assert seconds_of(plan, view) == pytest.approx(0.25 * 0.0051 / 0.05, abs=2e-4)


@dataclass(frozen=True)
class CarefulBeyond(Linear):
    """Knows chunks of up to 512 tokens, and is careful with larger ones, as `Calibrator` is."""

    def predict_s(self, totals):
        return super().predict_s(totals) * max(totals.num_new / 512, 1.0)


def test_a_long_prompt_is_not_given_up_because_nobody_computed_as_much_at_once():
    """2,000 tokens in four chunks take 0.2 s beside the decodes, 0.3 s are left."""
    caps = replace(CAPS, max_chunk_tokens=512)
    view = FakeView(
        caps=caps,
        running=(running_online(num_tokens=2, first_token_s=0.98, slo=Slo(tpot_s=0.02)),),
        online=[online("new", 2000, arrival_s=0.25)],
        now_s=1.0,
        start_s=1.0,
    )
    careful = plan_of(view, predictor=CarefulBeyond())
    assert careful.prefill == plan_of(view).prefill
    assert careful.prefill["new"] > 150, "at the pace of the decodes it would be late"


def test_prefills_are_planned_to_end_before_the_last_moment():
    """Neither offline work nor decodes get all that is left of the target."""
    view = FakeView(
        caps=CAPS,
        running=(running_online(num_tokens=2, first_token_s=0.98, slo=Slo(tpot_s=0.02)),),
        online=[online("new", 2000, arrival_s=0.25)],
        now_s=1.0,
        start_s=1.0,
    )
    early, late = (
        plan_of(view, budgets=msgspec.structs.replace(BUDGETS, ttft_aim=a)) for a in (0.97, 1.0)
    )
    assert early.limits["online"] > 1.5 * late.limits["online"]
    alone = replace(view, running=(decoding(offline("off", 300), 3),))
    early, late = (
        plan_of(alone, budgets=msgspec.structs.replace(BUDGETS, ttft_aim=a)) for a in (0.97, 1.0)
    )
    assert late.limits["offline"] - early.limits["offline"] == pytest.approx(0.03)


def test_short_prompts_go_along_with_a_long_one():
    """It takes little longer, and they would wait for all of it."""
    view = FakeView(
        caps=CAPS,
        running=(running_online(num_tokens=2, first_token_s=0.98),),
        unfinished=[prefilled(online("long", 4000, arrival_s=-9.0), 200)],
        online=[online("also long", 900), online("short", 60)],
        now_s=1.0,
        start_s=1.0,
    )
    plan = plan_of(view)
    assert plan.prefill.keys() == {"short", "long"}
    assert plan.prefill["short"] == 60
    assert plan.prefill["long"] > 3 * plan.prefill["short"]
    without = plan_of(replace(view, online=[]))
    assert plan.prefill["long"] >= without.prefill["long"] - 61


def test_offline_work_leaves_the_time_that_waiting_prompts_still_need():
    """The prompt needs 0.22 s more in four chunks of 512 tokens, and 0.24 s are left."""
    caps = replace(CAPS, max_chunk_tokens=512)
    view = FakeView(
        caps=caps,
        running=(decoding(offline("off", 300), 3),),
        unfinished=[prefilled(online("new", 2200, arrival_s=0.24), 200)],
        now_s=1.0,
        start_s=1.0,
    )
    plan = plan_of(view)
    assert plan.limits["offline"] == pytest.approx(0.24 - 0.22, abs=1e-3)


def test_a_prompt_that_cannot_mix_waits_for_decodes_that_are_due():
    with_logprobs = online("logprobs", 100, traits=Traits(can_mix=False))
    view = FakeView(
        caps=CAPS,
        running=(running_online(num_tokens=2),),
        online=[with_logprobs, online("plain", 100)],
    )
    assert list(plan_of(view).prefill) == ["logprobs", "plain"]
    plan = plan_of(replace(view, must_decode=True))
    assert list(plan.prefill) == ["plain"]
    assert plan.skipped["logprobs"] is SkipReason.DECODES_DUE


def test_an_unfinished_online_prompt_gives_way_to_decodes_that_lack_memory_and_to_nothing_else():
    begun = prefilled(online("begun", 4000), 2000)
    runs = [running_online(f"run{i}") for i in range(4)]
    held = 2000 + sum(r.num_computed_tokens for r in runs)
    for num_free, stopped in ((4, []), (3, ["begun"])):
        view = FakeView(
            caps=CAPS,
            total_kv=held + num_free,
            running=runs,
            unfinished=[begun],
            online=[online("short", 1)],
            offline=[offline("job", 1)],
        )
        plan = plan_of(view)
        assert [p.rid for p in plan.preempt] == stopped
        assert stopped or not plan.prefill


def test_short_prompts_beside_a_long_one_leave_it_memory():
    long = prefilled(online("long", 4000, arrival_s=-9.0), 200)
    run = running_online(num_tokens=2, first_token_s=0.98)
    held = 200 + run.num_computed_tokens + 200  # with what `run` may still generate
    for num_free, rids in ((20_000, {"long", "short"}), (300, {"long"})):
        view = FakeView(
            caps=CAPS,
            total_kv=held + num_free,
            running=(run,),
            unfinished=[long],
            online=[online("short", 60, max_new_tokens=1)],
            now_s=1.0,
            start_s=1.0,
        )
        plan = plan_of(view)
        assert plan.prefill.keys() == rids and not plan.preempt


def test_who_cannot_be_stopped_is_not():
    beam = decoding(offline("beam", 300, traits=Traits(can_preempt=False)), 3)
    plain = decoding(offline("plain", 300), 3)
    caps = replace(CAPS, max_running_requests=2)
    view = FakeView(caps=caps, running=(plain, beam), online=[online("on", 100)])
    assert [p.rid for p in plan_of(view).preempt] == ["plain"]
    assert not plan_of(replace(view, running=(beam, replace(beam, rid="b2")))).preempt


def test_decodes_on_a_prefix_that_is_read_once_all_fit():
    """Where each reads its whole context only some of them fit beside the online request."""

    members = [decoding(offline(f"off{i}", 10_000, max_new_tokens=50), 5) for i in range(8)]
    shared = {request.rid: 10_000 for request in members[1:]}
    run = running_online(num_tokens=3, first_token_s=0.0)
    held = []
    for reads_once in (False, True):
        caps = replace(CAPS, shared_prefix=reads_once)
        view = FakeView(
            running=(run, *members), shared=shared, caps=caps, start_s=0.095, total_kv=200_000
        )
        held.append(len(plan_of(view, predictor=PerKv()).paused))
    assert held[0] > 0 and held[1] == 0
