"""SGLang's radix tree with cosched's eviction order.

SGLang evicts in steps (`UnifiedRadixCache._evict_components`): start, next node, evict this leaf,
end. `KvTreeCore` is SGLang's tree core in Python and answers "next node" itself. What cosched knows
beside hangs on SGLang's nodes (`TreeNode`), and what can be evicted is SGLang's own set of leaves:
there is one tree. SGLang makes the core by name (`BACKEND`) where `evicting` says so; without
`KvTreeCore.watch` its order is SGLang's.

Where the tree also has checkpoints of states or the KV of sliding windows, SGLang evicts these by
its LRU order, and a leaf with its own. KV is evicted in cosched's order: first what no checkpoint,
or no window, makes reusable any more. Host memory: `cosched.engine.host_core`.

Costs: *depth* is the number of nodes from the root to a node; a node is one prefill chunk.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from cosched.core.request import RequestClass
from cosched.engine.kv_readers import KvReaders
from cosched.memory.eviction import Eviction, Leaves
from cosched.memory.node import KvNode, Visit
from cosched.memory.occupancy import LIKELY
from cosched.wire import class_of_priority

FULL = ComponentType.FULL

_LEAST_TAIL = 256
"""Fewest tokens that a node is split for, and fewest that are left of it."""

_BESIDE = (ComponentType.MAMBA, ComponentType.SWA)
"""Kinds of memory of which a tree may manage one beside the KV: checkpoints of states, and the KV
of sliding windows."""


def can_watch(scheduler: Any) -> bool:
    """Whether cosched knows the radix tree of this scheduler. `cosched.engine.support` has already
    ruled out the arguments with which it does not follow it."""
    tree = scheduler.tree_cache
    return (
        type(tree) is UnifiedRadixCache
        and isinstance(tree.tree_core, KvTreeCore)
        and not tree.disable
        and tree.tree_components[0] == FULL
        and tuple(tree.tree_components[1:]) in ((), *((kind,) for kind in _BESIDE))
    )


class TreeNode(KvNode, UnifiedTreeNode):  # type: ignore[misc]  # SGLang has no types
    """A node of SGLang's tree."""

    is_linked = False

    @property
    def node_id(self) -> int:
        return int(self.id)

    @property
    def on_device(self) -> bool:
        return self.component_data[FULL].value is not None

    @property
    def on_host(self) -> bool:
        return self.component_data[FULL].host_value is not None

    @property
    def num_holds(self) -> int:
        return int(self.component_data[FULL].lock_ref)

    @property
    def num_below(self) -> int:
        return sum([child.on_device for child in self.children.values()])


class OrderedLeaves(set[TreeNode]):
    """SGLang's set of the nodes that can be evicted, which tells an order of what changes."""

    def __init__(self, order: Leaves, copies: Leaves | None = None) -> None:
        """copies: the order of copies in host memory, which depends on this set too"""
        super().__init__()
        self._order = order
        self._copies = copies

    def add(self, node: TreeNode) -> None:
        if node not in self:
            super().add(node)
            self._order.add(node)
            if self._copies is not None:
                self._copies.changed(node)

    def discard(self, node: TreeNode) -> None:  # type: ignore[override]  # never another object
        if node in self:
            super().discard(node)
            self._order.discard(node)
            if self._copies is not None:
                self._copies.changed(node)


class KvTreeCore(UnifiedTreeCore):  # type: ignore[misc]  # SGLang has no types
    """See the docstring of the module.

    num_held_online  tokens of nodes that are locked, and that an online request has used
    num_shifts       times that `gains_of_release` of a lock that stays may have changed
    evicted          tokens evicted since the start: ``all``, and by the uses of `KvOccupancy`
    """

    def __init__(self, params: Any, components: Mapping[ComponentType, Any]) -> None:
        self._leaves: Leaves | None = None
        self._readers: KvReaders | None = None
        self._ids = itertools.count()
        self._cut: TreeNode | None = None
        """The node that is being split."""
        self._useless: list[TreeNode] = []
        """Nodes that may be leaves without a checkpoint, or without a window."""
        self._given: deque[Eviction] | None = None
        self._is_given = False
        self._is_by_sglang = True
        """The eviction of KV under way is in SGLang's order."""
        self._quota = 0
        self._wanted: int | None = None
        self.num_uses = self.num_shifts = self.num_held_online = 0
        self.evicted: Counter[str] = Counter()
        super().__init__(params, components)

    def watch(self, cache: Any, leaves: Leaves, readers: KvReaders, *, is_given: bool) -> None:
        """Evict in this order from now on. The size of each allocation is noted, because the steps
        of an eviction do not say how few tokens are enough.

        is_given: this is one of several tensor-parallel ranks, which must evict the same nodes. The
            order depends on clocks, learned values and waiting requests, which only rank 0 knows,
            so rank 0 sends a list of nodes with each plan (`cosched.engine.ranks`), and every rank
            evicts the first node of it that is a leaf. Trees that get the same operations number
            their nodes alike. Without a list, or after its end, SGLang's own order is used, which
            is the same on all ranks.
        """
        assert len(self.nodes) == 1, "no request has come yet"
        self._leaves, self._readers, self._is_given = leaves, readers, is_given
        self.evictable_device_leaves = self._ordered_leaves()
        original = cache.evict_for_alloc

        def evict_for_alloc(params: Any, **kwargs: Any) -> Any:
            self._wanted = params.num_tokens
            try:
                return original(params, **kwargs)
            finally:
                self._wanted = None

        cache.evict_for_alloc = evict_for_alloc

    def _ordered_leaves(self) -> OrderedLeaves:
        assert self._leaves is not None
        return OrderedLeaves(self._leaves)

    # --- The tree ---

    @property
    def nodes(self) -> Mapping[int, TreeNode]:
        """All, by number, with the root."""
        nodes: dict[int, TreeNode] = self._node_arena
        return nodes

    @property
    def _beside(self) -> ComponentType | None:
        """The kind of memory that its nodes have beside the KV (`_BESIDE`); None: none."""
        return next(iter(self.component_types[1:]), None)

    @property
    def num_evictable(self) -> int:
        """Tokens on the device that are not locked."""
        return int(self.component_evictable_size_[FULL])

    @property
    def num_held_offline(self) -> int:
        """Tokens of nodes that are locked, and that no online request has used."""
        return int(self.component_protected_size_[FULL]) - self.num_held_online

    def reset(self) -> None:
        super().reset()
        self.root_node.is_linked = True
        self.num_held_online = 0
        self.num_shifts += 1
        self._useless.clear()
        if self._leaves is not None and self._readers is not None:
            self._leaves.clear()
            self._readers.reset()
            self.evictable_device_leaves = self._ordered_leaves()

    def _new_node(self, priority: int = 0) -> TreeNode:
        node = TreeNode(self.component_types, priority=priority)
        node.id = next(self._ids)  # SGLang's numbers are those of all trees of the process
        self._register_node(node)
        return node

    def _update_evictable_leaf_sets(self, node: TreeNode) -> None:
        if not node.is_linked:
            self._link(node)
        super()._update_evictable_leaf_sets(node)

    def _link(self, node: TreeNode) -> None:
        """It is new in the tree."""
        node.is_linked = True
        node.num_tokens = len(node.key)
        if self._cut is not None:
            node.cut_off(self._cut)
            return
        assert node.parent is not None
        node.start = node.parent.end
        if self._readers is not None:
            self._readers.added(node)

    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> Any:
        self._cut = child
        try:
            result = super()._split_node(key, child, split_len)
        finally:
            self._cut = None
        self.changed(child)
        return result

    def _unregister_node(self, node: TreeNode) -> None:
        super()._unregister_node(node)
        if self._leaves is not None and self._readers is not None:
            self._readers.removed(node)
            self._count(node, self._leaves)

    def _count(self, node: TreeNode, leaves: Leaves) -> None:
        """It is evicted."""
        evicted, num_tokens = self.evicted, node.num_tokens
        evicted["online" if node.is_online else "offline"] += num_tokens
        if node.references:
            evicted["referenced"] += num_tokens
        if leaves.value.chance_of_reuse(node, leaves.now_s) >= LIKELY:
            evicted["returning"] += num_tokens

    def has_first_page(self, key: Any) -> bool:
        """Something begins with the first page of a key. O(1)."""
        page_size = self.page_size
        return len(key) >= page_size and key.child_key(page_size) in self.root_node.children

    def changed(self, node: KvNode) -> None:
        """Something is known about it that its place may depend on."""
        if self._leaves is not None:
            self._leaves.changed(node)

    # --- Uses ---

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        if params.req is not None:
            self._use(result.best_match_node, params.req.priority)
        return result

    def begin_insert(self, params: Any) -> Any:
        return self._inserted(params, super().begin_insert(params))

    def resume_insert(self) -> Any:
        params = self._ongoing_insert_walk_state.params
        return self._inserted(params, super().resume_insert())

    def _inserted(self, params: Any, step: Any) -> Any:
        # Without new tokens SGLang only splits a node at the end of the prompt, with a priority
        # that is not the request's.
        if step.result is not None and params.prev_prefix_len < len(params.key):
            self._use(step.result.last_device_node, params.priority)
        return step

    def _use(self, node_id: int, priority: int | None) -> None:
        is_online = class_of_priority(priority) is RequestClass.ONLINE
        self.num_uses += 1
        for node in self.nodes[node_id].upwards():
            node.last_use = self.num_uses
            if is_online and not node.is_online:
                node.is_online = True
                if node.num_holds and node.on_device:
                    self.num_held_online += node.num_tokens
            self.changed(node)

    def left(self, node_id: int, visit: Visit) -> None:
        """An online request that ended at this node has gone. O(depth)."""
        if node_id in self.nodes:
            for node in self.nodes[node_id].upwards():
                node.visit = visit
                self.changed(node)

    # --- Locks ---

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        result = super().inc_lock_ref(node_id, skip_lock_components)
        if FULL not in skip_lock_components:
            self._lock_changed(node_id, 1)
        return result

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        result = super().dec_lock_ref(node_id, params, skip_swa)
        if FULL not in params.skipped_lock_components:
            self._lock_changed(node_id, -1)
        return result

    def inc_full_pin(self, node_id: int) -> None:
        super().inc_full_pin(node_id)
        self._lock_changed(node_id, 1)

    def dec_full_pin(self, node_id: int) -> None:
        super().dec_full_pin(node_id)
        self._lock_changed(node_id, -1)

    def _lock_changed(self, node_id: int, by: int) -> None:
        """O(nodes above it with few locks): what is above a node has as many locks or more."""
        first, second = (1, 2) if by > 0 else (0, 1)
        for node in self.nodes[node_id].upwards():
            num_holds = node.num_holds
            if num_holds == first:
                if node.is_online and node.on_device:
                    self.num_held_online += by * node.num_tokens
            elif num_holds == second:
                self.num_shifts += 1
            else:
                return

    def _came_to_device(self, nodes: Iterable[KvNode]) -> None:
        self.num_held_online += sum(
            [node.num_tokens for node in nodes if node.is_online and node.num_holds]
        )

    def evictable_from(self, node_id: int) -> int:
        """Tokens from a node on the device up to the root that are not locked. O(depth)."""
        num_tokens = 0
        for node in self.nodes[node_id].upwards() if node_id in self.nodes else ():
            if node.num_holds:
                break
            num_tokens += node.num_tokens
        return num_tokens

    def gains_of_release(self, node_ids: Iterable[int]) -> list[int]:
        """Of each node, tokens that would not be locked without one lock of it. O(depth)."""
        gains = []
        for node_id in node_ids:
            num_tokens = 0
            for node in self.nodes[node_id].upwards() if node_id in self.nodes else ():
                if node.num_holds != 1:
                    break
                num_tokens += node.num_tokens
            gains.append(num_tokens)
        return gains

    # --- Eviction ---

    def give(self, evictions: Sequence[Eviction] | None) -> None:
        """What is evicted until the next plan, in this order; None: SGLang's order."""
        assert self._is_given
        self._given = None if evictions is None else deque(evictions)

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        if component_type == FULL:
            self._quota = request_cnt
            has_order = self._given is not None if self._is_given else self._leaves is not None
            self._is_by_sglang = not has_order
        if component_type != FULL or self._is_by_sglang:
            super().evict_device_start(component_type, request_cnt)

    def evict_device_next_node(self, component_type: ComponentType, tracker: Any) -> Any:
        if component_type != FULL or self._is_by_sglang:
            return super().evict_device_next_node(component_type, tracker)
        num_evicted = tracker[FULL]
        if num_evicted >= self._quota:
            return EvictDeviceNextNodeResult()
        node, keeps_head = self._useless_leaf(), False
        if node is None:
            node, keeps_head = self._next_given() if self._is_given else self._next_leaf()
        if node is None:
            self._is_by_sglang = True
            super().evict_device_start(FULL, self._quota)
            return super().evict_device_next_node(FULL, tracker)
        if keeps_head and self._beside is None:
            wanted = self._quota if self._wanted is None else self._wanted
            self._keep_head(node, wanted - num_evicted)
        return EvictDeviceNextNodeResult(node_id=node.id, made_progress=True)

    def _useless_leaf(self) -> Any:
        """One without what makes it reusable: no request will find it."""
        while self._useless:
            node = self._useless.pop()
            is_leaf = node in self.evictable_device_leaves
            if is_leaf and node.component_data[self._beside].value is None:
                return node
        return None

    def _next_leaf(self) -> tuple[Any, bool]:
        assert self._leaves is not None
        node = self._leaves.first()
        return node, node is not None and node.rank is not None and node.rank[0] > 0

    def _next_given(self) -> tuple[Any, bool]:
        while self._given:
            node_id, keeps_head = self._given.popleft()
            node = self.nodes.get(node_id)
            if node is not None and node in self.evictable_device_leaves:
                return node, keeps_head
        return None, False

    def _keep_head(self, node: TreeNode, wanted: int) -> None:
        """Split a leaf that may be reused, so that only its tail is evicted (BROS §5.2 on a radix
        tree). The tail keeps the node's id."""
        num_left = node.num_tokens - max(wanted, _LEAST_TAIL)
        num_left -= num_left % self.page_size
        if num_left >= _LEAST_TAIL:
            _, action = self._split_node(node.key, node, num_left)
            assert action is None, "what is being copied is locked"

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        parent: Any = self.nodes[node_id].parent
        result = super().evict_device_leaf(node_id, is_write_back)
        self.evicted["all"] += result.tracker[FULL]
        if self._beside is not None and result.tracker[FULL]:
            self._useless.append(parent)
        return result

    def evict_device_end(self, component_type: ComponentType) -> None:
        if component_type != FULL or self._is_by_sglang:
            super().evict_device_end(component_type)
