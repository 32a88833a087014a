"""SGLang's radix tree on one of several ranks, watched: all evict what rank 0 says.

With tensor parallelism every rank has a tree of its own, and all must evict the same nodes. Who
goes first depends on clocks, on what was learned and on who waits, which rank 0 alone knows; so it
sends with each plan which nodes go (`cosched.engine.ranks`), and every rank, rank 0 among them,
takes the first of these that can go at the time. Trees that are told the same give their nodes the
same numbers. Where the list ends, or there is none, the engine's own order goes on: it is the same
everywhere by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
)

from cosched.engine.tree_core import WatchedTreeCore
from cosched.memory.eviction import Eviction


class RankedTreeCore(WatchedTreeCore):
    """See the module's docstring."""

    _OWN: ClassVar[frozenset[str]] = WatchedTreeCore._OWN | {"_given", "_is_by_engine"}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._given: deque[Eviction] | None = None
        self._is_by_engine = True

    def give(self, evictions: Sequence[Eviction] | None) -> None:
        """What goes until the next plan, in this order; None: the engine's order holds."""
        self._given = None if evictions is None else deque(evictions)

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        if self._given is not None:
            if self.is_off:
                raise RuntimeError("this rank has lost track of its KV since the others were told")
            if not self._agrees():
                self._given = None  # on all ranks: what they compare is equal
        self._quota = request_cnt
        self._is_by_engine = self._given is None
        if self._is_by_engine:
            self._core.evict_device_start(component_type, request_cnt)

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        if not self._is_by_engine:
            num_evicted = tracker[component_type]
            if num_evicted >= self._quota:
                return EvictDeviceNextNodeResult()
            while self._given:
                node_id, keeps_head = self._given.popleft()
                node = self._tree.nodes.get(node_id)
                if node is not None and node.is_leaf:
                    if keeps_head:
                        self._keep_head(node, self._missing(num_evicted))
                    return EvictDeviceNextNodeResult(node_id=node_id, made_progress=True)
            self._is_by_engine = True
            self._core.evict_device_start(component_type, self._quota)
        return self._core.evict_device_next_node(component_type, tracker)

    def evict_device_end(self, component_type: Any) -> None:
        if self._is_by_engine:
            self._core.evict_device_end(component_type)
