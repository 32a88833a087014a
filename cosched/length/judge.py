"""How good beliefs about lengths are: a stream of requests, each asked about before it is known."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cosched.length.beliefs import LengthModel
from cosched.length.facts import Facts

__all__ = ["Judged", "Score", "score", "stream"]

LATER = 64
"""Tokens after which a request is asked about again."""
_PAIRS = 200_000

Floats = npt.NDArray[np.float64]


class Judged(NamedTuple):
    """median, upper  estimates at arrival [tokens]
    later    median of what remains after `LATER` tokens; None: it does not get so long
    length   what it got to
    """

    median: float
    upper: float
    later: float | None
    length: int


class Score(NamedTuple):
    """requests   that were judged
    mean       of their lengths [tokens]
    constant   mean absolute deviation from the median of their stream: the error of the best that
               is the same for all of it, known only afterwards [tokens]
    error      mean absolute error of the median [tokens]
    tau        Kendall's rank correlation (tau-b) of medians and lengths, of 200,000 random pairs
    pinball    mean pinball loss of the median and the upper estimate together [tokens]
    coverage   share of the requests that ended within the upper estimate
    allocated  sum of the upper estimates / sum of the lengths
    later      mean absolute error of what remains after `LATER` tokens, of those that get so long
    unasked    the same, of the estimate at arrival less these tokens
    """

    requests: int
    mean: float
    constant: float
    error: float
    tau: float
    pinball: float
    coverage: float
    allocated: float
    later: float
    unasked: float


def stream(
    model: LengthModel, requests: Iterable[tuple[Facts, int]], *, delay: int
) -> list[Judged]:
    """Ask about each request when it arrives, and teach its length when `delay` more have come."""
    under_way: deque[tuple[Facts, int]] = deque()
    judged = []
    for facts, length in requests:
        median, upper, _ = model.belief(facts).remaining(0)
        later = model.belief(facts).remaining(LATER).median if length > LATER else None
        judged.append(Judged(median, upper, later, length))
        under_way.append((facts, length))
        if len(under_way) > delay:
            known, ended = under_way.popleft()
            model.learn(model.belief(known), ended)
    return judged


def score(streams: Sequence[Sequence[Judged]], *, coverage: float, seed: int = 0) -> Score:
    """Of all streams together; coverage: level of the upper estimates."""
    judged = [one for of_stream in streams for one in of_stream]
    deviations = [_deviations(of_stream) for of_stream in streams]
    medians = np.array([one.median for one in judged], dtype=float)
    uppers = np.array([one.upper for one in judged], dtype=float)
    lengths = np.array([one.length for one in judged], dtype=float)
    long = [one for one in judged if one.later is not None]
    remaining = np.array([one.length - LATER for one in long], dtype=float)
    later = np.array([one.later for one in long], dtype=float)
    unasked = np.array([max(one.median - LATER, 1) for one in long], dtype=float)
    return Score(
        requests=len(judged),
        mean=float(lengths.mean()),
        constant=float(np.concatenate(deviations).mean()),
        error=float(np.abs(medians - lengths).mean()),
        tau=_tau(medians, lengths, seed),
        pinball=_pinball(medians, lengths, 0.5) + _pinball(uppers, lengths, coverage),
        coverage=float((lengths <= uppers).mean()),
        allocated=float(uppers.sum() / lengths.sum()),
        later=float(np.abs(later - remaining).mean()) if long else 0.0,
        unasked=float(np.abs(unasked - remaining).mean()) if long else 0.0,
    )


def _deviations(judged: Sequence[Judged]) -> Floats:
    lengths = np.array([one.length for one in judged], dtype=float)
    deviations: Floats = np.abs(lengths - np.median(lengths))
    return deviations


def _pinball(quantiles: Floats, lengths: Floats, level: float) -> float:
    off = lengths - quantiles
    return float(np.where(off >= 0, off * level, off * (level - 1)).mean())


def _tau(one: Floats, other: Floats, seed: int) -> float:
    """Kendall's tau-b of random pairs: all of 20,000 requests would be 200 million."""
    rng = np.random.Generator(np.random.PCG64(seed))
    first, second = rng.integers(len(one), size=(2, _PAIRS))
    a, b = np.sign(one[first] - one[second]), np.sign(other[first] - other[second])
    scale = math.sqrt(float((a != 0).sum()) * float((b != 0).sum()))
    return float((a * b).sum()) / scale if scale else 0.0
