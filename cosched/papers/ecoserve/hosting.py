"""Guests in memory that was promised to a host, which needs it only later (EcoServe §3.4).

Half of what a GT of length l was promised it needs after l/2 more tokens only. So one of length
below l/2 less the buffer runs there, two below l/4, four below l/8 and so on. A guest of a guest
counts towards the outermost host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

from cosched.core.request import Request
from cosched.papers.ecoserve.generation_plan import Work
from cosched.papers.ecoserve.queues import Entry

_MOST_LEVELS = 8
"""Of hosts in hosts; a place halves with each."""

_LEAST_PLACE = 8
"""Tokens that a guest may take at least: shorter ones end before they are worth planning."""

Place: TypeAlias = tuple[int, Request, int, int, tuple[int, int]]
"""Where guests may grow: tokens that one may take, and until its host needs them; the host; output
tokens of it by which they must have ended; guests that find room; see `Batch.regions`. No class:
hundreds of hosts have thousands of them."""


def find_guests(work: Work, queue: Sequence[Entry]) -> None:
    """GTs that wait run in what others were promised and need only later."""
    ledger = work.builder.ledger
    patient = [
        (entry.length, request)
        for entry in queue
        for request in entry.members
        # One that still counts as another's guest would take what it has there along.
        if work.is_patient(request) and ledger.kv.price(request, request.num_output_tokens) <= 0
    ]
    if not patient:
        return
    patient.sort(key=itemgetter(0))
    lengths = [length * (1 + work.config.buffer) for length, _ in patient]
    for num_tokens, host, offset, num_free, region in places(work):
        for _ in range(num_free):
            found = bisect_left(lengths, num_tokens) - 1
            if found < 0:
                return
            del lengths[found]
            guest = patient.pop(found)[1]
            work.builder.borrow(guest, host, offset)
            work.guests[guest.rid] = (host.rid, offset)
            work.regions[host.rid] = region
            work.start([[guest]])


def places(work: Work) -> list[Place]:
    """Where guests may grow, the longest first. O(active)."""
    taken = Counter(work.guests.values())
    lending = {host for host, _ in work.guests.values()}
    page, least = work.page, max(_LEAST_PLACE, work.page + 1)
    found = []
    for rid, now, region in _hosts(work):
        start, size = region
        for level in range(1, _MOST_LEVELS):
            offset = start + (size >> level) // page * page
            if offset - now < least:
                break
            count = 1 << (level - 1)
            if rid in lending:
                count -= taken[rid, offset]
            if count > 0:
                found.append((offset - now, work.running[rid], offset, count, region))
    found.sort(key=itemgetter(0), reverse=True)
    return found


def _hosts(work: Work) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Which GTs may lend: rid, output tokens so far, and its region (`Batch.regions`), which is
    drawn again where it lends nothing."""
    lending = {host for host, _ in work.guests.values()}
    work.regions = regions = {rid: r for rid, r in work.regions.items() if rid in lending}
    promises = work.builder.ledger.kv.promises
    for rid in work.groups:
        if rid not in work.guests:
            now, promised = work.progress[rid]
            region = regions.get(rid)
            if region is None:
                region = now, (promises.get(rid) or promised or 0) - now
            yield rid, now, region
