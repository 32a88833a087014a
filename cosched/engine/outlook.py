"""What all that runs holds and is yet to take, kept in arrays from plan to plan.

Hardly anything of it changes between two plans, and what does not is not read again: with hundreds
of requests most of the time would go into fetching what belongs to each from all over the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cosched.core.view import Outlook
from cosched.engine import port
from cosched.engine.lengths import Lengths
from cosched.engine.running import Running
from cosched.engine.tracked import TrackedRequest
from cosched.kv.tree import KvTree
from cosched.length.beliefs import NUM_ENDS

__all__ = ["RunningOutlook"]

_UNTIL, _ROWS, _SHARED, _GAIN, _ENDS = range(5)
_NUM_COLUMNS = _ENDS + NUM_ENDS


class RunningOutlook:
    """Answers `View.outlook` for one scheduler, in O(1) for each that came since the last plan and
    a few array operations for all others."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._requests: Sequence[TrackedRequest] = ()
        self._table: Any = np.empty((_NUM_COLUMNS, 0), dtype=np.int64)
        """Of each of these: the output with which its length is looked at again, its rows, tokens
        at its head that the tree owned, of these those that it alone held, and the ends of its
        whole output until it is looked at again, the last ones of these columns."""
        self._num_shifts = -1
        self._places: dict[TrackedRequest, int] = {}
        """In the table, of those of whom it still holds."""

    def admitted(self, request: TrackedRequest) -> None:
        """It is about to run, maybe not for the first time: nobody may have asked since it was
        stopped."""
        self._places.pop(request, None)

    def of(
        self,
        running: Running,
        *,
        kv_tree: KvTree | None,
        gain_of: Callable[[TrackedRequest], int],
    ) -> Outlook:
        """kv_tree: knows what of the tree each alone holds; None: nobody does, `gain_of` is asked
        about each."""
        requests = running.everyone
        self._follow(requests)
        table = self._table
        num_output = np.array(running.num_output, dtype=np.int64)
        for place in np.flatnonzero(num_output >= table[_UNTIL]).tolist():
            table[_UNTIL, place], found = self._lengths.ends(
                requests[place], running.num_output[place]
            )
            table[_ENDS:, place] = (0,) * (NUM_ENDS - len(found)) + found
        ends = table[_ENDS:] - num_output
        if not running.are_plain:
            ends *= table[_ROWS]
        if kv_tree is None:
            return Outlook(np.array([gain_of(r) for r in requests], dtype=np.int64), ends)
        if self._num_shifts != kv_tree.num_shifts:
            self._num_shifts = kv_tree.num_shifts
            table[_GAIN] = -1
        # With results on their way, the last of a prompt comes into the tree while it runs.
        num_shared = np.array(running.num_shared, dtype=np.int64)
        unknown = np.flatnonzero((table[_SHARED] != num_shared) | (table[_GAIN] < 0)).tolist()
        table[_SHARED] = num_shared
        if unknown:
            nodes = [port.last_node(requests[place].req) for place in unknown]
            table[_GAIN, unknown] = kv_tree.gains_of_release(nodes)
        return Outlook(np.array(running.num_own, dtype=np.int64) + table[_GAIN], ends)

    def _follow(self, requests: Sequence[TrackedRequest]) -> None:
        """Bring the table in line with who runs now."""
        places = self._places
        if requests == self._requests and len(places) == len(requests):
            return
        found = [places.get(request, -1) for request in requests]
        table = self._table.take(found, axis=1) if places else np.empty((_NUM_COLUMNS, len(found)))
        for place, before in enumerate(found):
            if before < 0:
                request = requests[place]
                table[:, place] = 0
                table[_ROWS, place], table[_GAIN, place] = request.traits.num_rows, -1
        self._requests, self._table = requests, table.astype(np.int64, copy=False)
        self._places = {request: place for place, request in enumerate(requests)}
