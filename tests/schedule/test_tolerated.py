"""What offline work may take of an iteration where a share of TPOT is promised."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.view import ToleranceHeadroom, TpotHeadroom
from cosched.schedule.tolerated import _ENOUGH, Spent, tolerated
from tests.schedule.test_chat_pace import TARGET_S, Gpu, builder_of

GPU = Gpu(fixed_s=0.001, token_s=20e-6)
BEGINS = TpotHeadroom(share=0.05, saved_s=1.0, usual_s=1.0)


def part(builder, headroom=BEGINS, spent=Spent(), most_s=TARGET_S):  # noqa: B008  # immutable
    return tolerated(builder, spent, headroom, most_s)


def with_room(room):
    """So much of what a promise begins with is left."""
    return replace(BEGINS, saved_s=room)


def test_offline_work_stops_where_nothing_is_saved():
    builder = builder_of(Gpu(weights_s=0.0, kv_s=0.0))  # nothing rides free
    for room in (0.0, -1.0):
        assert part(builder, with_room(room)).seconds == 0.0
    assert part(builder, spent=Spent(9, 30.0, pending_s=1.0)).seconds == 0.0, "it is spent"


@given(st.floats(1e-6, 1e-4), st.floats(0, 1e-7), st.integers(1, 100), st.integers(0, 100))
def test_the_more_is_saved_the_longer_are_iterations(token_s, kv_s, num_chats, num_batch):
    builder = builder_of(Gpu(token_s=token_s, kv_s=kv_s), num_chats=num_chats, num_batch=num_batch)
    found = [part(builder, with_room(room)).seconds for room in (0.01, 0.1, 1.0, 10.0)]
    assert found == sorted(found)
    assert found[-1] <= TARGET_S * 1.001


def test_tokens_that_ride_free_are_taken_at_any_price():
    """The device reads weights and KV for 8 ms: meanwhile it computes some 400 tokens."""
    builder = builder_of(GPU, num_batch=0)
    alone_s = builder.ledger.seconds()
    riding = part(builder, with_room(0.01))
    assert riding.admits
    assert alone_s <= riding.seconds < 1.02 * alone_s


def test_offline_decodes_wait_for_an_hour_with_few_chats():
    spent = Spent(1000, num_chats=30.0)
    gpu = Gpu(kv_s=2e-7, weights_s=0.0)
    few, many = (
        part(builder_of(gpu, num_chats=num, num_waiting=0), spent=spent).num_decodes
        for num in (5, 60)
    )
    assert few == 30
    assert many == 0


def test_a_few_replies_about_long_documents_decode_where_many_do_not_fit():
    gpu = Gpu(kv_s=1e-7, weights_s=0.0)
    builder = builder_of(gpu, num_batch=_ENOUGH, num_waiting=0)
    alone_s = builder.ledger.seconds()
    found = part(builder, with_room(100.0), most_s=alone_s + 3 * gpu.kv_s * 1001)
    assert found.num_decodes == 2


def test_no_reply_is_made_slower_than_one_in_a_hundred_is_alone():
    builder = builder_of(GPU)
    alone_s = builder.ledger.seconds()
    rich = with_room(1000.0)
    assert part(builder, rich).seconds > 1.5 * alone_s
    for request in builder.online.requests:
        object.__setattr__(request, "first_token_s", builder.view.start_s)
    tokens = builder.online.contexts[0] - builder.online.requests[0].num_prompt_tokens
    most_s = 1.2 * alone_s / tokens
    assert part(builder, replace(rich, most_s=most_s)).seconds <= 1.201 * alone_s
    late = part(builder, replace(rich, most_s=most_s / 2)).seconds
    assert late <= 1.051 * alone_s, "the share of each iteration breaks no promise"


def test_prompts_begin_while_decodes_pause_until_enough_replies_wait():
    spent = Spent(1000, num_chats=1.0)
    for num_batch, admits in ((_ENOUGH - 1, True), (_ENOUGH, False)):
        found = part(builder_of(GPU, num_batch=num_batch), with_room(0.05), spent)
        assert found.admits == admits
        assert found.num_decodes < num_batch


def test_the_last_tokens_of_a_prompt_set_no_price():
    """They would be taken for a job of such prompts, each over a long prefix."""
    builder = builder_of(GPU, num_batch=0)
    tail = replace(builder.view.offline[0], rid="tail", num_computed_tokens=99_990)
    beside = builder_of(GPU, num_batch=0, unfinished=(tail,))
    assert part(beside, with_room(0.01)) == part(builder, with_room(0.01))


def test_what_is_spent_is_pending_until_replies_end():
    headroom = ToleranceHeadroom(tpot=replace(BEGINS, num_tokens=100.0))
    builder = builder_of(GPU, num_chats=10, num_batch=0, tolerance_headroom=headroom)
    alone_s = builder.ledger.seconds()
    spent = Spent()
    for _ in range(1000):
        spent = spent.after(builder, alone_s - 0.001)
    assert spent.num_chats == pytest.approx(10)
    assert spent.pending_s == pytest.approx(10 * 0.001, rel=0.01)
    for _ in range(100):
        spent = spent.after(builder, alone_s)
    assert spent.pending_s == pytest.approx(10 * 0.001 / math.e, rel=0.02)
    silent = builder_of(GPU, num_chats=0, tolerance_headroom=headroom)
    assert spent.after(silent, 0.0) == spent
