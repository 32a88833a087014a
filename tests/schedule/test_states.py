"""State slots in a plan."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.estimates import LengthEstimate
from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.pool.pool import ArrivalOrder
from cosched.schedule.ledger import Ledger
from cosched.schedule.preemption import num_lost, should_finish
from tests.factories import FakeView, Linear, decoding, offline, online
from tests.schedule.test_every_policy import plan_of

NOTHING = Match(cached=0, evictable=0)


@given(
    num_slots=st.integers(0, 30),
    steps=st.lists(st.sampled_from(["admit", "preempt", "fork"]), max_size=20),
)
def test_no_slot_is_spent_twice(num_slots, steps):
    running = [decoding(offline(f"run{i}")) for i in range(20)]
    ledger, left = Ledger(FakeView(running=tuple(running), states=num_slots)), num_slots
    for number, step in enumerate(steps):
        if step == "fork":
            ledger.fork().refund_preemption(running[0])
        elif step == "preempt":
            ledger.refund_preemption(running.pop())
            left += 1
        else:
            request = online(f"new{number}", num_prompt_tokens=1)
            reason = ledger.refusal(request, NOTHING)
            assert (reason is SkipReason.MEMORY_BUDGET) == (left < 3)
            if reason is None:
                ledger.charge_admission(request, NOTHING, 1)
                left -= 3


@pytest.mark.parametrize("policy", ["cosched", "hygen"])
def test_an_online_request_takes_the_slots_of_offline_ones(policy):
    running = tuple(decoding(offline(f"off{i}", max_new_tokens=100)) for i in range(3))
    view = FakeView(running=running, online=(online("on"),), states=1)
    plan = plan_of(policy, view)
    assert plan.prefill.keys() == {"on"}
    assert {p.rid for p in plan.preempt} == {"off1", "off2"}, "two slots of the youngest"


class Sharing(ArrivalOrder):
    """Each request shares 300 tokens with another."""

    def num_shared(self, request):
        return 300


class Pool(list):
    def order(self):
        return Sharing(iter(self))


@pytest.mark.parametrize("policy", ["cosched", "hygen"])
@pytest.mark.parametrize(
    ("num_cached", "num_tokens"), [(0, 300), (250, 150), (300, 100)], ids=["cut", "short", "past"]
)
def test_a_chunk_ends_where_prompts_part(policy, num_cached, num_tokens):
    """The others find a checkpoint there; a few tokens are not worth a chunk."""
    view = FakeView(
        offline=Pool([offline("off", 400)]),
        states=9,
        cached={"off": Match(cached=num_cached, evictable=0)},
    )
    assert plan_of(policy, view).prefill == {"off": num_tokens}
    plain = replace(view, states=None)
    assert plan_of(policy, plain).prefill == {"off": 400 - num_cached}


@pytest.mark.parametrize("policy", ["cosched", "hygen"])
def test_what_would_lose_more_than_it_has_to_do_finishes(policy):
    """Of two requests with 3000 tokens one has no checkpoint, and ends in 5 tokens."""
    kept, ending = (
        decoding(offline(rid, num_prompt_tokens=3000, max_new_tokens=100))
        for rid in ("kept", "ending")
    )
    view = FakeView(
        running=(kept, ending),
        online=(online("on"),),
        states=2,
        checkpoints={"ending": 0},
        lengths={"ending": LengthEstimate(5, 5), "kept": LengthEstimate(5, 5)},
        mean_iteration_s=0.01,
        predictor=Linear(),
    )
    assert should_finish(view, ending) and not should_finish(view, kept)
    assert num_lost(view, ending) == ending.num_computed_tokens
    plan = plan_of(policy, view)
    assert {p.rid for p in plan.preempt} == {"kept"}
    alone = replace(view, running=(ending,))
    plan = plan_of(policy, alone)
    assert not plan.preempt and plan.skipped["on"] is SkipReason.MEMORY_BUDGET
    assert should_finish(replace(view, lengths={"ending": LengthEstimate(900, 900)}), ending) is (
        False
    )
