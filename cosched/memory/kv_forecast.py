"""Admission by expected output lengths, instead of KV set aside for each request (own).

The lengths of many outputs together are predictable, and memory that one request releases serves
another. So no KV is set aside: a request is admitted if the predicted peak of the KV memory
(`cosched.memory.load_ahead`) stays below its size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cosched.core.kv_state import Match
from cosched.core.request import Request, RequestClass, num_tokens_left, num_tokens_of
from cosched.core.view import Outlook, View
from cosched.memory.load_ahead import LoadAhead, MostHeld

_DEVIATIONS = {RequestClass.ONLINE: 1.0, RequestClass.OFFLINE: 2.0}
"""Standard deviations of the total for which there must be memory when a request of that class is
admitted. Fewer for online requests: waiting costs them their target, and if memory runs short an
offline request is preempted. An offline request that waits leaves headroom for later arrivals."""


class _Kv(NamedTuple):
    """Of a request. held: KV tokens of its prompt and of what it has generated; ends: tokens that
    it adds by each of its possible ends."""

    held: int
    ends: tuple[int, ...]


class _Running:
    """The KV of running requests and unfinished prefills. Each answer is computed when it is first
    asked for, by whichever copy of a forecast: a trial and the plan after it ask the same."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._page = view.caps.page_size
        self._changed: dict[tuple[LoadAhead, _Kv, bool], LoadAhead] = {}

    @property
    def num(self) -> int:
        return len(self._view.running) + len(self._view.unfinished)

    @cached_property
    def most(self) -> MostHeld:
        most = MostHeld.of(*self._outlook, page=self._page)
        for one in self._unfinished:
            most = most.with_one(*one)
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
        for one in self._unfinished:
            load = load.with_one(*one)
        return load

    def changed(self, load: LoadAhead, one: _Kv, *, more: bool) -> LoadAhead:
        """A load with one more request, or without one."""
        key = load, one, more
        if (found := self._changed.get(key)) is None:
            change = load.with_one if more else load.without
            found = self._changed[key] = change(*one)
        return found

    @cached_property
    def _outlook(self) -> Outlook:
        return self._view.outlook()

    @property
    def _unfinished(self) -> Iterator[_Kv]:
        for request in self._view.unfinished:
            yield _under_way(self._view, request, num_tokens_left(request))


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
        self._admitted: tuple[_Kv, ...] = ()

    def fork(self) -> KvForecast:
        return copy.copy(self)

    def fits(self, request: Request, match: Match, *, spare: int = 0) -> bool:
        """True if there is memory for a waiting request and `spare` more KV tokens."""
        if not self._running.num + self._num_admitted and not spare:
            return True
        most = (self._most or self._running.most).with_one(*self._new(request, match)).most
        if most + self._running.shared <= self._view.kv.total - spare:
            return True
        return self.shortfall(request, match) <= -spare

    def shortfall(self, request: Request, match: Match) -> int:
        """KV tokens missing to admit a waiting request; <= 0 when it fits: by which the peak until
        it ends would be above the memory."""
        new = self._new(request, match)
        load = self._running.changed(self._ahead(), new, more=True)
        peak = load.peak(_DEVIATIONS[request.request_class], until=max(new.ends[-1], 1))
        return math.ceil(peak) + self._running.shared - self._view.kv.total

    def add(self, request: Request, match: Match) -> None:
        """A waiting request is admitted, or its memory is set aside until it can be."""
        new = self._new(request, match)
        self._num_admitted += 1
        self._most = (self._most or self._running.most).with_one(*new)
        self._admitted += (new,)

    def drop(self, request: Request, num_left: int) -> None:
        """A running request or an unfinished prefill is preempted. num_left: tokens of its prompt
        that are not computed yet."""
        one = _under_way(self._view, request, num_left)
        self._load = self._running.changed(self._ahead(), one, more=False)
        self._num_admitted -= 1

    def _ahead(self) -> LoadAhead:
        """Of all running and admitted requests."""
        load = self._load or self._running.load
        for new in self._admitted:
            load = self._running.changed(load, new, more=True)
        self._load, self._admitted = load, ()
        return load

    def _new(self, request: Request, match: Match) -> _Kv:
        """A waiting request."""
        held = num_tokens_of(request) - match.cached + match.to_load + match.evictable
        return _kv_of(self._view, request, held + self._view.caps.page_size)


def _under_way(view: View, request: Request, num_left: int) -> _Kv:
    """A running request, or an unfinished prefill with `num_left` tokens to compute."""
    return _kv_of(view, request, view.preemption_gain(request) + num_left)


def _kv_of(view: View, request: Request, held: int) -> _Kv:
    num_rows = request.traits.num_rows
    left = view.length(request).ends_left(request.num_output_tokens)
    return _Kv(held, left if num_rows == 1 else tuple(n * num_rows for n in left))
