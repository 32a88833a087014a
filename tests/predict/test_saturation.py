"""What chat needs of a device: 1.0 where iterations at the TPOT target just keep up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.predict.saturation import ChatRates, saturation

WEIGHTS_S, PROMPT_S, DECODE_S = 10e-3, 50e-6, 200e-6


def predict_s(totals):
    if not totals.num_new and not totals.num_decodes:
        return 0.0
    return WEIGHTS_S + PROMPT_S * totals.num_new + DECODE_S * totals.num_decodes


def rates(per_s, **changes):
    fields = {"num_new": 1000, "num_cached": 0, "num_decodes": 200, "context": 1100}
    return ChatRates(requests_per_s=per_s, **fields | {"tpot_s": 0.05} | changes)


def share(per_s, *, max_running=1000, kv_tokens=10**9, **changes):
    return saturation(
        rates(per_s, **changes), predict_s, max_running=max_running, kv_tokens=kv_tokens
    )


# In 50 ms, 10 of them for the weights, as many requests per second as take 40 ms.
MOST_PER_S = 0.04 / (0.05 * (1000 * PROMPT_S + 200 * DECODE_S))


def test_it_is_one_where_iterations_at_the_target_just_keep_up():
    assert share(MOST_PER_S) == pytest.approx(1, rel=0.02)
    assert share(MOST_PER_S / 2) == pytest.approx(0.5, rel=0.03)
    assert share(2 * MOST_PER_S) == pytest.approx(2, rel=0.02)
    assert share(0) == 0


@given(st.floats(0.5, 50), st.floats(1.05, 3))
def test_it_grows_with_the_load_and_falls_with_the_target(per_s, times):
    assert share(per_s * times) > share(per_s)
    assert share(per_s, tpot_s=0.05 * times) < share(per_s)


def test_slots_and_memory_limit_it_before_the_target():
    free = share(4, tpot_s=math.inf)
    for limits in ({"max_running": 8}, {"kv_tokens": 8 * 1100}):
        # 8 decodes and the 40 prompt tokens that come with them.
        alone_s = WEIGHTS_S + 40 * PROMPT_S + 8 * DECODE_S
        assert share(4, tpot_s=math.inf, **limits) == pytest.approx(alone_s * 4 * 200 / 8, rel=0.05)
        assert share(4, tpot_s=math.inf, **limits) > free


def test_a_target_that_nothing_meets_does_not_count():
    assert share(4, tpot_s=WEIGHTS_S / 2) == share(4, tpot_s=math.inf) < math.inf


def test_requests_that_only_compute_prompts_have_one_too():
    assert 0 < share(5, num_decodes=0, context=1) < 1
