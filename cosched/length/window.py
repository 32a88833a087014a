"""The newest so many values, in order."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort

__all__ = ["Window"]


class Window:
    """A sliding window with quantiles. Memory is what the values take, twice.

    The k-th of n values is the quantile k / (n + 1), which covers that share of what comes next
    (Weibull 1939); between two it is interpolated, beyond the last it is the last.
    """

    __slots__ = ("_next", "_ordered", "_ring", "_size")

    def __init__(self, size: int, *, typecode: str = "I") -> None:
        """typecode: of the values (`array`)."""
        self._size = size
        self._ordered = array(typecode)
        self._ring = array(typecode)
        self._next = 0

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float) -> None:
        """The oldest value goes for it when the window is full. O(log n), and moving bytes."""
        ordered, ring = self._ordered, self._ring
        if len(ring) < self._size:
            ring.append(value)  # type: ignore[arg-type]
        else:
            index = self._next
            del ordered[bisect_left(ordered, ring[index])]
            ring[index] = value  # type: ignore[call-overload]
            self._next = (index + 1) % self._size
        insort(ordered, value)  # type: ignore[misc]

    def num_below(self, value: float) -> int:
        """Values that are not above it."""
        return bisect_right(self._ordered, value)

    def quantile(self, level: float, start: int = 0) -> float:
        """Of the values but for the `start` lowest; there must be one."""
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
