"""Memory by the expected lengths of outputs, in place of what is set aside for each (own).

Where outputs end is known well enough for many requests together, and they do not end at once: what
one gives back another takes. So nothing is set aside for any of them; what is admitted must leave
the peak of all iterations to come (`cosched.planning.load`) below the memory there is.
"""

from __future__ import annotations

import copy
import math

from cosched.core.request import Request, RequestClass, num_tokens_left, num_tokens_of
from cosched.core.view import Match, View
from cosched.planning.load import LoadAhead

__all__ = ["KvForecast"]

_DEVIATIONS = {RequestClass.ONLINE: 1.0, RequestClass.OFFLINE: 2.0}
"""Standard deviations of what all hold together, for which there must be memory beside a request of
that class. An online request that waits is late, and where memory is short one day it is offline
work that is stopped; an offline one that waits costs nothing, and leaves room to who comes next."""


class KvForecast:
    """What running requests and those that a plan admits hold until they end, by the ends of their
    outputs (`LengthEstimate.ends`).

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
        self._load: LoadAhead | None = None
        self._trial: tuple[LoadAhead, Request, Match, LoadAhead] | None = None
        """Of the last request that was asked about: what it was asked beside, and both."""

    def fork(self) -> KvForecast:
        return copy.copy(self)

    def shortfall(self, request: Request, match: Match) -> int:
        """KV tokens missing to admit a waiting request; <= 0 when it fits."""
        return self._beyond(self._with(request, match), request.request_class)

    @property
    def spare(self) -> int:
        """KV tokens that nobody uses or will use; less what is cached of those that are over, maybe
        negative."""
        return -self._beyond(self._ahead(), RequestClass.OFFLINE) - self._view.kv.evictable

    def output(self, request: Request) -> int:
        """KV tokens that it is to take until it ends, at the upper end."""
        return self._view.length(request).upper * request.traits.num_rows

    def add(self, request: Request, match: Match) -> None:
        """A waiting request is admitted."""
        self._load = self._with(request, match)

    def drop(self, request: Request, num_left: int) -> None:
        """A running request or an unfinished prefill is stopped. num_left: tokens of its prompt
        that are still to be computed."""
        held = self._view.preemption_gain(request) + num_left
        self._load = self._ahead().without(held, self._ends(request))

    def _beyond(self, load: LoadAhead, beside: RequestClass) -> int:
        """KV tokens by which its peak is above the memory, beside a request of that class."""
        return math.ceil(load.peak(_DEVIATIONS[beside])) + self._shared - self._most

    def _ahead(self) -> LoadAhead:
        """Of all that runs and was admitted."""
        if self._load is None:
            view = self._view
            held, ends = view.outlook()
            page = view.caps.page_size
            load = LoadAhead(held, ends, page=page)
            self._shared = self._used - load.held
            for request in view.unfinished:
                gain = view.preemption_gain(request)
                load = load.with_one(gain + num_tokens_left(request), self._ends(request))
                self._shared -= gain
            self._load = load
        return self._load

    def _with(self, request: Request, match: Match) -> LoadAhead:
        """A waiting request beside them."""
        ahead, trial = self._ahead(), self._trial
        asked = None if trial is None else trial[:3]
        if asked != (ahead, request, match):
            num_new = num_tokens_of(request) - match.cached + match.host + match.evictable
            both = ahead.with_one(num_new + self._view.caps.page_size, self._ends(request))
            trial = self._trial = ahead, request, match, both
        assert trial is not None, "asked just now"
        return trial[3]

    def _ends(self, request: Request) -> list[int]:
        left = self._view.length(request).ends_left(request.num_output_tokens)
        return [n * request.traits.num_rows for n in left]
