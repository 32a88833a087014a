"""Admission by expected output lengths, instead of KV set aside for each request (own).

The lengths of many outputs together are predictable, and memory that one request releases serves
another. So no KV is set aside: a request is admitted if the predicted peak of the KV memory
(`cosched.schedule.load`) stays below its size.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

from cosched.core.request import Request, RequestClass, num_tokens_left, num_tokens_of
from cosched.core.view import Match, Outlook, View
from cosched.schedule.load import LoadAhead, MostHeld

_DEVIATIONS = {RequestClass.ONLINE: 1.0, RequestClass.OFFLINE: 2.0}
"""Standard deviations of the total for which there must be memory when a request of that class is
admitted. Fewer for online requests: waiting costs them their target, and if memory runs short an
offline request is preempted. An offline request that waits leaves headroom for later arrivals."""


class _New(NamedTuple):
    """A waiting request. held: KV tokens that its prompt would add; ends: tokens that it would add
    by each of its possible ends."""

    request: Request
    match: Match
    held: int
    ends: list[int]


class KvForecast:
    """The KV that running requests and those that a plan admits will hold until they end
    (`LengthEstimate.ends`).

    Computed lazily; the times of their ends only if memory is not enough for all of them at their
    last ones. Tokens that several requests share count for ever.
    """

    def __init__(self, view: View) -> None:
        kv = view.kv
        self._view = view
        self._capacity = kv.total
        self._used = kv.total - kv.free - kv.evictable
        self._shared = 0
        """KV tokens in use that no single request holds; valid once there is an outlook."""
        self._outlook: Outlook | None = None
        self._most = MostHeld()
        """Of all running and admitted requests, preempted ones included; likewise."""
        self._num = 0
        """Running and admitted requests, without preempted ones; likewise."""
        self._load: LoadAhead | None = None
        """The same without preempted requests and without `_admitted`; once it is needed."""
        self._admitted: tuple[_New, ...] = ()
        self._trial: tuple[LoadAhead, _New, LoadAhead] | None = None
        """The latest question: the load before, the request, and the load with it."""

    def fork(self) -> KvForecast:
        return copy.copy(self)

    def fits(self, request: Request, match: Match, *, spare: int = 0) -> bool:
        """True if there is memory for a waiting request and `spare` more KV tokens."""
        self._look()
        if not self._num and not spare:
            return True
        new = self._new(request, match)
        if self._most.with_one(new.held, new.ends).most + self._shared <= self._capacity - spare:
            return True
        return self._beyond(new) <= -spare

    def shortfall(self, request: Request, match: Match) -> int:
        """KV tokens missing to admit a waiting request; <= 0 when it fits."""
        return self._beyond(self._new(request, match))

    def add(self, request: Request, match: Match) -> None:
        """A waiting request is admitted, or its memory is set aside until it can be."""
        self._look()
        new = self._new(request, match)
        self._num += 1
        self._most = self._most.with_one(new.held, new.ends)
        trial = self._trial
        if trial is not None and trial[1] == new and trial[0] is self._load and not self._admitted:
            self._load = trial[2]
        else:
            self._admitted += (new,)

    def drop(self, request: Request, num_left: int) -> None:
        """A running request or an unfinished prefill is preempted. num_left: tokens of its prompt
        that are not computed yet."""
        held = self._view.preemption_gain(request) + num_left
        self._load = self._ahead().without(held, self._ends(request))
        self._num -= 1

    def _beyond(self, new: _New) -> int:
        """KV tokens by which the peak until a waiting request ends would be above the memory."""
        load = self._with(new)
        deviations = _DEVIATIONS[new.request.request_class]
        peak = load.peak(deviations, until=max(new.ends[-1], 1))
        return math.ceil(peak) + self._shared - self._capacity

    def _look(self) -> Outlook:
        """Read the running requests, once."""
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
            self._num = len(view.running) + len(view.unfinished)
        return outlook

    def _of_unfinished(self, request: Request) -> tuple[int, list[int]]:
        held = self._view.preemption_gain(request) + num_tokens_left(request)
        return held, self._ends(request)

    def _ahead(self) -> LoadAhead:
        """Of all running and admitted requests."""
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
