"""How much KV memory will be needed, at the worst of all iterations to come.

A running request holds u tokens of KV and takes one more each iteration until it ends, after r of
them; then all goes. If everybody ends when expected, the memory needed peaks just before somebody
ends: with the requests by falling r, at the k-th end it is the sum over those still there,
``sum_{j: r_j >= r_k} (u_j + r_k)``, and the peak is the largest of these (own; cf. the Past-Future
scheduler of LightLLM, which samples the r). Nested hosting (EcoServe §3.4) is one
way to pack below it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import add, attrgetter
from typing import NamedTuple

__all__ = ["Need", "Timeline"]


class Need(NamedTuple):
    """held       KV tokens that it holds now and gives back when it ends. Tokens shared through the
               radix tree count once, for the one that ends last
    remaining  tokens that it takes until it ends
    """

    held: int
    remaining: int


_REMAINING = attrgetter("remaining")


class Timeline:
    """Requests by what remains of them, to be asked whether one more fits.

    Read-only: made once from what runs, then asked about each that waits.
    """

    def __init__(self, needs: Iterable[Need]) -> None:
        """O(n log n)."""
        # Lists: some tens of requests are too few for arrays to pay.
        pairs = sorted(needs, key=_REMAINING)
        ends = [need.remaining for need in pairs]
        count = len(ends)
        # At the k-th end, those from k on are there.
        held_from = [*accumulate((need.held for need in reversed(pairs)), initial=0)][::-1]
        loads = [held_from[k] + (count - k) * end for k, end in enumerate(ends)]
        self._ends = ends
        self._held_from = held_from
        # The worst at the k-th end or before it, and after it. One more makes each end before its
        # own worse by what it holds and has taken by then.
        self._before = [*accumulate(map(add, loads, ends), max)]
        self._after = [*accumulate(reversed(loads), max)][::-1]

    @property
    def peak(self) -> int:
        """The most KV tokens that are held at once from now on; 0 without anybody."""
        return self._after[0] if self._after else 0

    def peak_with(self, need: Need) -> int:
        """The same with one more. O(log n)."""
        held, remaining = need
        count = len(self._ends)
        place = bisect_right(self._ends, remaining)
        # Just before its own end: it, and all that end later.
        peak = self._held_from[place] + (count - place) * remaining + held + remaining
        if place:
            peak = max(peak, self._before[place - 1] + held)
        if place < count:
            peak = max(peak, self._after[place])
        return peak
