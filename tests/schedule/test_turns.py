"""Decodes alone, or prefills beside them: the default policy with speculative decoding."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from tests.factories import FakeView, Linear, decoding, make_caps, offline, prefilled
from tests.schedule.test_cosched import chat, planned, replying

CAPS = make_caps(
    promises=True, max_chunk_tokens=4096, max_prefill_tokens=8192, max_running_requests=48
)
SLOW = Linear(fixed_s=0.02)
"""A decode alone takes 20 ms, whatever the batch: a token of it 8 ms with 2.5 tokens per decode."""


def view_of(*, num_running=20, num_tokens=40, **fields):
    """Chats that are ahead of their targets, offline work that decodes, and more that waits."""
    running = [replying(f"on{i}", num_tokens=num_tokens, ago_s=0.1) for i in range(2)]
    running += [decoding(offline(f"run{i}", max_new_tokens=200)) for i in range(num_running - 2)]
    waiting = [offline(f"off{i}", 60, max_new_tokens=100) for i in range(30)]
    values = {"caps": CAPS, "now_s": 10.0, "start_s": 10.0, "total_kv": 50_000}
    values |= {"running": tuple(running), "offline": waiting, "tokens_per_decode": 2.5}
    return FakeView(**values | fields)


def test_offline_prefills_wait_for_company():
    view = view_of(num_running=46)
    state, num_alone = None, 0
    while True:
        plan, state = planned(view, state, predictor=SLOW)
        if plan.prefill:
            break
        num_alone += 1
    assert num_alone > 2
    assert state.idle_s == 0
    # The more slots are free, the more a wait costs.
    plan, _ = planned(view_of(num_running=8), predictor=SLOW)
    assert len(plan.prefill) > 15


def test_without_drafts_nothing_waits():
    plan, _ = planned(view_of(num_running=46, tokens_per_decode=1.0), predictor=SLOW)
    assert len(plan.prefill) == 2


def test_a_long_prefill_that_fills_an_iteration_does_not_wait():
    waiting = [offline(f"long{i}", 4000) for i in range(3)]
    view = view_of(num_running=46, num_tokens=200, offline=waiting)
    plan, _ = planned(view, predictor=Linear(fixed_s=0.005))
    assert plan.prefill


def test_an_online_prefill_does_not_wait_and_offline_ones_ride_along():
    plan, _ = planned(view_of(num_running=44, online=[chat("new")]), predictor=SLOW)
    assert next(iter(plan.prefill)) == "new" and len(plan.prefill) > 1


def test_decodes_that_are_behind_run_alone_first():
    """Beside a prefill they would fall further behind, with a token in place of two or three."""
    behind = [replying(f"on{i}", num_tokens=2, ago_s=0.2) for i in range(2)]
    view = view_of(running=tuple(behind), online=[chat("new")])
    plan, _ = planned(view, predictor=SLOW)
    assert not plan.prefill
    plan, _ = planned(replace(view, tokens_per_decode=1.0), predictor=SLOW)
    assert plan.prefill


def test_offline_decodes_that_cannot_pause_are_preempted_where_chats_would_be_late():
    heavy = Linear(fixed_s=0.01, token_s=0.004)  # of 46 decodes 194 ms
    view = view_of(num_running=46, num_tokens=2, tokens_per_decode=2.0)
    plan, _ = planned(view, predictor=heavy)
    preempted = {preemption.rid for preemption in plan.preempt}
    assert 0 < len(preempted) < 44 and not plan.prefill
    assert all(rid.startswith("run") for rid in preempted)
    left = 46 - len(preempted)
    assert (0.01 + 0.004 * left) / 2 < 0.05 <= (0.01 + 0.004 * (left + 1)) / 2
    # Where the engine can pause them, it does.
    pausing = replace(view, caps=make_caps(partial_decode=True, promises=True))
    assert not planned(pausing, predictor=heavy)[0].preempt


def test_nothing_is_preempted_where_that_would_not_help():
    hopeless = Linear(fixed_s=0.3)
    view = view_of(num_running=20, num_tokens=2, tokens_per_decode=2.0)
    assert not planned(view, predictor=hopeless)[0].preempt


@given(
    num_running=st.integers(2, 48),
    num_tokens=st.integers(2, 300),
    tokens_per_decode=st.floats(1.0, 6.0),
    fixed_s=st.floats(0.001, 0.05),
    token_s=st.floats(1e-5, 2e-3),
    has_unfinished=st.booleans(),
    num_online=st.integers(0, 3),
)
@example(  # more requests than slots
    num_running=48,
    num_tokens=20,
    tokens_per_decode=2.0,
    fixed_s=0.03125,
    token_s=1e-5,
    has_unfinished=True,
    num_online=0,
)
def test_prefills_come_at_last(
    num_running, num_tokens, tokens_per_decode, fixed_s, token_s, has_unfinished, num_online
):
    """In the same situation again and again: an iteration always does something, and where chats
    get ahead of their targets, what waits begins."""
    unfinished = (prefilled(offline("half", 900), 300),) if has_unfinished else ()
    view = view_of(
        num_running=num_running,
        num_tokens=num_tokens,
        tokens_per_decode=tokens_per_decode,
        unfinished=unfinished,
        online=[chat(f"new{i}", 200, seq=i) for i in range(num_online)],
        offline=[offline(f"off{i}", 60) for i in range(5)] if num_running < 48 else [],
    )
    predictor = Linear(fixed_s=fixed_s, token_s=token_s)
    state = None
    for _ in range(400):
        plan, state = planned(view, state, predictor=predictor)
        assert plan.prefill or plan.decodes
        if plan.prefill:
            return
    decode_s = fixed_s + token_s * num_running
    is_ahead = decode_s / tokens_per_decode < 0.9 * 0.05 and num_tokens >= 20
    has_room = decode_s < 0.15 / 2 and (num_running < 48 or has_unfinished)
    # Where each decode takes the same time in any batch, company is worth nothing.
    gains_by_company = fixed_s > token_s * num_running / 4
    assert not (is_ahead and has_room and gains_by_company)
