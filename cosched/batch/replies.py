"""How long the replies of lines get, and how long the last of them takes.

Survival of lengths by Kaplan and Meier (1958): replies that have ended, and those that run, which
get longer than they are. The ended ones alone are too short: long replies end last. What is known
of prompts of about the same length (an octave) counts more with each of them that has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

_GRID: _Array = np.unique(
    np.concatenate([np.arange(0.0, 64.0, 4.0), np.round(np.geomspace(64, 1 << 18, 150))])
)
"""Output tokens at which a survival is kept."""
_PRIOR = 5.0
"""Ended replies of an octave that count as much as all others."""
_BEYOND = 1.0
"""Index of the Pareto tail beyond the longest reply seen."""
_MOST = 8.0
"""Multiple of the longest reply seen that none gets longer than, within its limit."""


class Ended(NamedTuple):
    """A line whose reply has ended: prompt tokens, output tokens."""

    num_prompt: int
    num_output: int


class Running(NamedTuple):
    """A line whose reply is being generated: prompt tokens, output tokens so far and at most."""

    num_prompt: int
    num_output: int
    limit: int


def octave(num_prompt: float) -> int:
    """Prompts of the same octave are alike."""
    return int(num_prompt).bit_length()


class Replies:
    """Of the lines of a moment."""

    def __init__(self, ended: Sequence[Ended], running: Sequence[Running]) -> None:
        """`ended` must not be empty."""
        longest = max(one[1] for one in (*ended, *running))
        limit = max((one.limit for one in running), default=longest)
        self._cap = max(min(limit, _MOST * longest), longest)
        self._ended: dict[int, list[int]] = {}
        self._so_far: dict[int, list[int]] = {}
        for line in ended:
            self._ended.setdefault(octave(line.num_prompt), []).append(line.num_output)
        for one in running:
            self._so_far.setdefault(octave(one.num_prompt), []).append(one.num_output)
        self._known: dict[int, _Array] = {}

    @cached_property
    def _all(self) -> _Array:
        ended = [length for lengths in self._ended.values() for length in lengths]
        so_far = [length for lengths in self._so_far.values() for length in lengths]
        return self._survival(ended, so_far)

    def _longer(self, kind: int) -> _Array:
        """Share of the replies to prompts of an octave that get longer than `_GRID`."""
        found = self._known.get(kind)
        if found is None:
            ended = self._ended.get(kind)
            found = self._all
            if ended:
                share = len(ended) / (len(ended) + _PRIOR)
                own = self._survival(ended, self._so_far.get(kind, []))
                found = share * own + (1 - share) * self._all
            self._known[kind] = found
        return found

    def _survival(self, ended: Sequence[int], so_far: Sequence[int]) -> _Array:
        lengths = np.array([*ended, *so_far], dtype=float)
        is_end = np.arange(len(lengths)) < len(ended)
        order = np.lexsort((~is_end, lengths))
        lengths, num = lengths[order], len(lengths)
        left = np.cumprod(1 - is_end[order] / (num - np.arange(num)))
        # Beyond the longest one there is half a reply, at least.
        left = np.maximum(left, 0.5 / num)
        at = np.searchsorted(lengths, _GRID, side="right") - 1
        found = np.where(at < 0, 1.0, left[np.maximum(at, 0)])
        longest = max(lengths[-1], 1.0)
        beyond = left[-1] * (longest / np.maximum(_GRID, longest)) ** _BEYOND
        return np.where(_GRID >= self._cap, 0.0, np.where(_GRID >= longest, beyond, found))

    def length(self, kind: int) -> float:
        """Tokens expected of a reply to a prompt of an octave."""
        return float(_area(self._longer(kind)))

    def left(self) -> float:
        """Tokens that all running replies together are still expected to get."""
        return sum(float(_area(self._outlive(kind, 0.0)).sum()) for kind in self._so_far)

    def _outlive(self, kind: int, num_more: float) -> _Array:
        """For each running reply of an octave the probability that, once it has `num_more` tokens
        more, `_GRID` tokens are still to come."""
        longer = self._longer(kind)
        so_far = np.array(self._so_far[kind], dtype=float)
        now = np.maximum(np.interp(so_far, _GRID, longer), 1e-6)
        lengths = so_far[:, np.newaxis] + num_more + _GRID
        then = np.interp(lengths, _GRID, longer, right=0.0)
        found: _Array = np.minimum(then / now[:, np.newaxis], 1.0)
        return found

    def tail(self, *, num_waiting: Mapping[int, float], num_steps: float, share: float) -> float:
        """Tokens that the longest reply is expected to get after the last line has begun.

        num_waiting  lines that wait, by octave; they begin evenly over the time until then
        num_steps    tokens that a running line gets in that time
        share        of the running ones, that count
        """
        none = np.zeros_like(_GRID)  # log of the chance that no reply gets so much longer
        for kind in self._so_far:
            none += share * _log_not(self._outlive(kind, num_steps)).sum(axis=0)
        num_steps = max(num_steps, 1.0)
        for kind, num in num_waiting.items():
            # The mean over the moments at which they begin, as the difference of an integral.
            each = _log_not(self._longer(kind))
            steps = (each[1:] + each[:-1]) / 2 * np.diff(_GRID)
            beyond = np.append(np.cumsum(steps[::-1])[::-1], 0.0)
            then = np.interp(_GRID + num_steps, _GRID, beyond, right=0.0)
            none += num / num_steps * (beyond - then)
        return float(_area(1 - np.exp(none)))


def _log_not(chance: _Array) -> _Array:
    found: _Array = np.log(np.maximum(1 - chance, 1e-9))
    return found


def _area(curves: _Array) -> _Array:
    found: _Array = ((curves[..., :-1] + curves[..., 1:]) / 2) @ np.diff(_GRID)
    return found
