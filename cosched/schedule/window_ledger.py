"""The KV pool of layers with sliding windows, while a plan grows.

A request holds the last window of its prompt, which is in the radix tree, and the window of its
output with some tokens behind it, which SGLang frees in batches (`EngineCaps.window_slack`).

Three rules hold. SGLang's (`SWAPrefillBudget`): a request is admitted if the part of its chunk that
lies behind the window, one window of prompt and output, and a page are less than what the pool has
left beside other admissions of the iteration. That rule sets nothing aside for what running
requests have still to take, so the engine would preempt some of them later. The second: what it is
expected to hold (`View.window_output`) fits beside what all others are (`WindowKv.reserved`),
unless nothing else runs. The third is the memory of the iteration, as in `Ledger`: whole chunks
beside the next step of all decodes. An unfinished prefill continues by the third rule alone.
"""

from __future__ import annotations

import copy

from cosched.core.kv_state import Match, WindowKv
from cosched.core.request import Request, num_tokens_of
from cosched.core.view import View


class WindowLedger:
    """Implements `SideLedger`."""

    def __init__(self, view: View, pool: WindowKv) -> None:
        assert view.caps.window_tokens is not None
        self._view = view
        self._caps = view.caps
        self._window = view.caps.window_tokens
        self._left = pool.free + pool.evictable
        """For the first rule."""
        self._headroom = self._left - pool.reserved
        """For the second; may be negative."""
        self._available = self._left - view.kv.next_step
        """For the third; may be negative."""
        for request in view.unfinished:
            self._headroom -= self._will_hold(request, request.num_computed_tokens)
        self._is_idle = not (view.running or view.unfinished)

    def fork(self) -> WindowLedger:
        return copy.copy(self)

    def decodes_fit(self) -> bool:
        return self._available >= 0

    def refuses(self, request: Request, match: Match) -> bool:
        return self._most_admitted(request, match) <= 0

    def most_tokens(self, request: Request, num_cached: int) -> int | None:
        if self._view.waiting(request.rid) is None:
            return self._available - self._caps.page_size
        return self._most_admitted(request, self._view.match(request))

    def _most_admitted(self, request: Request, match: Match) -> int:
        """Most prompt tokens, in whole pages, with which it can be admitted."""
        page, held = self._caps.page_size, match.in_window
        num_new = self._caps.ceil_to_page(num_tokens_of(request) - match.cached)
        in_window = min(num_new + self._output_of(request), self._window)
        behind = self._left - held - in_window - page - 1
        if behind < 0:
            return 0
        will_hold = held + self._will_hold(request, match.cached)
        if will_hold > self._headroom and not self._is_idle:
            return 0
        most = min(self._window + behind, self._available - held - page)
        return most // page * page

    def _will_hold(self, request: Request, num_cached: int) -> int:
        """Tokens that a request takes beside those of its prompt that are computed."""
        num_new = self._caps.ceil_to_page(num_tokens_of(request) - num_cached)
        # It returns as much as it takes once it holds the window and some tokens behind it.
        output = min(self._view.window_output(request), self._window + self._caps.window_slack)
        return min(num_new, self._window) + self._caps.page_size + output

    def _output_of(self, request: Request) -> int:
        num_left = max(request.max_new_tokens - request.num_output_tokens, 0)
        return min(num_left, self._caps.max_reserved_tokens)

    def charge_admission(self, request: Request, match: Match, num_tokens: int) -> None:
        self._left -= match.in_window
        self._available -= match.in_window
        self._headroom -= match.in_window + self._will_hold(request, match.cached)
        self._charge(request, match.cached, num_tokens)

    def charge_continuation(self, request: Request, num_tokens: int) -> None:
        self._charge(request, request.num_computed_tokens, num_tokens)

    def _charge(self, request: Request, num_cached: int, num_tokens: int) -> None:
        self._is_idle = False
        page, num_new = self._caps.page_size, self._caps.ceil_to_page(num_tokens)
        output = 0
        if num_cached + num_tokens >= num_tokens_of(request):
            output = min(request.max_new_tokens, self._caps.max_reserved_tokens)
        behind = max(num_new - self._window, 0)
        self._left -= behind + min(num_new + output, self._window) + page
        self._available -= num_new + page

    def refund_preemption(self, request: Request) -> None:
        gain = self._view.window_gain(request)
        self._left += gain
        self._available += gain
        self._headroom += gain
        if request in self._view.unfinished:
            self._headroom += self._will_hold(request, request.num_computed_tokens)
        else:
            self._headroom += self._view.window_reserve_of(request)

    def refund_pauses(self, num_tokens: int) -> None:
        self._available += num_tokens
