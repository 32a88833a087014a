"""What online requests ask for: those that wait count as well as those that are served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cosched.engine.chat_load import WINDOW_S, ChatLoad


def request(arrival_s, *, num_prompt=100, num_cached=40):
    return SimpleNamespace(
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt,
        req=SimpleNamespace(cached_tokens=num_cached),
    )


def served(load, arrivals, *, tpot_s=0.05):
    for arrival_s in arrivals:
        one = request(arrival_s)
        load.began(one, tpot_s)
        load.ended(one, 11)


def test_rates_are_of_the_last_minute_and_sizes_of_recent_requests():
    load = ChatLoad()
    assert load.rates(5.0, [], tokens_per_decode=1.0) is None
    served(load, range(100))
    rates = load.rates(100.0, [request(95.0)] * 20, tokens_per_decode=2.0)
    assert rates.requests_per_s == pytest.approx((59 + 20) / WINDOW_S)
    assert (rates.num_new, rates.num_cached, rates.num_decodes) == pytest.approx((60, 40, 5))
    assert rates.context == pytest.approx(105), "of a decode in the middle of a reply"
    assert rates.tpot_s == 0.05
    late = load.rates(100 + 2 * WINDOW_S, [request(95.0)], tokens_per_decode=1.0)
    assert late.requests_per_s == 0, "what came long ago is no load, also if it still waits"


def test_the_tightest_target_of_the_last_minute_counts():
    load = ChatLoad()
    served(load, [0.0], tpot_s=0.01)
    served(load, range(1, 80), tpot_s=None)
    assert load.rates(30.0, [], tokens_per_decode=1.0).tpot_s == 0.01
    assert load.rates(90.0, [], tokens_per_decode=1.0).tpot_s == float("inf")
