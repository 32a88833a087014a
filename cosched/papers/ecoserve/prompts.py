"""Prompts fill the iteration up to the target forward size (EcoServe §3.2.1)."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from itertools import chain, islice
from typing import TypeAlias

from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.papers.ecoserve.generation_plan import Work
from cosched.papers.ecoserve.hosting import places
from cosched.papers.ecoserve.queues import Promises
from cosched.schedule.phases import must_wait, offline_admissions_left

WINDOW = 128
"""Waiting prompts of each class that are looked at (own)."""

_BEYOND = 2
"""Tokens that a place is longer than what its guest will take when its prompt is computed."""

_MOST_MISSES = 16
"""Prompts for which there is no KV that are passed over in a plan, for others to fill it."""

_LEAST_CHUNK = 16
"""Prompt tokens that are worth a forward of their own."""

_Prompt: TypeAlias = tuple[int, Request]
"""A waiting prompt, behind its tokens."""


def add_prompts(work: Work) -> None:
    """Prompts until the iteration has the target forward size: whole ones in order, then the
    longest that fit, then a part of one (decision 7)."""
    builder, is_ordered = work.builder, work.options.ordered
    for request in builder.unfinished():
        left = max(work.forward_size - len(work.groups), _LEAST_CHUNK)
        if not builder.continue_prefill(request, left, unreserved=True):
            return
    queue, cut = deque(_prompts(work) if builder.ledger.slots > 0 else ()), None
    if not queue:
        return
    gate = _Gate(work)
    num_left = offline_admissions_left(builder)
    misses, most = (_MOST_MISSES if is_ordered else 0), sys.maxsize
    is_searched = False
    while queue and builder.ledger.slots > 0:
        num_tokens, request = queue.popleft()
        if num_tokens >= most or must_wait(builder, request):
            continue
        left = _tokens_left(work)
        if left <= 0 and work.runs_anything():
            break
        is_offline = request.request_class is RequestClass.OFFLINE
        if is_offline and num_left == 0:
            builder.skip(request, SkipReason.OPERATOR_LIMIT)
            continue
        if (
            cut is None
            and num_tokens > left > 0
            and num_tokens - work.view.match(request).cached > left
        ):
            cut = request
            queue = deque(_shorter(queue, left) if is_ordered else ())
        elif gate.admit(request, left):
            if is_offline and num_left is not None:
                num_left -= 1
        elif not misses:
            break
        else:
            misses, most = misses - 1, builder.ledger.kv.headroom
            if not is_searched:
                queue, is_searched = gate.those_that_fit(queue), True
    if cut is None or (num_left == 0 and cut.request_class is RequestClass.OFFLINE):
        return
    left = _tokens_left(work)
    if left >= _LEAST_CHUNK or not work.runs_anything():
        gate.admit(cut, left)


def _prompts(work: Work) -> list[_Prompt]:
    """Waiting prompts in order."""
    view = work.view
    waiting = chain(islice(view.online, WINDOW), islice(view.offline_order(), WINDOW))
    sized = [(num_tokens_of(request), request) for request in waiting]
    if work.options.ordered:
        sized.sort(key=lambda item: work.order(item[1], 0, item[0]))
    return sized


def _shorter(queue: Iterable[_Prompt], most: int) -> list[_Prompt]:
    """Those that fit, longest first."""
    return sorted((item for item in queue if item[0] <= most), key=lambda item: -item[0])


def _tokens_left(work: Work) -> int:
    """Tokens that the iteration lacks of its target."""
    return work.forward_size - len(work.groups) - sum(work.builder.prefill.values())


class _Gate:
    """Which prompts are let in: those that can run once they are computed, as guests or in KV of
    their own; and as many more as the reserve holds, for the next GTs to be chosen from."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._account = Promises(work, work.reserve)
        self._pinned = sum(map(work.view.preemption_gain, work.waiting()))

    def admit(self, request: Request, left: int) -> bool:
        """Admit it with up to `left` tokens. False: it does not fit, and the reason is noted."""
        builder = self._work.builder
        if not self._lets_in(request):
            builder.skip(request, SkipReason.MEMORY_BUDGET)
            return False
        builder.promise(request, request.num_output_tokens)
        if builder.admit(request, builder.view.match(request), max(left, _LEAST_CHUNK)):
            return True
        del builder.ledger.kv.promises[request.rid]
        return False

    def _lets_in(self, request: Request) -> bool:
        work, view = self._work, self._work.view
        length = work.length(request)
        if work.is_patient(request) and self._takes_place(
            length * (1 + work.config.buffer) + _BEYOND
        ):
            return True
        match = view.match(request)
        num_tokens = num_tokens_of(request) - match.cached + match.to_load + match.evictable
        if work.is_due and self._account.add(num_tokens, length):
            return True
        if self._pinned + num_tokens > work.reserve and work.runs_anything():
            return False
        self._pinned += num_tokens
        return True

    def those_that_fit(self, queue: Iterable[_Prompt]) -> deque[_Prompt]:
        """Of prompts in order those that may be let in. Many that are too long come before one that
        fits: prompts are ordered by their own lengths, and places are taken by those of outputs."""
        work, sizes = self._work, self._places[0]
        longest = float(self._account.most) if work.is_due else 0.0
        if sizes:
            longest = max(longest, (sizes[-1] - _BEYOND) / (1 + work.config.buffer))
        spare = work.reserve - self._pinned
        return deque(i for i in queue if i[0] <= spare or work.length(i[1]) <= longest)

    @cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """That are free: tokens of each, rising, and the guests that find room."""
        found = places(self._work)[::-1] if self._work.options.pipeline else []
        return [place[0] for place in found], [place[3] for place in found]

    def _takes_place(self, num_tokens: float) -> bool:
        """It is computed first, and then a guest."""
        sizes, free = self._places
        found = bisect_left(sizes, num_tokens)
        if found == len(sizes):
            return False
        free[found] -= 1
        if not free[found]:
            del sizes[found], free[found]
        return True
