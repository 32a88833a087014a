"""Order of eviction: which of the evictable leaves goes first.

The *order* says which leaf goes first; each published order is one. The *value* says what that
costs (`cosched.memory.value`), in seconds of the device. The order ``value`` evicts the least value
per token first. Copies in host memory have an order of their own.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from sortedcontainers import SortedList

from cosched.memory.node import KvNode, Rank
from cosched.memory.value import KvValue

_REFRESHED = 4
"""Leaves whose rank is computed again with each plan, whether or not they have changed."""


class EvictionOrder(Protocol):
    def __call__(self, node: KvNode, now_s: float) -> float:
        """Nodes of smaller numbers go first; of equal ones the least recently used."""
        ...

    def next_change_s(self, node: KvNode, now_s: float) -> float: ...


class ValueOrder:
    """The least value per token goes first."""

    def __init__(self, value: KvValue) -> None:
        self._value = value
        self.next_change_s = value.next_change_s

    def __call__(self, node: KvNode, now_s: float) -> float:
        return self._value(node, now_s)


class CopyOrder:
    """Copies in host memory: of what is expected to be lost with them, the least goes first. What
    stays on the device has no need of one."""

    def __init__(self, value: KvValue) -> None:
        self._value = value
        self.next_change_s = value.next_change_s

    def __call__(self, node: KvNode, now_s: float) -> float:
        if node.on_device and node.rank is None:
            return 0.0
        return self._value.of_copy(node, now_s)


class LeastRecentlyUsed:
    """The same on every rank."""

    def __call__(self, node: KvNode, now_s: float) -> float:
        return 0.0

    def next_change_s(self, node: KvNode, now_s: float) -> float:
        return math.inf


class Eviction(NamedTuple):
    """A node to evict. keeps_head: a request may need it, so only its tail goes where that is
    enough."""

    node_id: int
    keeps_head: bool


class Leaves:
    """What can be evicted of a tree, in the order of eviction. Every change is O(log n).

    Its nodes on the device (`KvNode.rank`), or their copies in host memory (`KvNode.host_rank`).
    """

    def __init__(
        self, order: EvictionOrder, value: KvValue, *, slot: Literal["rank", "host_rank"] = "rank"
    ) -> None:
        self.now_s = 0.0
        self._slot = slot
        self._order = order
        self.value = value
        self._nodes: OrderedDict[int, KvNode] = OrderedDict()
        self._sorted: SortedList[Rank] = SortedList()
        self._timers: list[tuple[float, int]] = []
        self._wakes_s: dict[int, float] = {}
        """Of each leaf, its one timer that counts."""

    def __len__(self) -> int:
        return len(self._sorted)

    def clear(self) -> None:
        """The tree is empty."""
        for node in [*self._nodes.values()]:
            self.discard(node)

    def add(self, node: KvNode) -> None:
        """It can be evicted now."""
        if getattr(node, self._slot) is not None:
            self.changed(node)
            return
        rank = self._rank(node)
        setattr(node, self._slot, rank)
        self._nodes[node.node_id] = node
        self._sorted.add(rank)
        self._set_timer(node)

    def discard(self, node: KvNode) -> None:
        """It cannot be evicted now, or it is gone."""
        rank = getattr(node, self._slot)
        if rank is None:
            return
        self._sorted.remove(rank)
        del self._nodes[node.node_id]
        self._wakes_s.pop(node.node_id, None)
        setattr(node, self._slot, None)

    def changed(self, node: KvNode) -> None:
        """Something about a node has changed that its place may depend on."""
        before = getattr(node, self._slot)
        if before is None:
            return
        rank = self._rank(node)
        if rank != before:
            self._sorted.remove(before)
            self._sorted.add(rank)
            setattr(node, self._slot, rank)
            self._set_timer(node)

    def advance(self, now_s: float) -> None:
        """Say what time it is."""
        self.now_s = now_s
        timers = self._timers
        while timers and timers[0][0] <= now_s:
            at_s, node_id = heapq.heappop(timers)
            if self._wakes_s.get(node_id) == at_s:
                node = self._nodes[node_id]
                self.changed(node)
                self._set_timer(node)
        # Costs and chances are learned all the time: each leaf is looked at in rotation.
        for _ in range(min(_REFRESHED, len(self._nodes))):
            node_id, node = self._nodes.popitem(last=False)
            self._nodes[node_id] = node
            self.changed(node)

    def first(self) -> KvNode | None:
        """The one to evict next. O(1)."""
        return self._sorted[0][3] if self._sorted else None

    def sorted_nodes(self) -> Iterator[KvNode]:
        """As they are, in the order of eviction. Valid until a change."""
        for rank in self._sorted:
            yield rank[3]

    def next_to_go(self, num_tokens: int) -> list[Eviction]:
        """The nodes to evict for `num_tokens`."""
        evictions: list[Eviction] = []
        for node in self.in_order() if num_tokens > 0 else ():
            evictions.append(Eviction(node.node_id, self._order(node, self.now_s) > 0))
            num_tokens -= node.num_tokens
            if num_tokens <= 0:
                break
        return evictions

    def in_order(self) -> Iterator[KvNode]:
        """Leaves and what becomes a leaf when they go, in the order of eviction. Valid until a
        change."""
        left: dict[int, int] = {}
        freed: list[Rank] = []
        for rank in self._sorted:
            while freed and freed[0] < rank:
                yield self._gone(heapq.heappop(freed), left, freed)
            yield self._gone(rank, left, freed)
        while freed:
            yield self._gone(heapq.heappop(freed), left, freed)

    def _gone(self, rank: Rank, left: dict[int, int], freed: list[Rank]) -> KvNode:
        """The node of a rank, which is evicted: the one above it may become a leaf. left: children
        that each node has left; freed: those that have none."""
        *_, node, parent = rank
        if parent is not None and not parent.num_holds:
            if parent.node_id not in left:
                left[parent.node_id] = parent.num_below
            left[parent.node_id] -= 1
            num_left = left[parent.node_id]
            if not num_left:
                heapq.heappush(freed, self._rank(parent))
        return node

    def _rank(self, node: KvNode) -> Rank:
        parent = node.parent
        assert parent is not None
        return (
            self._order(node, self.now_s),
            node.last_use,
            node.node_id,
            node,
            None if parent.parent is None else parent,
        )

    def _set_timer(self, node: KvNode) -> None:
        at_s = self._order.next_change_s(node, self.now_s)
        if at_s < math.inf and self._wakes_s.get(node.node_id) != at_s:
            self._wakes_s[node.node_id] = at_s
            heapq.heappush(self._timers, (at_s, node.node_id))
