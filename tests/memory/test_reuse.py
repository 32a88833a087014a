"""Who comes back is learned from requests that come and go."""

from __future__ import annotations

import math
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.memory.reuse import BIN_EDGES_S, ReuseModel, block_hashes


def tokens(seed: int, count: int) -> array:
    draw = random.Random(seed)
    return array("q", [draw.randrange(1000) for _ in range(count)])


class Chat:
    """Sessions of which a share goes on, each turn after the same think time."""

    def __init__(self, model: ReuseModel) -> None:
        self.model = model

    def run(self, *, sessions: int, share: float, think_s: float, gap_s: float = 5.0) -> float:
        """Two turns each; returns the time after the last."""
        draw = random.Random(1)
        events = []
        for number in range(sessions):
            start_s = number * gap_s
            events.append((start_s, number, 200))
            if draw.random() < share:
                events.append((start_s + think_s, number, 400))
        for time_s, number, count in sorted(events):
            hashes = block_hashes(tokens(number, count))
            turn = self.model.arrived(hashes, time_s)
            assert turn == (1 if count == 200 else 2)
            self.model.ended(
                hashes, turn=turn, num_tokens=count + 20, num_needed=count + 20, now_s=time_s
            )
        self.model.refresh(time_s)
        return time_s


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_that_comes_back_is_learned(share):
    model = ReuseModel()
    Chat(model).run(sessions=600, share=share, think_s=20.0)
    hashes = block_hashes(tokens(-1, 200))
    kind = model.ended(hashes, turn=1, num_tokens=220, num_needed=220, now_s=1e4)
    assert model.chance(kind, 0.0) == pytest.approx(share, abs=0.1)
    assert model.chance(kind, 100.0) < 0.5 + share / 10, "all that come back have come"
    assert model.chance(kind, 2 * BIN_EDGES_S[-1]) == 0.0


def test_a_return_that_takes_longer_counts_less_where_memory_is_turned_over_fast():
    model = ReuseModel()
    now_s = Chat(model).run(sessions=600, share=0.9, think_s=60.0)
    patient = model.chance(0, 0.0)
    model.refresh(now_s, discount_s=10.0)
    hurried = model.chance(0, 0.0)
    assert hurried < 0.2 * patient
    assert model.chance(0, 50.0) > hurried, "it is nearer now"


def test_kinds_are_learned_apart():
    model = ReuseModel()
    Chat(model).run(sessions=400, share=0.9, think_s=10.0)
    once = model.ended(
        block_hashes(tokens(-1, 200)), turn=1, num_tokens=220, num_needed=220, now_s=1e4
    )
    twice = model.ended(
        block_hashes(tokens(-2, 200)), turn=2, num_tokens=220, num_needed=220, now_s=1e4
    )
    # No session had a third turn.
    assert model.chance(once, 0.0) > 0.7 > 0.2 > model.chance(twice, 0.0)


def test_what_changed_long_ago_is_forgotten():
    model = ReuseModel(half_life_s=600.0)
    chat = Chat(model)
    chat.run(sessions=300, share=0.9, think_s=10.0)
    end_s = 300 * 5.0
    for number in range(1000, 1300):
        hashes = block_hashes(tokens(number, 200))
        now_s = end_s + (number - 1000) * 20.0
        model.ended(
            hashes, turn=model.arrived(hashes, now_s), num_tokens=220, num_needed=220, now_s=now_s
        )
    model.advance(now_s + 1000.0)
    model.refresh(now_s + 1000.0)
    assert model.chance(0, 0.0) < 0.2


def test_expected_tokens_are_those_that_have_not_come_back_times_their_chance():
    model = ReuseModel()
    Chat(model).run(sessions=400, share=0.5, think_s=10.0)
    model.advance(12_000.0)  # everybody has come back or is given up
    model.refresh(12_000.0)
    assert model.expected_tokens() == 0
    hashes = block_hashes(tokens(-1, 200))
    kind = model.ended(hashes, turn=1, num_tokens=1000, num_needed=1000, now_s=12_000.0)
    model.refresh(12_000.0, discount_s=120.0)
    assert model.expected_tokens() == pytest.approx(1000 * model.chance(kind, 0.0), rel=0.1)
    model.arrived(block_hashes(tokens(-1, 300)), 12_005.0)
    assert model.expected_tokens() == 0


@pytest.mark.parametrize("num_needed", [0, 100])
def test_only_what_is_needed_of_a_context_is_expected(num_needed):
    model = ReuseModel()
    kind = model.ended([1], turn=1, num_tokens=1000, num_needed=num_needed, now_s=0.0)
    model.refresh(0.0, discount_s=120.0)
    expected = num_needed * model.chance(kind, 0.0)
    assert model.expected_tokens() == pytest.approx(expected, rel=0.1)


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_hash_stands_for_all_tokens_before_it(shared, more):
    one = tokens(1, shared) + tokens(2, more)
    other = tokens(1, shared) + tokens(3, more)
    first, second = block_hashes(one), block_hashes(other)
    assert len(first) == len(second) == (shared + more) // 64
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert first[:same] == second[:same]
    assert same >= shared // 64
    assert same <= (shared + 3) // 64  # three tokens in a row may agree by chance


@given(st.floats(0, 1e5))
def test_chances_change_only_where_it_is_said(age_s):
    model = ReuseModel()
    change_s = model.next_change_s(age_s)
    assert change_s > age_s
    before = math.nextafter(change_s, 0) if change_s < math.inf else 1e9
    assert model.chance(0, age_s) == model.chance(0, before)
    assert 0 <= model.chance(0, age_s) <= 1


def test_a_clock_may_begin_anywhere():
    model = ReuseModel(half_life_s=60.0)
    for step in range(50):
        now_s = 2e9 + 1000.0 * step
        hashes = block_hashes(tokens(step, 200))
        turn = model.arrived(hashes, now_s)
        model.ended(hashes, turn=turn, num_tokens=220, num_needed=220, now_s=now_s)
        model.arrived(hashes, now_s + 5.0)
        model.refresh(now_s)
    assert model.chance(0, 0.0) > 0.8
    model.refresh(1e12)
    assert 0.5 < model.chance(0, 0.0) < 0.9, "what was learned is long forgotten"


def test_who_never_comes_back_is_not_waited_for_at_later_ages():
    """Chat without second turns: what it may hold in two minutes is known before they are over."""
    model = ReuseModel(horizon_s=120.0)
    for second in range(40):
        hashes = [10_000 + second]
        model.arrived(hashes, float(second))
        model.ended(hashes, turn=1, num_tokens=1000, num_needed=1000, now_s=second + 0.5)
    model.advance(40.0)
    believed = model.expected_tokens()
    model.refresh(40.0)
    assert believed > 12_000
    assert model.expected_tokens() < 0.25 * believed
    kind = model.ended([99], turn=1, num_tokens=1000, num_needed=1000, now_s=40.0)
    assert model.chance(kind, 16.0) > 0.25, "its memory is not given away before it is known"
