"""Beside prefix order: when the oldest is next (HyGen §4.3, App. A.2), and which are urgent.

Serving in prefix order alone starves what shares nothing. HyGen tosses a coin for each pick: the
head of the depth-first order with probability `utility_ratio`, else the most stale request. Here
the coin is an account, so that every rank of a server decides alike and a bound can be stated
(docs/architecture.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Generic, TypeVar

from sortedcontainers import SortedDict, SortedList

from cosched.core.request import Request

R = TypeVar("R", bound=Request)

_PICK = 1_000_000

_STRETCH_S = 10.0
"""Deadlines within a stretch of this length are looked at together [s]."""

_CAUTION = 1.25
"""Factor on the time of the work that is left: chat may need more of the device later."""

_HALF_S = 300.0
"""Half-life of the measured rate of offline tokens [s]."""

_LEAST_S = 5.0
"""Least time of measuring before there is a rate [s]."""


class UtilityMix:
    """Which of the next picks go to the most stale request.

    utility_ratio  part of the picks that follow prefix order

    Every admission raises the debt by ``1 - utility_ratio`` picks (to the millionth); the admission
    of a request that is due lowers it by one. As many of the oldest are due as there are whole
    picks of debt. Looking at a request and not taking it changes nothing, so a due request that did
    not fit is due again in the next plan.

    Deviation from HyGen: an account in place of a random number, and what counts is what was
    admitted, not what was looked at.
    """

    __slots__ = ("_debt", "_share")

    def __init__(self, utility_ratio: float) -> None:
        self._share = round((1 - utility_ratio) * _PICK)
        self._debt = self._share

    @property
    def num_due(self) -> int:
        """How many of the oldest requests go before others."""
        return self._debt // _PICK

    def count(self, *, due: bool) -> None:
        """Count an admission, of a request that was due or of another."""
        self._debt += self._share - (_PICK if due else 0)

    def restart(self) -> None:
        """Forget the debt: no request waits."""
        self._debt = self._share

    def fork(self) -> UtilityMix:
        """A copy to forecast with."""
        return copy.copy(self)


class DueRequests(Generic[R]):
    """The waiting requests that have a deadline, most urgent first, and how much work they are.
    Each change O(log n)."""

    __slots__ = ("_entries", "_work")

    def __init__(self) -> None:
        # No two of one seq. The last: tokens.
        self._entries: SortedList[tuple[float, int, R, int]] = SortedList()
        self._work: SortedDict[int, int] = SortedDict()
        """Tokens of those due in a stretch of `_STRETCH_S`, by its number."""

    def add(self, request: R, num_tokens: int) -> None:
        """num_tokens: that it is expected to have in the end."""
        due_s = due_time_s(request)
        if due_s is not None:
            self._entries.add((due_s, request.arrival_seq, request, num_tokens))
            stretch = int(due_s // _STRETCH_S)
            self._work[stretch] = self._work.get(stretch, 0) + num_tokens

    def remove(self, request: R) -> None:
        due_s = due_time_s(request)
        if due_s is None:
            return
        place = self._entries.bisect_left((due_s, request.arrival_seq))
        _, _, found, num_tokens = self._entries.pop(place)
        assert found is request, f"not in the pool: {request.rid=}"
        stretch = int(due_s // _STRETCH_S)
        self._work[stretch] -= num_tokens
        if not self._work[stretch]:
            del self._work[stretch]

    def rise_until_s(self, now_s: float, *, spare_s: float, rate: ServedRate) -> float:
        """All that are due until then go first [s]: those for which there would be no more than
        `spare_s` left if all that is due before them were done first, and those before these.

        O(stretches of time in which any are due).
        """
        until_s = now_s + spare_s
        tokens_per_s = rate.tokens_per_s
        if tokens_per_s is None:
            return until_s
        work_s = rate.longest_s
        for stretch, num_tokens in self._work.items():
            work_s += _CAUTION * num_tokens / tokens_per_s
            start_s = stretch * _STRETCH_S
            if start_s - now_s - work_s <= spare_s:
                until_s = max(until_s, start_s + _STRETCH_S)
        return until_s

    def until(self, limit_s: float) -> Iterator[R]:
        """All due at `limit_s` or before, lazily; valid until the next `add` or `remove`."""
        for due_s, _, request, _ in self._entries:
            if due_s > limit_s:
                return
            yield request


class ServedRate:
    """How fast offline requests have been served of late, prompts, cached ones too, and outputs:
    tokens of those that ended by the time in which others waited. Work that does not fill the
    device says nothing of how fast it is.

    longest_s  the longest time from a first token to the end, of late: what is admitted is not done
    """

    __slots__ = ("_is_measuring", "_now_s", "_seconds", "_tokens", "_waits", "longest_s")

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._seconds = self._tokens = 0.0
        self._now_s = 0.0
        self._waits = False
        self._is_measuring = False

    def advance(self, now_s: float, *, waits: bool) -> None:
        """waits: some request does."""
        passed_s = now_s - self._now_s
        self._now_s = now_s
        self._waits = waits
        if not waits:
            self._is_measuring = False
        elif self._is_measuring and passed_s > 0:
            share = 0.5 ** (passed_s / _HALF_S)
            self._seconds = self._seconds * share + passed_s
            self._tokens *= share
            self.longest_s *= share

    def ended(self, num_tokens: int, seconds: float) -> None:
        """A request has ended, `seconds` after its first token. What the first ones took lies
        before the measurement."""
        self.longest_s = max(self.longest_s, seconds)
        if self._is_measuring:
            self._tokens += num_tokens
        else:
            self._is_measuring = self._waits

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known yet."""
        if self._seconds < _LEAST_S or not self._tokens:
            return None
        return self._tokens / self._seconds


def due_time_s(request: Request) -> float | None:
    """When a request must be complete, on the engine's clock [s]; None: whenever."""
    deadline_s = request.slo.deadline_s
    return None if deadline_s is None else request.arrival_s + deadline_s
