"""Memory by the expected lengths of outputs, in place of what is set aside for each (own).

Where outputs end is known well enough for many requests together, and they do not end at once: what
one gives back another takes. So nothing is set aside for any of them; what is admitted must leave
the peak of all iterations to come (`cosched.planning.timeline`) below the memory there is.
"""

from __future__ import annotations

import copy

from cosched.core.request import Request, num_tokens_left, num_tokens_of
from cosched.core.view import Match, View
from cosched.planning.timeline import Need, Timeline

__all__ = ["KvForecast"]


class KvForecast:
    """What running requests and those that a plan admits hold until they end, by the upper
    estimates of their lengths (`LengthEstimate.upper`).

    Nothing is looked at before it is first asked. Tokens that several requests share count as if
    none of them ever ended.
    """

    def __init__(self, view: View, *, reserve_share: float = 0.0) -> None:
        """reserve_share: of the KV memory, that is kept for outputs longer than expected."""
        kv = view.kv
        self._view = view
        self._most = int(kv.total * (1 - reserve_share))
        self._used = kv.total - kv.free - kv.evictable
        self._shared = 0
        self._timeline: Timeline | None = None

    def fork(self) -> KvForecast:
        return copy.copy(self)

    def shortfall(self, request: Request, match: Match) -> int:
        """KV tokens missing to admit a waiting request; <= 0 when it fits."""
        peak = self._ends().peak_with(self._need(request, match))
        return self._shared + peak - self._most

    @property
    def spare(self) -> int:
        """KV tokens that nobody uses or will use; less what is cached of those that are over, maybe
        negative."""
        return self._most - self._ends().peak - self._shared - self._view.kv.evictable

    def output(self, request: Request) -> int:
        """KV tokens that it is to take until it ends."""
        return self._view.length(request).upper * request.traits.num_rows

    def add(self, request: Request, match: Match) -> None:
        """A waiting request is admitted."""
        self._timeline = self._ends().with_one(self._need(request, match))

    def drop(self, request: Request, num_left: int) -> None:
        """A running request or an unfinished prefill is stopped. num_left: tokens of its prompt
        that are still to be computed."""
        self._timeline = self._ends().without(self._need_of(request, num_left))

    def _ends(self) -> Timeline:
        if self._timeline is None:
            view = self._view
            held, remaining = view.outlook()
            timeline = Timeline(held, remaining)
            self._shared = self._used - timeline.held
            for request in view.unfinished:
                timeline = timeline.with_one(self._need_of(request, num_tokens_left(request)))
                self._shared -= view.preemption_gain(request)
            self._timeline = timeline
        return self._timeline

    def _need_of(self, request: Request, num_left: int) -> Need:
        return Need(self._view.preemption_gain(request) + num_left, self.output(request))

    def _need(self, request: Request, match: Match) -> Need:
        num_new = num_tokens_of(request) - match.cached + match.host + match.evictable
        return Need(num_new + self._view.caps.page_size, self.output(request))
