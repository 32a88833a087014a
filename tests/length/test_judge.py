"""How estimates are judged."""

from __future__ import annotations

import random

import pytest

from cosched.length import Facts, LengthConfig, LengthModel
from cosched.length.judge import Judged, score, stream


def test_a_score_of_what_is_known_exactly():
    judged = [Judged(n, n, n - 64 if n > 64 else None, n) for n in (10, 50, 100, 300)]
    found = score([judged], coverage=0.95)
    assert (found.error, found.pinball, found.later, found.unasked) == (0, 0, 0, 0)
    assert (found.coverage, found.allocated) == (1, 1)
    assert found.tau == pytest.approx(1)
    assert (found.requests, found.mean) == (4, 115)


def test_a_score_of_a_constant():
    judged = [Judged(100, 200, None, n) for n in (50, 150, 250, 350)]
    found = score([judged], coverage=0.75)
    assert found.constant == 100  # around 200
    assert found.error == 125  # 50, 50, 150, 250
    assert found.tau == 0
    assert found.coverage == 0.5
    assert found.allocated == 1
    assert found.pinball == pytest.approx(62.5 + (150 + 50) * 0.25 / 4 + (50 + 150) * 0.75 / 4)


def test_nobody_is_told_what_has_not_ended_yet():
    model = LengthModel(LengthConfig())
    requests = [(Facts(str(i), "", (), 500, None, 20), 7) for i in range(30)]
    judged = stream(model, requests, delay=10)
    assert [one.median for one in judged[:11]] == [500] * 11
    assert [one.median for one in judged[11:]] == [7] * 19


def test_rank_correlation_is_that_of_all_pairs():
    rng = random.Random(0)
    medians = [rng.randint(1, 30) for _ in range(200)]
    lengths = [max(1, median + rng.randint(-10, 10)) for median in medians]
    judged = [Judged(m, m, None, n) for m, n in zip(medians, lengths, strict=True)]

    def sign(value):
        return (value > 0) - (value < 0)

    pairs = [(i, j) for i in range(200) for j in range(i)]
    products = [sign(medians[i] - medians[j]) * sign(lengths[i] - lengths[j]) for i, j in pairs]
    ties = [sum(v[i] != v[j] for i, j in pairs) for v in (medians, lengths)]
    tau = sum(products) / (ties[0] * ties[1]) ** 0.5
    assert score([judged], coverage=0.9).tau == pytest.approx(tau, abs=0.01)
