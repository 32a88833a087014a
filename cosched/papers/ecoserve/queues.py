"""The queue of generations that wait, and exact allocation (EcoServe §3.2, §3.3)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from cosched.core.request import Request, num_tokens_of
from cosched.papers.ecoserve.generation_plan import Order, Work

_ONLINE = 0
"""First part of the order of online requests."""


class Entry(NamedTuple):
    """GTs of one length, or one alone.

    order   of its first member
    length  tokens for which KV is set aside, of each
    """

    order: Order
    length: int
    members: list[Request]

    @property
    def band(self) -> tuple[int, ...]:
        """What comes first whatever fits."""
        return self.order[:2]


def entries(work: Work, waiting: Sequence[Request]) -> list[Entry]:
    """The GT queue in order."""
    gain, length = work.view.preemption_gain, work.length
    singles = [Entry(work.order(r, gain(r), length(r)), length(r), [r]) for r in waiting]
    singles.sort(key=attrgetter("order"))
    if not work.options.synced:
        return singles
    found: dict[tuple[int, int], Entry] = {}
    for entry in singles:
        alike = entry.order[0], -(-entry.length // work.block)
        group = found.get(alike)
        if group is not None:
            # All of them run until the longest ends.
            entry = group._replace(
                length=max(group.length, entry.length), members=group.members + entry.members
            )
        found[alike] = entry
    return list(found.values())


class Promises:
    """Exact allocation: what is set aside for all outputs, in full, leaves the reserve."""

    def __init__(self, work: Work, reserve: int) -> None:
        """reserve: KV tokens that are not given out."""
        self._work = work
        self._ledger = work.builder.ledger
        unfinished = work.builder.unfinished()
        self._least = reserve + sum(num_tokens_of(r) - r.num_computed_tokens for r in unfinished)

    @property
    def most(self) -> int:
        """Tokens beyond which nothing more can be set aside."""
        return self._ledger.kv.headroom - self._least

    def fits(self, request: Request, length: int) -> bool:
        """Whether KV can be set aside for a GT that waits."""
        return self._ledger.kv.price(request, request.num_output_tokens + length) <= self.most

    def take(self, request: Request, length: int) -> bool:
        """Set KV aside for a GT that waits. False: it does not fit."""
        if not self.fits(request, length):
            return False
        self._work.set_aside(request, length)
        return True

    def add(self, num_tokens: int, length: int) -> bool:
        """Remember that a prompt will run once it is computed. False: it could not."""
        if num_tokens + length > self.most:
            return False
        self._least += length
        return True


def fill(queue: list[Entry], account: Promises, *, by_search: bool) -> list[list[Request]]:
    """Take entries in order until one does not fit, of which as many members as do; with a search
    then the longest that fit of each band. Returns what was taken; the queue has the others."""
    chosen: list[list[Request]] = []
    while queue:
        entry = queue[0]
        chosen.append(_take(entry, account))
        if entry.members:
            break
        del queue[0]
    if by_search:
        for band in dict.fromkeys(entry.band for entry in queue):
            here = sorted((e for e in queue if e.band == band), key=lambda e: e.length)
            while here:
                # Those that fit are the shorter ones.
                place = bisect_left(
                    here, True, key=lambda e: not account.fits(e.members[0], e.length)
                )
                if not place:
                    break
                chosen.append(_take(here.pop(place - 1), account))
        queue[:] = [entry for entry in queue if entry.members]
    return [members for members in chosen if members]


def _take(entry: Entry, account: Promises) -> list[Request]:
    """As many members as fit."""
    taken: list[Request] = []
    while entry.members and account.take(entry.members[0], entry.length):
        taken.append(entry.members.pop(0))
    return taken


def begins_online(queue: Sequence[Entry]) -> bool:
    return bool(queue) and queue[0].order[0] == _ONLINE


def remove(queue: list[Entry], request: Request) -> None:
    for place, entry in enumerate(queue):
        if request in entry.members:
            entry.members.remove(request)
            if not entry.members:
                del queue[place]
            return
