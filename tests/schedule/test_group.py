"""Plans of ranks that step together (DP attention), on hand-made views."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cosched.core.group import NO_OTHERS, OtherRanks, RankNeeds, others_of
from cosched.core.request import Slo
from cosched.policies import POLICIES
from cosched.schedule.base import Budgets, PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled
from tests.schedule.limits import seconds_of
from tests.schedule.views import views

TTFT_S, TPOT_S = 1.0, 0.05
CAPS = make_caps(partial_decode=True, promises=True, max_chunk_tokens=4096, max_prefill_tokens=8192)
GROUPED = sorted(name for name, entry in POLICIES.items() if entry.groups)
policies = pytest.mark.parametrize("name", ["cosched", "hygen"])


def policy_of(name, caps=CAPS):
    budgets = Budgets(aim=1.0, ttft_aim=1.0, burst=2.0)
    slo = Slo(ttft_s=TTFT_S, tpot_s=TPOT_S)
    return POLICIES[name].make(PolicySettings(caps=caps, slo=slo, budgets=budgets))


def plan_of(name, view):
    policy = policy_of(name, view.caps)
    plan, _ = policy.plan(view, policy.initial)
    validate(plan, view)
    return plan


def needs_of(name, view):
    return policy_of(name, view.caps).needs(view)


def view_of(**fields):
    return FakeView(caps=CAPS, now_s=10.0, start_s=10.0, total_kv=50_000, **fields)


def replying(rid="run", *, num_tokens=2, ago_s=0.05):
    """Decodes; its first token came `ago_s` ago."""
    request = online(rid, 100, max_new_tokens=200, arrival_s=9.0)
    return replace(decoding(request, num_tokens), first_token_s=10.0 - ago_s)


def chat(rid="new", num_tokens=500):
    return online(rid, num_tokens, arrival_s=9.9)


def work(num=3):
    return [offline(f"off{n}", 3000) for n in range(num)]


def in_group(name, *members):
    """The plan of each rank of a group and its predicted time."""
    needs = [needs_of(name, view) for view in members]
    seen = [replace(view, others=others_of(needs, n)) for n, view in enumerate(members)]
    return [(plan := plan_of(name, view), seconds_of(plan, view)) for view in seen]


def test_the_policies_that_plan_groups_say_what_they_need():
    assert {"cosched", "hygen"} <= {*GROUPED}
    for name in GROUPED:
        assert needs_of(name, view_of()).alone_s == 0


ADMITTED_BY_ANOTHER_RULE = FakeView(
    caps=make_caps(promises=True),
    total_kv=580,
    unfinished=(prefilled(online("part0", 200, max_new_tokens=300), 100),),
    online=(online("on0", 100, max_new_tokens=300),),
)
"""The unfinished prefill has no promise, as after a plan of the safe rule: there is memory for both
requests if it gets one."""


@settings(max_examples=100)
@example(name="cosched", view=ADMITTED_BY_ANOTHER_RULE)
@example(name="hygen", view=ADMITTED_BY_ANOTHER_RULE)
@given(name=st.sampled_from(GROUPED), view=views())
def test_a_group_of_one_rank_plans_as_without_a_group(name, view):
    alone = plan_of(name, view)
    needs = needs_of(name, view)
    assert others_of([needs], 0) == NO_OTHERS
    beside_idle = replace(view, others=others_of([needs, RankNeeds()], 0))
    planned = plan_of(name, beside_idle)
    assert msgspec.structs.replace(planned, limits=alone.limits) == alone


@policies
def test_offline_work_of_one_rank_does_not_make_decodes_of_another_late(name):
    idle = view_of(offline=work())
    assert seconds_of(plan_of(name, idle), idle) > 2 * TPOT_S
    (plan, seconds), (_, decodes_s) = in_group(name, idle, view_of(running=(replying(),)))
    assert plan.prefill and decodes_s <= seconds <= TPOT_S + 1e-9


@policies
def test_prefills_of_one_rank_leave_decodes_of_another_their_pace(name):
    long = view_of(online=[chat(num_tokens=4000)])
    assert seconds_of(plan_of(name, long), long) > 3 * TPOT_S
    ahead = replying(num_tokens=3)
    (plan, seconds), _ = in_group(name, long, view_of(running=(ahead,)))
    assert plan.prefill and seconds <= 2 * TPOT_S + 1e-9


@policies
def test_time_that_a_prefill_of_another_rank_takes_is_free_for_offline_work(name):
    own = view_of(running=(replying(num_tokens=6),), offline=work())
    assert seconds_of(plan_of(name, own), own) <= 2 * TPOT_S + 1e-9
    (_, seconds), (_, chat_s) = in_group(name, own, view_of(online=[chat(num_tokens=1400)]))
    assert 2 * TPOT_S < chat_s - 0.02 < seconds <= chat_s + 1e-9


def test_decodes_of_other_ranks_wait_for_a_piece_of_a_prompt_unless_there_is_other_work():
    def seconds(*, num_offline=0, ago_s=0.1, **other):
        long = replace(chat(num_tokens=1500), arrival_s=10.0 - ago_s)
        own = view_of(online=[long], running=(replying(num_tokens=6),), offline=work(num_offline))
        decodes = view_of(running=(replying("other", num_tokens=6),), **other)
        first = needs_of("cosched", decodes).alone_s
        own = replace(own, others=OtherRanks(alone_s=first))
        decodes = replace(decodes, others=OtherRanks(alone_s=needs_of("cosched", own).alone_s))
        needs = [needs_of("cosched", view) for view in (own, decodes)]
        own = replace(own, others=others_of(needs, 0))
        return seconds_of(plan_of("cosched", own), own)

    piece_s = seconds()
    assert piece_s < TPOT_S
    assert seconds(num_offline=2) > 2 * piece_s
    assert seconds(offline=work()) > 2 * piece_s
    assert seconds(ago_s=0.6) > 2 * piece_s


@policies
def test_decodes_of_other_ranks_set_the_pace(name):
    """What a rank's decodes can catch up depends on the slowest rank."""
    view = view_of(running=(replying(),), online=[chat()])
    slow = replace(view, others=OtherRanks(alone_s=2 * TPOT_S))
    assert needs_of(name, slow).least_s > needs_of(name, view).least_s


@policies
@settings(max_examples=25)
@given(members=st.lists(views(), min_size=2, max_size=4))
def test_no_rank_is_longer_than_what_all_allow_or_one_takes(name, members):
    needs = [needs_of(name, view) for view in members]
    for plan, seconds in in_group(name, *members):
        if not any(rid.startswith("off") for rid in plan.prefill):
            continue
        allowed_s = max(min(n.offline_s for n in needs), max(n.required_s for n in needs))
        online_s = max(min(n.online_s for n in needs), max(n.least_s for n in needs))
        assert seconds <= max(allowed_s, online_s) + 1e-9


@policies
def test_with_drafts_prefills_leave_time_for_the_decodes_of_other_ranks_after_them(name):
    turns = replace(CAPS, takes_turns=True)
    due = replace(view_of(running=(replying(num_tokens=1),)), caps=turns)
    needs = needs_of(name, due)
    assert needs.online_s <= 0 < needs.alone_s and needs.required_s == 0
    ahead = replace(due, running=(replying(num_tokens=5),))
    assert needs_of(name, ahead).online_s > 0


@policies
def test_no_rank_prefills_while_decodes_are_due(name):
    view = view_of(running=(replying(),), online=[chat()], offline=work())
    assert plan_of(name, view).prefill
    held = plan_of(name, replace(view, others=OtherRanks(must_decode=True)))
    assert not held.prefill and not held.paused and not held.preempt


def test_what_others_take_is_bounded_by_what_the_group_allows():
    long = RankNeeds(required_s=1.0, least_s=0.1)
    strict = RankNeeds(alone_s=0.02, least_s=0.02, required_s=0.02, online_s=0.3, offline_s=0.05)
    assert others_of([long, strict], 1).taken_s == 0.3
    assert others_of([long, strict], 0) == OtherRanks(0.02, 0.02, 0.3, 0.05)
    assert others_of([long, strict, RankNeeds(online_s=0.05)], 1).taken_s == 0.1
