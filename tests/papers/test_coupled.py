"""The coupled schedulers on hand-made views: what is set aside, who is next, who is stopped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import hypot

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.estimates import LengthEstimate
from cosched.core.plan import PreemptMode, SkipReason
from cosched.core.request import Slo
from cosched.core.view import OfflineLimits
from cosched.papers.ecoserve.coupled import BLOCK, WINDOW, Groups, _Packing
from cosched.papers.ecoserve.forward_size import LEAST
from cosched.policies import POLICIES
from cosched.schedule.base import PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online, prefilled

NAMES = [name for name in POLICIES if name.startswith("eco-")]
BY_BLOCKS = ["eco-vllm", "eco-fastgen", "eco-syncfastgen"]
GROUPED = ["eco-synccoupled", "eco-syncfastgen"]
NO_LIMIT = 10_000


def caps(**limits):
    most = {"max_chunk_tokens": 8192, "max_prefill_tokens": 16_384, "max_running_requests": 512}
    return make_caps(promises=True, **most | limits)


@dataclass(kw_only=True)
class View(FakeView):
    """lengths: output tokens that a request generates in all, where that is known."""

    lengths: dict[str, int] = field(default_factory=dict)

    def length(self, request):
        most = self.lengths.get(request.rid, request.max_new_tokens)
        left = max(most - request.num_output_tokens, 0)
        return LengthEstimate(left, left)


def view_of(**fields):
    fields.setdefault("caps", caps())
    # The target forward size is the least there is.
    return View(**{"predictor": Linear(0.0, 1e-4), **fields})


def policy_of(name, view):
    return POLICIES[name].make(PolicySettings(caps=view.caps, slo=Slo(ttft_s=1.0, tpot_s=0.05)))


def planned(name, view, state=None):
    policy = policy_of(name, view)
    plan, after = policy.plan(view, policy.initial if state is None else state)
    validate(plan, view)
    return plan, after


def plan_of(name, view):
    return planned(name, view)[0]


def asks(rid, num_tokens=100, make=online, **fields):
    return make(rid, num_tokens, **{"max_new_tokens": 400, **fields})


def runs(rid, num_output=10, **fields):
    return decoding(asks(rid, **fields), num_output)


def stopped(plan):
    return [preemption.rid for preemption in plan.preempt]


# What is set aside


@pytest.mark.parametrize("name", ["eco-orca", "eco-srtf", "eco-fastserve"])
def test_all_that_may_be_generated_is_set_aside(name):
    view = view_of(online=(asks("a"), asks("b")), total_kv=900, lengths={"a": 5, "b": 5})
    plan = plan_of(name, view)
    assert plan.prefill == {"a": 100} and plan.promise["a"] == 400
    assert plan.skipped == {"b": SkipReason.MEMORY_BUDGET}


@pytest.mark.parametrize("name", ["eco-multires", "eco-synccoupled"])
@pytest.mark.parametrize(("page", "promised"), [(1, 64), (16, 64), (64, 64), (128, 128)])
def test_the_expected_length_is_set_aside_in_whole_blocks(name, page, promised):
    view = view_of(online=(asks("a"),), lengths={"a": 33}, caps=caps(page_size=page))
    assert plan_of(name, view).promise == {"a": promised}
    # What was generated before it was stopped counts.
    again = replace(asks("a"), num_output_tokens=30)
    view = view_of(online=(again,), lengths={"a": 33}, caps=caps(page_size=page))
    assert plan_of(name, view).promise == {"a": promised}
    # Never more than it may generate.
    short = asks("a", max_new_tokens=40)
    view = view_of(online=(short,), caps=caps(page_size=page))
    assert plan_of(name, view).promise == {"a": 40}


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_a_block_is_set_aside_and_another_when_it_is_used_up(name):
    view = view_of(online=(asks("a"),))
    assert plan_of(name, view).promise == {"a": BLOCK}
    some = (runs("used", BLOCK), runs("fresh", BLOCK - 1), runs("ends", 400))
    view = view_of(running=some, promises={"used": BLOCK, "fresh": BLOCK, "ends": 400})
    assert plan_of(name, view).promise == {"used": 2 * BLOCK}
    # Pages as large as blocks are the engine's to find.
    view = view_of(running=some, promises=view.promises, caps=caps(page_size=32))
    assert not plan_of(name, view).promise


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_where_no_block_is_free_the_last_are_stopped_for_the_first(name):
    old, young = runs("old", 32), runs("young", 32)
    job = runs("job", 32, num_tokens=5, make=offline)
    promises = dict.fromkeys(["old", "job", "young"], 32)
    view = view_of(running=(young, job, old), promises=promises, total_kv=340)
    plan = plan_of(name, view)
    assert stopped(plan) == ["job"] and plan.promise == {"old": 64, "young": 64}
    plan = plan_of(name, replace(view, total_kv=302))
    assert stopped(plan) == ["job", "young"] and plan.promise == {"old": 64}
    assert {p.mode for p in plan.preempt} == {PreemptMode.RECOMPUTE}


def test_what_does_not_fit_the_memory_at_all_is_promised_less():
    view = view_of(online=(asks("a", 500, max_new_tokens=4000),), total_kv=1000)
    for name in NAMES:
        plan = plan_of(name, view)
        assert plan.prefill and plan.promise["a"] < 500, name


def test_a_promise_that_stands_is_not_made_again():
    view = view_of(online=(asks("a"),), promises={"a": 400})
    assert plan_of("eco-orca", view).prefill and not plan_of("eco-orca", view).promise
    # An engine that cannot keep promises goes by its own rule.
    for name in NAMES:
        view = view_of(online=(asks("a"),), running=(runs("b"),), caps=make_caps())
        plan = plan_of(name, view)
        assert plan.prefill and not plan.promise and not plan.preempt, name


# Who is stopped


@pytest.mark.parametrize("name", NAMES)
def test_where_the_next_tokens_do_not_fit_the_last_in_the_order_are_stopped(name):
    some = tuple(
        runs(rid, 20, make=make)
        for rid, make in (("old", online), ("job", offline), ("new job", offline), ("new", online))
    )
    promises = {r.rid: 400 for r in some}
    held = sum(r.num_computed_tokens for r in some)
    view = view_of(running=some, promises=promises, total_kv=held + 2)
    assert stopped(plan_of(name, view)) == ["new job"]
    # One that goes on makes room for itself; the first does whatever happens.
    view = view_of(running=some, promises=promises, total_kv=held - 200)
    assert stopped(plan_of(name, view)) == ["new job", "job"]
    view = view_of(running=some[:1], promises=promises, total_kv=110)
    assert not plan_of(name, view).preempt


def test_vllm_copies_to_host_memory_where_there_is_any():
    some = (runs("old", 32), runs("young", 32))
    for host_free, mode in ((None, PreemptMode.RECOMPUTE), (0, PreemptMode.CHECKPOINT)):
        view = view_of(running=some, total_kv=263, host_free=host_free)
        assert [(p.rid, p.mode) for p in plan_of("eco-vllm", view).preempt] == [("young", mode)]
        plan = plan_of("eco-fastgen", view)
        assert [p.mode for p in plan.preempt] == [PreemptMode.RECOMPUTE]


# First come, first served


@pytest.mark.parametrize("name", ["eco-orca", "eco-vllm", "eco-fastgen"])
def test_nobody_passes_the_first_that_waits(name):
    large, small = asks("large", 450), asks("small", 10)
    held = runs("held", 10, num_tokens=800)
    view = view_of(running=(held,), promises={"held": 400}, online=(large, small), total_kv=1300)
    plan = plan_of(name, view)
    assert not plan.prefill and plan.skipped == {"large": SkipReason.MEMORY_BUDGET}
    barred = replace(view, barred=("large",))
    assert list(plan_of(name, barred).prefill) == ([] if name == "eco-orca" else ["small"])
    # Online ones come first, whoever came first.
    job = asks("job", 10, make=offline, arrival_seq=-1)
    view = view_of(online=(small,), offline=(job,))
    assert list(plan_of(name, view).prefill) == ["small", "job"]


def test_orca_and_fastserve_run_8_at_once():
    some = tuple(runs(f"r{i}", 300) for i in range(6))
    waits = tuple(asks(f"w{i}", arrival_s=1.0) for i in range(20))
    view = view_of(running=some, online=waits, total_kv=10**6)
    plan = plan_of("eco-orca", view)
    assert list(plan.prefill) == ["w0", "w1"] and plan.skipped == {"w2": SkipReason.BATCH_SIZE}
    assert len(plan_of("eco-srtf", view).prefill) == 20
    # Those that come are served before those that have had much, which are stopped.
    plan = plan_of("eco-fastserve", view)
    assert len(plan.prefill) == 8 and stopped(plan) == [f"r{i}" for i in reversed(range(6))]


def test_prompts_are_whole_or_fill_the_target_forward_size():
    some = tuple(runs(f"r{i}") for i in range(12))
    waits = (asks("a", 400), asks("b", 300), asks("c", 50))
    lengths = {"a": 9, "b": 8, "c": 7}
    view = view_of(running=some, online=waits, lengths=lengths, total_kv=20_000)
    assert plan_of("eco-srtf", view).prefill == {"c": 50, "b": 300, "a": 400}
    assert plan_of("eco-vllm", view).prefill == {"a": 400, "b": 300, "c": 50}
    assert plan_of("eco-fastgen", view).prefill == {"a": 400, "b": LEAST - 12 - 400}
    view = view_of(running=some, unfinished=(prefilled(asks("b", 900), 100),), online=waits[2:])
    assert plan_of("eco-fastgen", view).prefill == {"b": LEAST - 12}
    view = replace(view, unfinished=(prefilled(asks("b", 500), 100),))
    assert plan_of("eco-fastgen", view).prefill == {"b": 400, "c": 50}
    # As many decodes as make an iteration leave nothing for prompts, which wait.
    crowd = tuple(runs(f"r{i}", num_tokens=5) for i in range(LEAST))
    view = view_of(running=crowd, unfinished=view.unfinished, total_kv=10**6)
    view = replace(view, caps=caps(max_chunk_tokens=None))
    assert not plan_of("eco-fastgen", view).prefill and not plan_of("eco-fastgen", view).preempt


@pytest.mark.parametrize("name", NAMES)
def test_only_vllm_has_prompts_first_where_batches_are_not_mixed(name):
    view = view_of(
        running=(runs("r"),),
        online=(asks("a"),),
        must_decode=True,
        caps=caps(mixed_batches=False),
    )
    plan = plan_of(name, view)
    assert (plan.decodes, bool(plan.prefill)) == (
        (False, True) if name == "eco-vllm" else (True, False)
    )
    assert ("enable_mixed_chunk" in POLICIES[name].server_flags) is (name != "eco-vllm")


# Shortest remaining time first


def test_srtf_takes_who_ends_first_and_stops_who_ends_last():
    lengths = {"long": 300, "mid": 200, "short": 195, "shorter": 50}
    some = (runs("long"), runs("mid"))
    view = view_of(
        running=some,
        promises=dict.fromkeys(["long", "mid"], 400),
        online=(asks("short"), asks("shorter")),
        total_kv=1500,
        lengths=lengths,
    )
    plan = plan_of("eco-srtf", view)
    assert stopped(plan) == ["long"] and list(plan.prefill) == ["shorter"]
    # What is left counts, not the whole, and equals do not stop each other.
    near = (runs("long", 280), runs("mid", 150))
    view = replace(view, running=near, lengths=lengths | {"shorter": 55, "short": 55})
    assert not plan_of("eco-srtf", view).preempt
    # Online requests are before offline ones however long they are.
    job = runs("short", make=offline)
    view = replace(view, running=(job, near[0]), online=(asks("mid"),), total_kv=1300)
    assert stopped(plan_of("eco-srtf", view)) == ["short"]


# Multi-level feedback queue


def level(num_tokens, num_output=0):
    view = view_of()
    packing = _Packing(view, policy_of("eco-fastserve", view).options)
    return packing._level(runs("r", num_output, num_tokens=num_tokens))


def test_a_request_joins_the_level_that_its_prompt_fits_and_goes_down_from_there():
    assert [level(n) for n in (1, 128, 129, 256, 257, 512, 1024, 2048, 5000)] == [
        *(0, 0, 1, 1, 2, 2, 3, 4, 4)
    ]
    assert [level(100, n) for n in (1, 2, 3, 6, 7, 14, 15, 1000)] == [1, 1, 2, 2, 3, 3, 4, 4]
    # It has used two iterations of its level's two for its prompt.
    assert [level(200, n) for n in (0, 1, 4, 5)] == [1, 2, 2, 3]


def test_who_comes_is_served_before_who_has_had_more_also_behind_a_crowd():
    some = tuple(runs(f"r{i}", 300) for i in range(8))
    old = tuple(asks(f"w{i}", num_output_tokens=20) for i in range(2 * WINDOW + 50))
    fresh = asks("fresh")
    view = view_of(running=some, online=(*old, fresh), total_kv=10**6)
    plan = plan_of("eco-fastserve", view)
    assert stopped(plan) == ["r7"] and list(plan.prefill) == ["fresh"]
    assert not plan_of("eco-fastserve", replace(view, online=old)).preempt


# MultiRes


@given(
    prompts=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 400)), min_size=1, max_size=8),
    num_running=st.integers(0, 20),
    total_kv=st.integers(1500, 8000),
)
def test_multires_takes_the_closest_of_those_that_fit(prompts, num_running, total_kv):
    some = tuple(runs(f"r{i}", num_tokens=20) for i in range(num_running))
    waits = tuple(asks(f"w{i}", n) for i, (n, _) in enumerate(prompts))
    view = view_of(
        running=some,
        promises={r.rid: 32 for r in some},
        online=waits,
        total_kv=total_kv,
        lengths={f"w{i}": length for i, (_, length) in enumerate(prompts)},
    )
    plan = plan_of("eco-multires", view)
    memory = total_kv - sum(r.num_computed_tokens for r in some) - 24 * num_running
    compute = LEAST - num_running

    def demand(request):
        blocks = -(-view.lengths[request.rid] // BLOCK)
        return request.num_prompt_tokens, request.num_prompt_tokens + min(blocks * BLOCK, 400) + 2

    fitting = [r for r in waits if demand(r)[1] <= memory]
    if not fitting:
        assert not plan.prefill
        return

    def distance(request):
        num_tokens, need = demand(request)
        return hypot((num_tokens - compute) / LEAST, (need - memory) / total_kv)

    closest = min(fitting, key=distance)
    assert next(iter(plan.prefill)) == closest.rid
    assert sum(plan.prefill.values()) + num_running <= LEAST


# Groups


def grouped(**fields):
    """Two of one block, two of three, one of two."""
    lengths = {"a1": 20, "b1": 90, "a2": 32, "c1": 33, "b2": 65}
    return view_of(online=tuple(asks(rid, 50) for rid in lengths), lengths=lengths, **fields)


@pytest.mark.parametrize("name", GROUPED)
def test_requests_of_equal_expected_length_start_together(name):
    plan, state = planned(name, grouped())
    assert state == Groups(chosen=(("a1", "a2"), ("b1", "b2"), ("c1",)), is_open=True)
    assert list(plan.prefill) == ["a1", "a2", "b1", "b2", "c1"]


def test_a_group_is_split_where_memory_ends_and_others_wait_for_the_end_of_one():
    view = grouped(total_kv=400)
    plan, state = planned("eco-synccoupled", view)
    assert state == Groups(chosen=(("a1", "a2"), ("b1",)), is_open=False)
    assert list(plan.prefill) == ["a1", "a2", "b1"]

    def later(*rids, total_kv=400):
        some = tuple(decoding(r, 10) for r in view.online if r.rid in rids)
        left = tuple(r for r in view.online if r.rid not in ("a1", "a2", "b1"))
        promises = {r.rid: 96 if r.rid == "b1" else 32 for r in some}
        return replace(view, running=some, online=left, promises=promises, total_kv=total_kv)

    # There is room, but none of the groups is over.
    plan, after = planned("eco-synccoupled", later("a1", "b1", total_kv=9000), state)
    assert not plan.prefill and after == Groups(chosen=(("a1",), ("b1",)), is_open=False)
    # One is, and what fits now is taken.
    plan, after = planned("eco-synccoupled", later("b1"), after)
    assert after == Groups(chosen=(("b1",), ("c1",)), is_open=False)
    plan, after = planned("eco-synccoupled", later("b1", total_kv=9000), state)
    assert after == Groups(chosen=(("b1",), ("c1",), ("b2",)), is_open=True)


@pytest.mark.parametrize("name", GROUPED)
def test_who_does_not_fit_the_iteration_follows_before_others_are_chosen(name):
    first, second, third = asks("first", 400), asks("second", 400), asks("third", 400)
    view = view_of(online=(first, second, third))
    plan, state = planned(name, view)
    assert plan.prefill == {"first": 400, "second": LEAST - 400}
    assert state.chosen == (("first", "second", "third"),)
    chat = asks("chat", 10, max_new_tokens=32)
    view = view_of(
        running=(decoding(first),),
        unfinished=(prefilled(second, 112),),
        online=(third, chat),
        promises={"first": 400},
    )
    plan, after = planned(name, view, state)
    assert plan.prefill == {"second": 288, "third": LEAST - 1 - 288} and after == state


@pytest.mark.parametrize("name", GROUPED)
def test_offline_requests_that_were_chosen_keep_no_online_one_out(name):
    state = Groups(chosen=(("runs", "job"),), is_open=True)
    view = view_of(
        running=(runs("runs", make=offline),),
        offline=(asks("job", make=offline), asks("other", make=offline)),
        online=(asks("chat"),),
    )
    paused = replace(view, offline_limits=OfflineLimits(paused=True))
    plan, after = planned(name, paused, state)
    assert list(plan.prefill) == ["chat"] and after.chosen == (("runs", "job"), ("chat",))
    owing = replace(view, recompute_debt_s=1.0)
    assert list(planned(name, owing, state)[0].prefill) == ["chat"]
    tight = replace(view, total_kv=3000, offline=(asks("job", 2900, make=offline),))
    assert list(planned(name, tight, state)[0].prefill) == ["chat"]
    # Whoever the engine refuses for now does not either, nor one who is gone.
    only = Groups(chosen=(("chat", "gone"),), is_open=False)
    alone = replace(view, running=(), online=(asks("chat"), asks("next")), barred=("chat",))
    assert "next" in planned(name, alone, only)[0].prefill


# All of them


@pytest.mark.parametrize("name", NAMES)
def test_only_a_window_of_those_that_wait_is_looked_at(name):
    looked_at = []

    def waiting():
        for i in range(5000):
            request = asks(f"w{i}", 10_000)
            looked_at.append(request)
            yield request

    class Crowd:
        def __iter__(self):
            return waiting()

    view = view_of(running=(runs("r", 300),), online=Crowd(), total_kv=2000)
    policy = policy_of(name, view)
    assert not policy.plan(view, policy.initial)[0].prefill
    most = 5000 + WINDOW if name in ("eco-srtf", "eco-fastserve") else WINDOW
    assert len(looked_at) <= most
