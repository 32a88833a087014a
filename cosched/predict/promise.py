"""What is left of a promise: by how much offline work may still lengthen what online requests wait
for, so that mean and p99 stay within a share of what they would have alone."""

from __future__ import annotations

import math

from cosched.predict.tail import Tail

_WINDOW = 1000
"""Requests over which the mean is kept: what is older fades, so that a quiet night does not pay for
a slow day."""

_HORIZON = 50
"""Within so many requests what is left is given out, or what is lacking saved."""

_MOST_ROOM = 10.0
"""Room at most [promised shares]: what was saved is not spent all at once."""

_LEAST_FOR_TAIL = 100
"""Requests of which one is in the last percent."""

_TAIL_EVERY = 10
"""Requests between two looks at p99."""

_TAIL_FROM = 0.5
"""Of the promised share: where p99 is so far up, room begins to shrink."""


class Promise:
    """One latency of the online requests.

        balance = sum of (1 + share) * alone - achieved, older requests fading
        room    = balance / horizon [means of alone], at most `_MOST_ROOM` shares, and less as
                  p99 of the achieved nears (1 + share) * p99 of alone

    A request that took what was promised leaves the balance as it is. So the mean settles where it
    was promised to be, whatever delays them: long iterations, predictions that are off,
    prompts that found less in the cache.

    share  by which mean and p99 may be above those of alone
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._balance_s = 0.0
        self._alone_s = 0.0
        self._weight = 0.0
        self._tails = tuple(Tail(0.99, num=_WINDOW) for _ in range(2))
        self._tail_room = 1.0
        self.num = 0
        """Requests judged."""
        self.total_alone_s = self.total_achieved_s = 0.0

    def judge(self, *, alone_s: float, achieved_s: float) -> None:
        """What a request would have had, and had [s]."""
        if not self._weight:
            self._balance_s = self.share * _HORIZON * alone_s  # that there is room to begin with
        kept = 1 - 1 / _WINDOW
        self._weight = kept * self._weight + 1
        self._alone_s = kept * self._alone_s + alone_s
        most_s = _MOST_ROOM * self.share * _HORIZON * self.mean_alone_s
        saved_s = (1 + self.share) * alone_s - achieved_s
        self._balance_s = min(kept * self._balance_s + saved_s, most_s)
        self.num += 1
        self.total_alone_s += alone_s
        self.total_achieved_s += achieved_s
        for tail, value in zip(self._tails, (alone_s, achieved_s), strict=True):
            tail.add(value)
        if not self.num % _TAIL_EVERY:
            self._tail_room = self._left_to_tail()

    @property
    def mean_alone_s(self) -> float:
        """Of the latest requests; 0.0: nothing is known yet [s]."""
        return self._alone_s / self._weight if self._weight else 0.0

    @property
    def tails_s(self) -> tuple[float | None, float | None]:
        """p99 of alone, p99 of the achieved [s]."""
        alone, achieved = self._tails
        return alone.value(), achieved.value()

    @property
    def room(self) -> float:
        """By what share of its mean alone what offline work does may lengthen the latency of those
        that come next."""
        if not self._weight:
            return self.share
        room = self._balance_s / (_HORIZON * self.mean_alone_s)
        return min(max(room, 0.0), _MOST_ROOM * self.share) * self._tail_room

    def _left_to_tail(self) -> float:
        alone_s, achieved_s = self.tails_s
        if self.num < _LEAST_FOR_TAIL or not alone_s or not achieved_s:
            return 1.0
        used = (achieved_s / alone_s - 1) / self.share
        left = (1 - used) / (1 - _TAIL_FROM)
        return 0.0 if math.isnan(left) else min(max(left, 0.0), 1.0)
