"""Predictions made wrong on purpose: how much a policy depends on its predictor (HyGen §5.4)."""

from __future__ import annotations

import math
from hashlib import blake2b
from statistics import NormalDist

__all__ = ["error_factor"]


def error_factor(error: float, number: int) -> float:
    """What the predictions of one plan are multiplied by: lognormal, exp(s * z - s**2 / 2), with
    mean 1 and standard deviation `error`. A hash of the plan's number takes the place of chance, so
    it is the same on every rank and in every run; 1.0 where `error` is 0."""
    if not error:
        return 1.0
    drawn = int.from_bytes(blake2b(b"%d" % number, digest_size=6).digest())
    z = NormalDist().inv_cdf((drawn + 0.5) / 2**48)
    variance = math.log1p(error**2)
    return math.exp(math.sqrt(variance) * z - variance / 2)
