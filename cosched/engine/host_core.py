"""SGLang's radix tree with host memory below it (HiCache), with cosched's choice of copies.

SGLang copies either everything that it inserts (``write_through``) or everything that it evicts
(``write_back``), and gives up the least recently used copies. With ``write_back``, cosched

* copies only what gains by it (`KvValue.gain_of_copying`). The rest is dropped by the step that
  SGLang takes when host memory is full;
* copies what is evicted next before its place is needed (`write_ahead`), while iterations run:
  SGLang waits for each copy. An eviction that was not foreseen still waits;
* gives up the copies of the lowest value first.

With the other write policies SGLang copies as it does, and only the two orders of eviction are
cosched's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DriveHostEvictionResult,
    EvictDeviceLeafResult,
)

from cosched.engine.kv_readers import walk
from cosched.engine.tree_core import FULL, KvTreeCore, OrderedLeaves, TreeNode
from cosched.memory.eviction import Leaves
from cosched.memory.node import KvNode

_MAX_AHEAD = 64  # nodes that are looked at for what is evicted next


class HostedTreeCore(KvTreeCore):
    """See the docstring of the module.

    transferred  tokens copied since the start; ``waited``: those that an eviction waited for
    """

    def __init__(self, params: Any, components: Mapping[ComponentType, Any]) -> None:
        self._copies: Leaves | None = None
        self._host_free: Callable[[], int] = int
        self._cache: Any = None
        self._least = float("inf")
        """Copies of at least this value are not given up now."""
        self.transferred = {"to_host": 0, "to_device": 0, "waited": 0}
        super().__init__(params, components)

    def use_host(self, copies: Leaves, host_free: Callable[[], int]) -> None:
        """Before `watch`. copies: the copies that can be given up, in their order; host_free: free
        tokens of host memory"""
        self._copies, self._host_free = copies, host_free
        self.evictable_host_leaves = OrderedLeaves(copies)

    def _ordered_leaves(self) -> OrderedLeaves:
        assert self._leaves is not None
        return OrderedLeaves(self._leaves, self._copies)

    # --- What changes the tree ---

    def reset(self) -> None:
        super().reset()
        if self._copies is not None:
            self._copies.clear()
            self.evictable_host_leaves = OrderedLeaves(self._copies)

    def changed(self, node: KvNode) -> None:
        super().changed(node)
        if self._copies is not None:
            self._copies.changed(node)

    def _update_duplicate_tracking(self, node: TreeNode) -> None:
        """With ``write_back`` what is on the device too can be given up."""
        super()._update_duplicate_tracking(node)
        if self._copies is not None and self.is_write_back and node.id in self.full_host_duplicates:
            self._copies.add(node)

    def _unregister_node(self, node: TreeNode) -> None:
        if self._copies is not None:
            self._copies.discard(node)
        super()._unregister_node(node)

    def _unevict_node_on_insert(self, node: TreeNode, *args: Any, **kwargs: Any) -> None:
        super()._unevict_node_on_insert(node, *args, **kwargs)
        self._came_to_device([node])

    def commit_backup(self, node_id: int, host_indices: Any, comp_xfers: Any) -> None:
        super().commit_backup(node_id, host_indices, comp_xfers)
        self.transferred["to_host"] += len(host_indices)
        self.changed(self.nodes[node_id])

    def commit_load_back(
        self, node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: Any
    ) -> Any:
        result = super().commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)
        self.transferred["to_device"] += len(device_indices)
        self._came_to_device([self.nodes[loaded] for loaded in kv_xfer.nodes_to_load or ()])
        return result

    # --- Eviction from the device ---

    def num_on_host(self, key: Any, node_id: int, start: int) -> int:
        """Tokens of a key that are found in host memory alone, behind the first `start` ones, which
        end with a node on the device. Changes nothing. O(depth + tokens compared)."""
        node = self.nodes[node_id]
        if node.end != start:
            return 0
        num_found = 0
        for below, num_shared in walk(node, key, self.page_size, position=start):
            if below.on_device or not below.on_host:
                break
            num_found += num_shared
        return num_found

    def wants_copy(self, node: KvNode, *, is_ahead: bool = False) -> bool:
        """Whether a leaf is worth a copy, and worth more than the copy that would have to be given
        up for it. is_ahead: no eviction waits for the copy."""
        leaves, copies = self._leaves, self._copies
        if leaves is None or copies is None:
            return True  # as SGLang
        value, now_s = leaves.value, leaves.now_s
        if value.gain_of_copying(node, now_s, is_ahead=is_ahead) <= 0:
            return False
        if self._host_free() >= node.num_tokens:
            return True
        first = copies.first()
        if first is None:
            return False
        assert first.host_rank is not None
        return first.host_rank[0] < value.of_copy(node, now_s)

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        node = self.nodes[node_id]
        has_copy = node.on_host
        if is_write_back and not has_copy:
            if not self.wants_copy(node):
                return self._drop(node_id)
            self._least = self._value_of_copy(node)
        result = super().evict_device_leaf(node_id, is_write_back)
        if has_copy:
            self.evicted["demoted"] += result.tracker[FULL]
        return result

    def _drop(self, node_id: int) -> Any:
        """Evict a node without a copy, as SGLang does when host memory is full."""
        dropped = self.drop_subtree_no_host(node_id)
        if not dropped.is_dropped:  # a copy below it is being read
            return super().evict_device_leaf(node_id, True)
        result = EvictDeviceLeafResult(
            tracker=dropped.tracker,
            device_frees=dropped.device_frees,
            host_frees=dropped.host_frees,
            cache_actions=dropped.cache_actions,
        )
        dropped.device_frees, dropped.host_frees, dropped.cache_actions = {}, {}, []
        return result

    def demote(self, node_id: int) -> Any:
        result = super().demote(node_id)
        num_tokens = result.tracker[FULL]
        self.transferred["waited"] += num_tokens
        self.evicted["all"] += num_tokens
        self.evicted["demoted"] += num_tokens
        return result

    def drop_subtree_no_host(self, node_id: int) -> Any:
        result = super().drop_subtree_no_host(node_id)
        self.evicted["all"] += result.tracker[FULL]
        return result

    def _value_of_copy(self, node: KvNode) -> float:
        assert self._leaves is not None
        return self._leaves.value.of_copy(node, self._leaves.now_s)

    # --- Eviction from host memory ---

    def drive_host_eviction(self, component_type: ComponentType, num_tokens: int) -> Any:
        if component_type != FULL or self._copies is None:
            return super().drive_host_eviction(component_type, num_tokens)
        result = DriveHostEvictionResult()
        freed = result.tracker, result.device_frees, result.host_frees
        while result.tracker[FULL] < num_tokens:
            node: Any = self._first_copy(self._copies)
            if node is None:
                break
            if node.on_device:
                self._release_full_host_duplicate(node, *freed, cache_actions=result.cache_actions)
                self.full_host_duplicates.pop(node.id, None)
                self._copies.discard(node)
                self.changed(node)
            else:
                self.evicted["host"] += node.num_tokens
                self._evict_host_leaf(node, *freed, cache_actions=result.cache_actions)
        return result

    def _first_copy(self, copies: Leaves) -> KvNode | None:
        """The copy to give up next."""
        stale: list[KvNode] = []
        found = None
        for node in copies.sorted_nodes():
            assert node.host_rank is not None
            if node.host_rank[0] >= self._least:
                break
            if node in self.evictable_host_leaves or self._can_reclaim_full_host_duplicate(node):
                found = node
                break
            if not node.on_device:
                stale.append(node)  # it comes back as a leaf, or when it was loaded
        for node in stale:
            copies.discard(node)
        return found

    # --- The cache ---

    def watch(self, cache: Any, *args: Any, **options: Any) -> None:
        """Also: an eviction does not wait for copies whose nodes stay locked until they are done,
        unless it frees too little without them."""
        self._cache = cache
        check = cache.writing_check

        def writing_check(write_back: bool = False, finish_count: int | None = None) -> None:
            pending = cache.ongoing_write_through.values()
            if write_back and all([p.lock_params is not None for p in pending]):
                return
            check(write_back=write_back, finish_count=finish_count)

        cache.writing_check = writing_check
        super().watch(cache, *args, **options)
        evict_for_alloc = cache.evict_for_alloc

        def evict_and_wait(params: Any, **kwargs: Any) -> Any:
            result = evict_for_alloc(params, **kwargs)
            missing = params.num_tokens - result.num_tokens_evicted
            if missing > 0 and cache.ongoing_write_through and not kwargs:
                check(write_back=True)
                more = evict_for_alloc(EvictParams(num_tokens=missing))
                result.num_tokens_evicted += more.num_tokens_evicted
            return result

        cache.evict_for_alloc = evict_and_wait

    def evict_device_end(self, component_type: ComponentType) -> None:
        self._least = float("inf")
        super().evict_device_end(component_type)

    def write_ahead(self, num_tokens: int) -> None:
        """Begin to copy what is worth it of the next tokens to be evicted. O(nodes)."""
        if not self.is_write_back or num_tokens <= 0:
            return
        assert self._leaves is not None
        found: list[tuple[Any, int]] = []
        for node in itertools.islice(self._leaves.in_order(), _MAX_AHEAD):
            if not node.on_host and self.wants_copy(node, is_ahead=True):
                found.append((node, num_tokens))
            num_tokens -= node.num_tokens
            if num_tokens <= 0:
                break
        for node, wanted in found:
            if node.rank is not None:
                self._keep_head(node, wanted)
            self._write(node, self._value_of_copy(node))
        self._cache.flush_pending_backups()

    def write(self, node_id: int) -> None:
        """Begin to copy the nodes from this one up to the first that is locked or has a copy: they
        will be used again. O(depth)."""
        if not self.is_write_back or node_id not in self.nodes:
            return
        path = self.nodes[node_id].upwards()
        free = itertools.takewhile(lambda n: n.on_device and not (n.on_host or n.num_holds), path)
        assert self._leaves is not None
        for node in list(free):
            self._write(node, self._leaves.value.costs.relative(node.start))
        self._cache.flush_pending_backups()

    def _write(self, node: KvNode, least: float) -> None:
        """least: only copies of a lower value are given up for it."""
        self._least = least
        self._cache._execute_and_commit_kv_backup(BackupKV([node.node_id]))
        self._least = float("inf")

    @property
    def num_writing(self) -> int:
        """Tokens that are being copied to host memory and cannot be evicted until that ends."""
        pending = self._cache.ongoing_write_through.values()
        nodes = (self.nodes.get(node_id) for p in pending for node_id in p.publish_node_ids)
        return sum(node.num_tokens for node in nodes if node is not None)
