"""The KV pool of layers with sliding windows.

A request takes a token of it for each that it computes, and returns those behind its window. It
holds the last window of its prompt, which is in the radix tree, and the window of its output with
some tokens behind it, which SGLang frees in batches (`WindowPool.slack`).

Three rules hold. SGLang's (`SWAPrefillBudget`): a request is admitted if the part of its chunk that
lies behind the window, one window of prompt and output, and a page are less than what the pool has
left beside other admissions of the iteration. That rule sets nothing aside for what running
requests have still to take, so the engine would preempt some of them later. The second: what it is
expected to hold (`WindowReads.output`) fits beside what all others are (`WindowPool.reserved`),
unless nothing else runs. The third is the memory of the iteration, as of KV: whole chunks beside
the next step of all decodes. An unfinished prefill continues by the third rule alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cosched.core.kv_state import Match
from cosched.core.memories import Memory
from cosched.core.plan import SkipReason
from cosched.core.request import Request, num_tokens_of
from cosched.core.view import View


class WindowPool(NamedTuple):
    """At the moment of planning [tokens].

    window     tokens before its own that a token attends to
    slack      tokens behind its window that a decoding request may hold
    free       not allocated
    evictable  in the radix tree and used by no request
    reserved   set aside for the output of running requests, until their windows are full
    """

    window: int
    slack: int
    free: int
    evictable: int
    reserved: int


class WindowReads(Protocol):
    """What is asked about a request [tokens]."""

    def output(self, request: Request) -> int:
        """Of output for which memory is set aside, before what its window returns: all that may
        come, or the share of it that the engine keeps free."""
        ...

    def reserve_of(self, request: Request) -> int:
        """Of `WindowPool.reserved` for this running request."""
        ...

    def gain(self, request: Request) -> int:
        """Free or evictable once it is preempted, without its reserve."""
        ...


class WindowMemory(Memory):
    name = "windows"

    def __init__(self, view: View, pool: WindowPool, reads: WindowReads) -> None:
        self._view = view
        self._caps = view.caps
        self.pool = pool
        self.reads = reads
        self._left = pool.free + pool.evictable
        """For the first rule."""
        self._headroom = self._left - pool.reserved
        """For the second; may be negative."""
        self._available = self._left - view.kv.next_step
        """For the third; may be negative."""
        for request in view.unfinished:
            self._headroom -= self._will_hold(request, request.num_computed_tokens)
        self._is_idle = not (view.running or view.unfinished)

    def refuses(self, request: Request, match: Match) -> SkipReason | None:
        fits = self._most_admitted(request, match) > 0
        return None if fits else SkipReason.MEMORY_BUDGET

    def most_tokens(self, request: Request, match: Match | None) -> int:
        if match is None:
            return self._available - self._caps.page_size
        return self._most_admitted(request, match)

    def _most_admitted(self, request: Request, match: Match) -> int:
        """Most prompt tokens, in whole pages, with which it can be admitted."""
        page, held = self._caps.page_size, match.others.get(self.name, 0)
        num_new = self._caps.ceil_to_page(num_tokens_of(request) - match.cached)
        in_window = min(num_new + self._output_of(request), self.pool.window)
        behind = self._left - held - in_window - page - 1
        if behind < 0:
            return 0
        will_hold = held + self._will_hold(request, match.cached)
        if will_hold > self._headroom and not self._is_idle:
            return 0
        most = min(self.pool.window + behind, self._available - held - page)
        return most // page * page

    def _will_hold(self, request: Request, num_cached: int) -> int:
        """Tokens that a request takes beside those of its prompt that are computed."""
        num_new = self._caps.ceil_to_page(num_tokens_of(request) - num_cached)
        # It returns as much as it takes once it holds the window and some tokens behind it.
        output = min(self.reads.output(request), self.pool.window + self.pool.slack)
        return min(num_new, self.pool.window) + self._caps.page_size + output

    def _output_of(self, request: Request) -> int:
        num_left = max(request.max_new_tokens - request.num_output_tokens, 0)
        return min(num_left, self._caps.max_reserved_tokens)

    def can_decode(self, num_requests: int = 0, num_tokens: int = 0) -> bool:
        return self._available >= num_tokens

    def admit(self, request: Request, match: Match, num_tokens: int) -> None:
        held = match.others.get(self.name, 0)
        self._left -= held
        self._available -= held
        self._headroom -= held + self._will_hold(request, match.cached)
        self._charge(request, match.cached, num_tokens)

    def proceed(self, request: Request, num_tokens: int) -> None:
        self._charge(request, request.num_computed_tokens, num_tokens)

    def _charge(self, request: Request, num_cached: int, num_tokens: int) -> None:
        self._is_idle = False
        page, num_new = self._caps.page_size, self._caps.ceil_to_page(num_tokens)
        output = 0
        if num_cached + num_tokens >= num_tokens_of(request):
            output = min(request.max_new_tokens, self._caps.max_reserved_tokens)
        behind = max(num_new - self.pool.window, 0)
        self._left -= behind + min(num_new + output, self.pool.window) + page
        self._available -= num_new + page

    def preempt(self, request: Request) -> None:
        gain = self.reads.gain(request)
        self._left += gain
        self._available += gain
        self._headroom += gain
        if request in self._view.unfinished:
            self._headroom += self._will_hold(request, request.num_computed_tokens)
        else:
            self._headroom += self.reads.reserve_of(request)

    def pause(self, num_requests: int, num_tokens: int) -> None:
        self._available += num_tokens

    def num_lost(self, request: Request) -> int:
        """All: without its last window nothing of it can be reused, and the request that takes its
        place needs one."""
        return request.num_computed_tokens if self.pool.free < self.pool.window else 0
