"""Memory by the expected lengths of outputs, in place of what is set aside for each (own).

Where outputs end is known well enough for many requests together, and they do not end at once: what
one gives back another takes. So nothing is set aside for any of them; what is admitted must leave
the peak of all iterations to come (`cosched.schedule.load`) below the memory there is.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

from cosched.core.request import Request, RequestClass, num_tokens_left, num_tokens_of
from cosched.core.view import Match, Outlook, View
from cosched.schedule.load import LoadAhead, MostHeld

_DEVIATIONS = {RequestClass.ONLINE: 1.0, RequestClass.OFFLINE: 2.0}
"""Standard deviations of what all hold together, for which there must be memory beside a request of
that class. An online request that waits is late, and where memory is short one day it is offline
work that is stopped; an offline one that waits costs nothing, and leaves room to who comes next."""


class _New(NamedTuple):
    """A waiting request: KV tokens that nobody holds and it would hold when its prompt is
    computed, and that it is to take until each of its ends."""

    request: Request
    match: Match
    held: int
    ends: list[int]


class KvForecast:
    """What running requests and those that a plan admits hold until they end, by the ends of their
    outputs (`LengthEstimate.ends`).

    Nothing is looked at before it is first asked; how their ends lie in time only where there is
    not enough memory for all of them at their last ones. Tokens that several requests share count
    as if none of them ever ended.
    """

    def __init__(self, view: View, *, reserve_share: float = 0.0) -> None:
        """reserve_share: of the KV memory, that is kept for outputs longer than expected."""
        kv = view.kv
        self._view = view
        self._room = int(kv.total * (1 - reserve_share))
        self._used = kv.total - kv.free - kv.evictable
        self._shared = 0
        """KV tokens used that belong to no single one of them; once there is an outlook."""
        self._outlook: Outlook | None = None
        self._most = MostHeld()
        """Of all that runs or was admitted, also if it was stopped since; likewise."""
        self._load: LoadAhead | None = None
        """The same without those stopped and without `_admitted`; once it is asked for."""
        self._admitted: tuple[_New, ...] = ()
        self._trial: tuple[LoadAhead, _New, LoadAhead] | None = None
        """Of the last request that was asked about: what it was asked beside, and both."""

    def fork(self) -> KvForecast:
        return copy.copy(self)

    def fits(self, request: Request, match: Match, *, spare: int = 0) -> bool:
        """Whether there is memory for a waiting request, and KV tokens to spare."""
        self._look()
        new = self._new(request, match)
        deviations = _DEVIATIONS[request.request_class]
        most = self._most.with_one(new.held, new.ends)
        if most.peak(deviations) + self._shared <= self._room - spare:
            return True
        return self._beyond(self._with(new), deviations) <= -spare

    def shortfall(self, request: Request, match: Match) -> int:
        """KV tokens missing to admit a waiting request; <= 0 when it fits."""
        load = self._with(self._new(request, match))
        return self._beyond(load, _DEVIATIONS[request.request_class])

    @property
    def spare(self) -> int:
        """KV tokens that nobody uses or will use; less what is cached of those that are over, maybe
        negative."""
        beyond = self._beyond(self._ahead(), _DEVIATIONS[RequestClass.OFFLINE])
        return -beyond - self._view.kv.evictable

    def output(self, request: Request) -> int:
        """KV tokens that it is to take until it ends, at the upper end."""
        return self._view.length(request).upper * request.traits.num_rows

    def add(self, request: Request, match: Match) -> None:
        """A waiting request is admitted."""
        self._look()
        new = self._new(request, match)
        self._most = self._most.with_one(new.held, new.ends)
        trial = self._trial
        if trial is not None and trial[1] == new and trial[0] is self._load and not self._admitted:
            self._load = trial[2]
        else:
            self._admitted += (new,)

    def drop(self, request: Request, num_left: int) -> None:
        """A running request or an unfinished prefill is stopped. num_left: tokens of its prompt
        that are still to be computed."""
        held = self._view.preemption_gain(request) + num_left
        self._load = self._ahead().without(held, self._ends(request))

    def _beyond(self, load: LoadAhead, deviations: float) -> int:
        """KV tokens by which its peak is above the memory."""
        return math.ceil(load.peak(deviations)) + self._shared - self._room

    def _look(self) -> Outlook:
        """At what runs, once."""
        outlook = self._outlook
        if outlook is None:
            view = self._view
            outlook = self._outlook = view.outlook()
            most = MostHeld.of(*outlook, page=view.caps.page_size)
            self._shared = self._used - most.held
            for request in view.unfinished:
                held, ends = self._of_unfinished(request)
                most = most.with_one(held, ends)
                self._shared -= view.preemption_gain(request)
            self._most = most
        return outlook

    def _of_unfinished(self, request: Request) -> tuple[int, list[int]]:
        held = self._view.preemption_gain(request) + num_tokens_left(request)
        return held, self._ends(request)

    def _ahead(self) -> LoadAhead:
        """Of all that runs and was admitted."""
        outlook, load = self._look(), self._load
        if load is None:
            load = LoadAhead(*outlook, page=self._view.caps.page_size)
            for request in self._view.unfinished:
                load = load.with_one(*self._of_unfinished(request))
        for new in self._admitted:
            load = load.with_one(new.held, new.ends)
        self._load, self._admitted = load, ()
        return load

    def _with(self, new: _New) -> LoadAhead:
        """A waiting request beside them."""
        ahead, trial = self._ahead(), self._trial
        if trial is None or trial[:2] != (ahead, new):
            trial = self._trial = ahead, new, ahead.with_one(new.held, new.ends)
        return trial[2]

    def _new(self, request: Request, match: Match) -> _New:
        held = num_tokens_of(request) - match.cached + match.host + match.evictable
        held += self._view.caps.page_size
        return _New(request, match, held, self._ends(request))

    def _ends(self, request: Request) -> list[int]:
        left = self._view.length(request).ends_left(request.num_output_tokens)
        return [n * request.traits.num_rows for n in left]
