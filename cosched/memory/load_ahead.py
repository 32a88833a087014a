"""The KV memory that requests will hold together while the end of each is uncertain.

A request that holds u tokens of KV takes one more in each iteration, and is still running after t
iterations with probability S(t). Together requests hold ``sum (u + t) S(t)`` in the mean, with
variance ``sum (u + t)² S(t) (1 - S(t))`` if they end independently: the mean grows with their
number, the deviation with its square root. Memory for the mean plus a few deviations at the worst t
is enough almost always (own; compare the Past-Future scheduler of LightLLM, which samples the ends,
and Echo's reservation, §5.3). A sum of upper quantiles assumes that all replies are long at once,
and reserves memory that is never used.

Of few requests the mean plus deviations may exceed what they can hold at all: ``sum (u + t)`` over
those whose last end is not before t. That is the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_HELD, _NUM, _VARIANCE, _MOST_HELD, _MOST = 0, 1, slice(2, 5), 5, 6
"""Rows of the table by time: mean of the tokens that the running requests hold now, mean of their
number; variance of their number, weighted by 1, by `held` and by its square; the tokens that they
hold now and their number, if each runs until its last end."""

_MOST_TIMES = 256
"""Times at which the load is evaluated: with all ends of 500 requests a plan would take a
millisecond longer."""


class LoadAhead:
    """The KV that a set of requests will hold over time. Read-only.

    Times are iterations from now. Between two possible ends the sum only grows, so its maximum is
    just before one of them.
    """

    __slots__ = ("_at", "_deviation", "_mean", "_most", "_of", "_page")

    def __init__(self, held: Sequence[int], ends: Sequence[Sequence[int]], *, page: int) -> None:
        """held: KV tokens that each holds now and releases when it ends.
        ends: (ends, requests), ascending: equally likely iterations after which each may end.
        Entries of 0 or less are passed or missing; a request without others ends next.
        page: allocation unit [KV tokens]. O(ends in all)."""
        self._page = page
        table = np.array(ends, dtype=np.float64) if len(held) else np.empty((1, 0))
        self._sort(np.array(held, dtype=np.float64), table)

    def _sort(self, held: Any, ends: Any) -> None:
        """ends: (ends, requests)."""
        is_open = ends > 0
        num_open = is_open.sum(axis=0)
        if not num_open.all():
            ends = ends.copy()
            ends[-1, num_open == 0] = 1
            is_open = ends > 0
            num_open = np.maximum(num_open, 1)
        times = _times(ends, is_open)
        # Of each end that is not passed: its request, and how many of that one's come before it.
        row, one = is_open.nonzero()
        of_one, held_of_one = num_open[one], held[one]
        before = row - (len(ends) - of_one)
        places = times.searchsorted(ends[is_open])
        share = -1 / of_one
        passed, passed_before = (before + 1) / of_one, before / of_one
        variance = passed * (1 - passed) - passed_before * (1 - passed_before)
        with_held = variance * held_of_one
        steps = share * held_of_one, share, variance, with_held, with_held * held_of_one
        of = np.empty((7, len(times) + 1))
        of[:, 0] = held.sum(), len(held), 0, 0, 0, held.sum(), len(held)
        for row_of, step in zip(of[:_MOST_HELD], steps, strict=True):
            row_of[1:] = np.bincount(places, step, len(times))
        last = times.searchsorted(np.maximum(ends[-1], 1))
        of[_MOST_HELD, 1:] = -np.bincount(last, held, len(times))
        of[_MOST, 1:] = -np.bincount(last, minlength=len(times))
        # Requests that run until a time: all, less those that may end before.
        of[:, 1:].cumsum(axis=1, out=of[:, 1:])
        of[:, 1:] += of[:, :1]
        self._arrange(np.append(times, np.inf), of)

    def _arrange(self, at: Any, of: Any) -> None:
        """at: times, ascending, the last one infinite; of: the table's column until each."""
        self._at, self._of = at, of
        times, until = at[:-1], of[:, :-1]
        variance = until[4] + times * (2 * until[3] + times * until[2])
        # A last page is used to an unknown part.
        variance += (self._page**2 - 1) / 12 * until[_NUM]
        self._mean = until[_HELD] + times * until[_NUM]
        self._deviation = np.sqrt(np.maximum(variance, 0))
        self._most = until[_MOST_HELD] + (times + self._page - 1) * until[_MOST]

    def peak(self, deviations: float, *, until: float = np.inf) -> float:
        """Most KV tokens held at once from now on, up to iteration `until`: mean plus `deviations`
        standard deviations, but no more than the requests can hold; 0.0 without requests. O(n)."""
        num = int(self._at[:-1].searchsorted(until, side="right"))
        held = self._mean[:num] + deviations * self._deviation[:num]
        return float(np.minimum(held, self._most[:num]).max(initial=0.0))

    def with_one(self, held: int, ends: Sequence[int]) -> LoadAhead:
        """The same with one more request; ends: ascending. O(n)."""
        return self._changed(held, ends, 1)

    def without(self, held: int, ends: Sequence[int]) -> LoadAhead:
        """The same without one of the requests, given what it holds and its ends. O(n)."""
        return self._changed(held, ends, -1)

    def _changed(self, held: int, ends: Sequence[int], num: int) -> LoadAhead:
        own = np.maximum(np.array(ends, dtype=np.float64), 1)
        before = self._at
        # Merge its ends into the times; a new time copies the column of the next one.
        at = np.append(before, own)
        order = at.argsort(kind="stable")
        source = np.append(np.arange(len(before)), before.searchsorted(own))[order]
        at, of = at[order], self._of.take(source, axis=1)
        there = 1 - own.searchsorted(at) / len(own)
        variance = there * (1 - there)
        of[_HELD] += num * held * there
        of[_NUM] += num * there
        variance *= num
        for row in of[_VARIANCE]:
            row += variance
            variance *= held
        runs = at <= own[-1]
        of[_MOST_HELD] += num * held * runs
        of[_MOST] += num * runs
        other = object.__new__(LoadAhead)
        other._page = self._page
        other._arrange(at, of)
        return other


class MostHeld(NamedTuple):
    """An upper bound of the peak of a `LoadAhead` that ignores when each request ends: O(1) for
    each new request.

    held  KV tokens held now
    most  sum of the tokens that each holds at its last end, its last page whole
    page  allocation unit [KV tokens]
    """

    held: int = 0
    most: int = 0
    page: int = 1

    @classmethod
    def of(cls, held: Sequence[int], ends: Sequence[Sequence[int]], *, page: int) -> MostHeld:
        """As `LoadAhead`."""
        if not len(held):
            return cls(page=page)
        now = int(np.add.reduce(held))
        last = int(np.add.reduce(np.maximum(np.asarray(ends[-1]), 1)))
        return cls(now, now + last + (page - 1) * len(held), page)

    def with_one(self, held: int, ends: Sequence[int]) -> MostHeld:
        """As `LoadAhead.with_one`."""
        most = self.most + held + max(ends[-1], 1) + self.page - 1
        return MostHeld(self.held + held, most, self.page)


def _times(ends: Any, is_open: Any) -> Any:
    """The distinct ends, ascending; of many requests only those of a sample and the last of all:
    other ends are rounded up to the next of these."""
    step = ends.size // _MOST_TIMES + 1
    some = ends[:, ::step][is_open[:, ::step]]
    return np.unique(np.append(some, ends[-1].max())) if len(some) else some
