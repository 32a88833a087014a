"""Lengths of earlier similar requests.

A request belongs to groups of similar requests, from the widest (all) to the narrowest (the same
prompt); `cells_of` lists them. Each group keeps the newest lengths. Counts alone decide what is
forgotten: without a clock the same requests in the same order give the same numbers everywhere.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

_ROOT = 0
"""Key of the widest group: all requests."""
_PRIOR, _PRIOR_OF_PROMPT = 5.0, 1.0
"""Requests that the wider groups count as beside a group's own. The same prompt, answered once,
says more than a few other prompts."""
_SHORT_HEAD, _LONG_HEAD = 16, 64
"""Tokens at the start of a prompt that identify its template."""
_ENDS = 128
"""A prompt longer than twice this is identified by this many tokens at each end and its length:
hashing a long document would take longer than it is worth."""
_COARSE, _FINE = 4, 16
"""Classes of prompt length per octave."""
_KEPT = 0.98
"""Of a group's gain at each new request: half is forgotten after 34 of them."""
_ROOT_WINDOWS = 4
"""Windows that the widest group holds."""
_MOST_KINDS = 256

Cells: TypeAlias = tuple[tuple[int, float], ...]
"""(hash of a group, requests that the wider groups count as beside its own)."""


class Facts(NamedTuple):
    """What is known of a reply before its first token.

    rid     id of the request
    kind    requests of different kinds are never similar: class, adapter, tenant, grammar
    prompt  token ids: an array, or a sequence of them
    limit   most output tokens that it may generate
    hint    output tokens that the client expects; None: it gives none
    """

    rid: str
    kind: Hashable
    prompt: Sequence[int]
    limit: int
    hint: int | None = None


class Pair(NamedTuple):
    """Quantiles of the whole output [tokens]."""

    median: float
    upper: float


def cells_of(facts: Facts) -> Cells:
    """The groups of a request, from the widest to the narrowest: all; its kind and the octave of
    its limit; its prompt's length by quarter and by sixteenth of an octave; its template, by a
    short and by a long head, the latter by length too; the same prompt.

    Hashes are equal only within a process. They never leave it, and their order is not used.
    """
    prompt = facts.prompt
    kind = hash((facts.kind, facts.limit.bit_length()))
    octaves = math.log2(len(prompt)) if len(prompt) > 0 else 0.0
    coarse = int(octaves * _COARSE)
    keys = [_ROOT, kind, hash((kind, 1, coarse)), hash((kind, 2, int(octaves * _FINE)))]
    if len(prompt) >= _SHORT_HEAD:
        keys.append(hash((kind, 3, _key(prompt[:_SHORT_HEAD]))))
    if len(prompt) >= _LONG_HEAD:
        head = hash((kind, 4, _key(prompt[:_LONG_HEAD])))
        keys += (head, hash((head, coarse)))
    cells = [(key, _PRIOR) for key in keys]
    if len(prompt) > 2 * _ENDS:
        ends = _key(prompt[:_ENDS]), _key(prompt[-_ENDS:])
        cells.append((hash((kind, 6, ends, len(prompt))), _PRIOR_OF_PROMPT))
    elif len(prompt):
        cells.append((hash((kind, 5, _key(prompt))), _PRIOR_OF_PROMPT))
    return tuple(cells)


def _key(tokens: Sequence[int]) -> Hashable:
    # An array hashes its bytes; other sequences (in tests) are tuples of the same ids.
    return tokens.tobytes() if hasattr(tokens, "tobytes") else tuple(tokens)


class Window:
    """The newest values, with quantiles.

    The k-th of n values is the quantile k / (n + 1), which covers that share of what comes next
    (Weibull 1939); between two values it is interpolated, beyond the last one it is the last.
    """

    __slots__ = ("_next", "_ordered", "_ring", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._ordered: list[float] = []
        self._ring: list[float] = []  # a deque takes 0.6 kB even for one value
        self._next = 0

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float) -> None:
        """Replaces the oldest value if the window is full."""
        ordered, ring = self._ordered, self._ring
        if len(ring) < self._size:
            ring.append(value)
        else:
            index = self._next
            del ordered[bisect_left(ordered, ring[index])]
            ring[index] = value
            self._next = (index + 1) % self._size
        insort(ordered, value)

    def above(self, value: float, level: float) -> tuple[int, float]:
        """How many values are above this one, and their quantile; 0.0 if there are none."""
        start = bisect_right(self._ordered, value)
        count = len(self._ordered) - start
        return count, self.quantile(level, start) if count else 0.0

    def quantile(self, level: float, start: int = 0) -> float:
        """Of the values except the `start` lowest; there must be one."""
        ordered = self._ordered
        count = len(ordered) - start
        place = level * (count + 1) - 1
        if place <= 0:
            return ordered[start]
        index = int(place)
        if index >= count - 1:
            return ordered[-1]
        index += start
        low = ordered[index]
        return low + (place - int(place)) * (ordered[index + 1] - low)


class _Cell:
    """A group of similar requests.

    window         newest lengths, `count` of them
    median, upper  their quantiles
    gain           how much smaller the error is with the group than without it, as a moving average
    """

    __slots__ = ("count", "gain", "median", "upper", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.count = 0
        self.gain = self.median = self.upper = 0.0

    def add(self, value: float, coverage: float) -> None:
        window = self.window
        window.add(value)
        self.count = len(window)
        self.median, self.upper = window.quantile(0.5), window.quantile(coverage)

    def note(self, gain: float) -> None:
        self.gain = self.gain * _KEPT + min(max(gain, -1.0), 1.0)


class Similar:
    """Groups of requests that are similar to one, from the widest to the narrowest."""

    __slots__ = ("_cells",)

    def __init__(self, cells: Sequence[tuple[_Cell, float]]) -> None:
        self._cells = cells

    def totals(self) -> Pair:
        """Estimate for the request before its first token."""
        root = self._cells[0][0]
        median, upper = root.median, root.upper
        for cell, prior in self._cells[1:]:
            share = cell.count / (cell.count + prior)
            median += share * (cell.median - median)
            upper += share * (cell.upper - upper)
        return Pair(median, upper)

    def survivors(self, level: float, above: float) -> float | None:
        """Quantile of the lengths above `above`; None if there are none."""
        total: float | None = None
        for cell, prior in self._cells:
            count, own = cell.window.above(above, level)
            if count:
                total = own if total is None else total + count / (count + prior) * (own - total)
        return total


class Histogram:
    """Quantiles of the lengths of similar requests, learned online.

    From the widest group to the narrowest, a group's quantiles are mixed into those of the groups
    before it while that has made predictions of its requests better (pinball loss of the median and
    the upper quantile), and left out while it has not. So prompt length, template and repetition
    count where they say something.
    """

    def __init__(self, *, coverage: float, window: int, max_cells: int) -> None:
        """coverage: level of the upper quantile."""
        self._coverage = coverage
        self._window = window
        self._max_cells = max_cells
        self._cells: OrderedDict[int, _Cell] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cells)

    def similar(self, cells: Cells) -> Similar | None:
        """The groups of a request (`cells_of`) that count; None before the first request."""
        known = self._cells
        if _ROOT not in known:
            return None
        found = ((known.get(key), prior) for key, prior in cells)
        return Similar([(cell, prior) for cell, prior in found if cell and cell.gain >= 0])

    def learn(self, cells: Cells, length: int) -> Pair | None:
        """Learn from a request that has ended. Returns the estimate for it before that."""
        known, coverage = self._cells, self._coverage
        root = known.get(_ROOT)
        before: Pair | None = None
        if root is None:
            root = known[_ROOT] = _Cell(Window(_ROOT_WINDOWS * self._window))
            for key, _ in cells[1:]:
                self._new(key).add(length, coverage)
        else:
            known.move_to_end(_ROOT)
            median, upper = root.median, root.upper
            loss = _loss(median, upper, coverage, length)
            for key, prior in cells[1:]:
                cell = known.get(key)
                if cell is None:
                    cell = self._new(key)
                else:
                    known.move_to_end(key)
                    share = cell.count / (cell.count + prior)
                    own_median = median + share * (cell.median - median)
                    own_upper = upper + share * (cell.upper - upper)
                    own_loss = _loss(own_median, own_upper, coverage, length)
                    gain = (loss - own_loss) / (median + 1.0)
                    if cell.gain >= 0:
                        median, upper, loss = own_median, own_upper, own_loss
                    cell.note(gain)
                cell.add(length, coverage)
            before = Pair(median, upper)
        root.add(length, coverage)
        return before

    def _new(self, key: int) -> _Cell:
        """Replaces the least recently used group if there are too many."""
        cell = self._cells[key] = _Cell(Window(self._window))
        if len(self._cells) > self._max_cells:
            self._cells.popitem(last=False)
        return cell


class Hints:
    """How accurate clients' hints are: the length as a multiple of the hint, learned online for
    each kind of request. Used while that has been better than the histogram."""

    def __init__(self, *, coverage: float, window: int) -> None:
        """coverage: level of the upper quantile."""
        self._coverage = coverage
        self._window = window
        self._cells: OrderedDict[int, _Cell] = OrderedDict()

    def totals(self, facts: Facts) -> Pair | None:
        """Estimate by the hint of a request; None without a hint, or if hints of its kind are worse
        than the histogram. A first hint is assumed to be exact to a factor of two."""
        if facts.hint is None:
            return None
        cell = self._cells.get(hash(facts.kind))
        if cell is not None and cell.gain < 0:
            return None
        return self._own(cell, facts.hint)

    @staticmethod
    def _own(cell: _Cell | None, hint: int) -> Pair:
        if cell is None:
            return Pair(hint, 2 * hint)
        return Pair(hint * math.exp(cell.median), hint * math.exp(cell.upper))

    def learn(self, facts: Facts, length: int, others: Pair) -> None:
        """Learn from a request with a hint that has ended. others: the estimate without it."""
        assert facts.hint is not None, "there is a hint"
        key = hash(facts.kind)
        cell = self._cells.get(key)
        own = self._own(cell, facts.hint)
        if cell is None:
            cell = self._cells[key] = _Cell(Window(self._window))
            if len(self._cells) > _MOST_KINDS:
                self._cells.popitem(last=False)
        else:
            self._cells.move_to_end(key)
        gain = _loss(*others, self._coverage, length) - _loss(*own, self._coverage, length)
        cell.note(gain / (others.median + 1.0))
        cell.add(math.log(max(length, 1) / facts.hint), self._coverage)


def _loss(median: float, upper: float, coverage: float, length: int) -> float:
    """Sum of the pinball losses of both quantiles [tokens]."""
    beyond = length - upper
    return abs(length - median) / 2 + beyond * (coverage if beyond >= 0 else coverage - 1)
