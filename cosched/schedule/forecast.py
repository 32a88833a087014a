"""Admission by expected output lengths, instead of KV set aside for each request (own).

The lengths of many outputs together are predictable, and memory that one request releases serves
another. So no KV is set aside: a request is admitted if the predicted peak of the KV memory
(`cosched.schedule.load`) stays below its size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

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


class _Running:
    """The KV of running requests and unfinished prefills. Each answer is computed when it is first
    asked for, by whichever copy of a forecast."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._page = view.caps.page_size

    @property
    def num(self) -> int:
        return len(self._view.running) + len(self._view.unfinished)

    @cached_property
    def most(self) -> MostHeld:
        most = MostHeld.of(*self._outlook, page=self._page)
        for held, ends in self._unfinished:
            most = most.with_one(held, ends)
        return most

    @cached_property
    def shared(self) -> int:
        """KV tokens in use that no single request holds. They count for ever."""
        view, kv = self._view, self._view.kv
        own = int(np.add.reduce(self._outlook.held))
        own += sum(map(view.preemption_gain, view.unfinished))
        return kv.total - kv.free - kv.evictable - own

    @cached_property
    def load(self) -> LoadAhead:
        load = LoadAhead(*self._outlook, page=self._page)
        for held, ends in self._unfinished:
            load = load.with_one(held, ends)
        return load

    @cached_property
    def _outlook(self) -> Outlook:
        return self._view.outlook()

    @property
    def _unfinished(self) -> Iterator[tuple[int, list[int]]]:
        view = self._view
        for request in view.unfinished:
            held = view.preemption_gain(request) + num_tokens_left(request)
            yield held, _ends(view, request)


class KvForecast:
    """The KV that running requests and those that a plan admits will hold until they end
    (`LengthEstimate.ends`).

    The times of their ends are computed only if memory is not enough for all of them at their last
    ones.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._running = _Running(view)
        self._num_admitted = 0
        """Less those that are preempted."""
        self._most: MostHeld | None = None
        """Of all running and admitted requests, preempted ones included; None: nothing admitted."""
        self._load: LoadAhead | None = None
        """The same without preempted requests and without `_admitted`; None: nothing changed."""
        self._admitted: tuple[_New, ...] = ()
        self._trial: tuple[LoadAhead, _New, LoadAhead] | None = None
        """The latest question: the load before, the request, and the load with it."""

    def fork(self) -> KvForecast:
        return copy.copy(self)

    def fits(self, request: Request, match: Match, *, spare: int = 0) -> bool:
        """True if there is memory for a waiting request and `spare` more KV tokens."""
        if not self._running.num + self._num_admitted and not spare:
            return True
        new = self._new(request, match)
        most = (self._most or self._running.most).with_one(new.held, new.ends).most
        if most + self._running.shared <= self._view.kv.total - spare:
            return True
        return self._beyond(new) <= -spare

    def shortfall(self, request: Request, match: Match) -> int:
        """KV tokens missing to admit a waiting request; <= 0 when it fits."""
        return self._beyond(self._new(request, match))

    def add(self, request: Request, match: Match) -> None:
        """A waiting request is admitted, or its memory is set aside until it can be."""
        new = self._new(request, match)
        self._num_admitted += 1
        self._most = (self._most or self._running.most).with_one(new.held, new.ends)
        trial = self._trial
        if trial is not None and trial[1] == new and trial[0] is self._load and not self._admitted:
            self._load = trial[2]
        else:
            self._admitted += (new,)

    def drop(self, request: Request, num_left: int) -> None:
        """A running request or an unfinished prefill is preempted. num_left: tokens of its prompt
        that are not computed yet."""
        held = self._view.preemption_gain(request) + num_left
        self._load = self._ahead().without(held, _ends(self._view, request))
        self._num_admitted -= 1

    def _beyond(self, new: _New) -> int:
        """KV tokens by which the peak until a waiting request ends would be above the memory."""
        load = self._with(new)
        deviations = _DEVIATIONS[new.request.request_class]
        peak = load.peak(deviations, until=max(new.ends[-1], 1))
        return math.ceil(peak) + self._running.shared - self._view.kv.total

    def _ahead(self) -> LoadAhead:
        """Of all running and admitted requests."""
        load = self._load or self._running.load
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
        return _New(request, match, held, _ends(self._view, request))


def _ends(view: View, request: Request) -> list[int]:
    left = view.length(request).ends_left(request.num_output_tokens)
    return [n * request.traits.num_rows for n in left]
