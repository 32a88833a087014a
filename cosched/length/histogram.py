"""Lengths of earlier requests that are like it."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from cosched.length.facts import ROOT, Cells, Facts
from cosched.length.window import Window

__all__ = ["Hints", "Histogram", "Pair"]

_KEPT = 0.98
"""Of a cell's gain, when another request is added: half is forgotten after 34 of them."""
_ROOT_WINDOWS = 4
"""Windows that the widest likeness holds."""
_MOST_KINDS = 256


class Pair(NamedTuple):
    """Quantiles of the whole output [tokens]."""

    median: float
    upper: float


class _Cell:
    """window  lengths of the newest requests of one likeness
    median, upper  their quantiles
    gain    how much better they were foretold with it than without it, each; newer ones weigh more
    """

    __slots__ = ("gain", "median", "upper", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.gain = self.median = self.upper = 0.0

    def add(self, value: float, coverage: float) -> None:
        window = self.window
        window.add(value)
        self.median, self.upper = window.quantile(0.5), window.quantile(coverage)

    def note(self, gain: float) -> None:
        self.gain = self.gain * _KEPT + min(max(gain, -1.0), 1.0)


class Histogram:
    """Quantiles of the lengths of like requests, learned online.

    What is like is a path from the widest likeness to the narrowest (`cells_of`), and which of
    them tells anything is learned too: a cell's quantiles are mixed into those of the cells before
    it while that has foretold its requests better (pinball loss of the median and the upper
    quantile), and left out while it has not. So prompt length speaks where it says something, a
    template where it does, and a prompt that is repeated speaks for itself.

    Forgets by count, not by time: no clock, so the same requests in the same order give the same
    numbers everywhere.
    """

    def __init__(self, *, coverage: float, window: int, max_cells: int) -> None:
        """coverage: level of the upper quantile."""
        self._coverage = coverage
        self._window = window
        self._max_cells = max_cells
        self._cells: OrderedDict[int, _Cell] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def root(self) -> Pair | None:
        """Of all requests; None: there were none."""
        cell = self._cells.get(ROOT)
        return None if cell is None else Pair(cell.median, cell.upper)

    def totals(self, cells: Cells) -> Pair | None:
        """What is known of a request; cells: of `cells_of`. None: nothing."""
        known = self._cells
        root = known.get(ROOT)
        if root is None:
            return None
        median, upper = root.median, root.upper
        for key, prior in cells[1:]:
            cell = known.get(key)
            if cell is None or cell.gain < 0:
                continue
            count = len(cell.window)
            share = count / (count + prior)
            median += share * (cell.median - median)
            upper += share * (cell.upper - upper)
        return Pair(median, upper)

    def survivors(self, cells: Cells, level: float, above: float) -> float | None:
        """Quantile of those that got longer than `above`; None: no like request did."""
        known = self._cells
        total: float | None = None
        for key, prior in cells:
            cell = known.get(key)
            if cell is None or cell.gain < 0:
                continue
            window = cell.window
            start = window.num_below(above)
            count = len(window) - start
            if not count:
                continue
            own = window.quantile(level, start)
            total = own if total is None else total + count / (count + prior) * (own - total)
        return total

    def learn(self, cells: Cells, length: int) -> tuple[Pair, Pair] | None:
        """A request has ended that was so long. What was known before, of all and of it; None:
        nothing."""
        known, coverage = self._cells, self._coverage
        root = known.get(ROOT)
        before: tuple[Pair, Pair] | None = None
        if root is None:
            root = known[ROOT] = _Cell(Window(_ROOT_WINDOWS * self._window))
            for key, _ in cells[1:]:
                self._new(key).add(length, coverage)
        else:
            known.move_to_end(ROOT)
            median, upper = first = root.median, root.upper
            loss = _loss(median, upper, coverage, length)
            for key, prior in cells[1:]:
                cell = known.get(key)
                if cell is None:
                    cell = self._new(key)
                else:
                    known.move_to_end(key)
                    count = len(cell.window)
                    share = count / (count + prior)
                    own_median = median + share * (cell.median - median)
                    own_upper = upper + share * (cell.upper - upper)
                    own_loss = _loss(own_median, own_upper, coverage, length)
                    gain = (loss - own_loss) / (median + 1.0)
                    if cell.gain >= 0:
                        median, upper, loss = own_median, own_upper, own_loss
                    cell.note(gain)
                cell.add(length, coverage)
            before = Pair(*first), Pair(median, upper)
        root.add(length, coverage)
        return before

    def _new(self, key: int) -> _Cell:
        """The one unused for longest goes for it."""
        cell = self._cells[key] = _Cell(Window(self._window))
        if len(self._cells) > self._max_cells:
            self._cells.popitem(last=False)
        return cell


class Hints:
    """What hints of clients are worth: the length as a multiple of the hint, learned online.

    Used while that has foretold lengths better than the histogram, for each kind by itself.
    """

    def __init__(self, *, coverage: float, window: int) -> None:
        """coverage: level of the upper quantile."""
        self._coverage = coverage
        self._window = window
        self._cells: OrderedDict[int, _Cell] = OrderedDict()

    def totals(self, facts: Facts) -> Pair | None:
        """By the hint of a request; None: there is none, or hints of its kind are not to be
        believed. A first hint is believed to be exact to a factor of two."""
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

    def learn(self, facts: Facts, length: int, others: Pair | None) -> None:
        """A request with a hint has ended; others: what was known without the hint."""
        assert facts.hint is not None, "there is a hint"
        key = hash(facts.kind)
        cell = self._cells.get(key)
        own = self._own(cell, facts.hint)
        if cell is None:
            cell = self._cells[key] = _Cell(Window(self._window, typecode="d"))
            if len(self._cells) > _MOST_KINDS:
                self._cells.popitem(last=False)
        else:
            self._cells.move_to_end(key)
        if others is not None:
            gain = _loss(*others, self._coverage, length) - _loss(*own, self._coverage, length)
            cell.note(gain / (others.median + 1.0))
        cell.add(math.log(max(length, 1) / facts.hint), self._coverage)


def _loss(median: float, upper: float, coverage: float, length: int) -> float:
    """Sum of the pinball losses of both quantiles [tokens]."""
    beyond = length - upper
    return abs(length - median) / 2 + beyond * (coverage if beyond >= 0 else coverage - 1)
