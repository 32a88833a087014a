"""How many tokens an iteration needs to make full use of the device."""

from __future__ import annotations

import math
from bisect import bisect_left

from cosched.core.batch import BatchTotals
from cosched.core.estimates import Predictor

TILE = 128
"""Tokens that a matrix multiplication works on at a time: fewer take as long."""

LEAST = 512
"""A predictor that learns while the server runs takes larger iterations than it has seen for slow
ones. Without a least size it would never see them."""

_LARGEST = 64 * TILE
_SHARE = 0.95


def target_forward_size(predictor: Predictor) -> int:
    """The least multiple of `TILE` with 95 % of the best prefill rate, and `LEAST` at least: the
    target forward size of EcoServe (§2.1, "the forward size that saturates GPU utilization")
    [tokens].

    The rate is that of one prompt of that size, with nothing else and nothing cached; the best is
    that of the powers of two from `LEAST` up to 8,192 tokens, beyond which attention makes it
    smaller. Between two powers the rate is taken to grow. About ten predictions.
    """

    def rate(num_tiles: int) -> float:
        totals = BatchTotals()
        totals.add_prefill(num_tiles * TILE, 0)
        seconds = predictor.predict_s(totals)
        return num_tiles * TILE / seconds if seconds > 0 else math.inf

    sizes = [LEAST // TILE]
    while sizes[-1] < _LARGEST // TILE:
        sizes.append(2 * sizes[-1])
    rates = [rate(size) for size in sizes]
    enough = _SHARE * max(rates)
    first = next(i for i, reached in enumerate(rates) if reached >= enough)
    if not first:
        return LEAST
    between = range(sizes[first - 1] + 1, sizes[first])
    return TILE * between[0] + TILE * int(bisect_left(between, enough, key=rate))
