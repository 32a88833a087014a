"""SGLang's radix tree with host memory below it (HiCache), with cosched's choice of copies.

SGLang copies either everything that it inserts (``write_through``) or everything that it evicts
(``write_back``), and gives up the least recently used copies. With ``write_back``, cosched

* copies only what gains by it (`KvValue.gain_of_copying`). The rest is dropped by the step that
  SGLang takes when host memory is full;
* copies what is evicted next before its place is needed (`write_ahead`), while iterations run:
  SGLang waits for each copy. An eviction that was not foreseen still waits;
* gives up the copies of the lowest value first;
* loads the KV of a waiting request before it is admitted (`restore`), while iterations run: SGLang
  loads it in the iteration that admits the request, and all decodes of that iteration wait.

The tree core takes no choice of the copy to give up, but it keeps copies that are locked in host
memory. So every copy is locked, and the one to give up is unlocked. With the other write policies
SGLang copies as it does, and only the two orders of eviction are cosched's.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DriveHostEvictionResult,
    EvictDeviceLeafResult,
)

from cosched.engine import port
from cosched.engine.tree_core import RankedTreeCore, WatchedTreeCore
from cosched.memory.eviction import Leaves
from cosched.memory.node import KvNode
from cosched.memory.tree import KvTree

logger = logging.getLogger(__name__)

_MAX_REFUSED = 16  # copies in a row that SGLang keeps because they are in use, before it ends
_MAX_AHEAD = 64  # nodes that are looked at for what is evicted next


class HostedTreeCore(WatchedTreeCore):
    """See the docstring of the module.

    copies       the copies that can be given up, in their order
    host_free    free tokens of host memory
    transferred  tokens copied since the start; ``waited``: those that an eviction waited for
    """

    def __init__(
        self, core: Any, tree: KvTree, leaves: Leaves, copies: Leaves, host_free: Callable[[], int]
    ) -> None:
        super().__init__(core, tree, leaves)
        self._copies = copies
        self._host_free = host_free
        self._cache: Any = None
        self._locks: dict[int, Any] = {}
        """Node -> the receipt of the lock on its copy."""
        self._least = float("inf")
        """Copies of at least this value are not given up now."""
        self._loads: dict[int, tuple[int, int]] = {}
        """Last node of a path that is loaded ahead -> SGLang's number of the load, and the position
        at which it begins."""
        self._awaits_load = False
        """The batch that is being built reads KV that is still being loaded."""
        self.transferred = {"to_host": 0, "to_device": 0, "waited": 0}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "enable_storage" and value and not self.is_off:
            self._switch_off("a storage below host memory was attached")

    # --- What changes the tree ---

    def reset(self) -> None:
        self._locks.clear()  # the core has forgotten them
        self._loads.clear()
        super().reset()

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        if self._loads and params.req is not None and self._is_loading(result.last_device_node):
            self._awaits_load = True
        return result

    def _end_of(self, match: Any) -> int:
        return int(match.best_match_node)

    def _inserted(self, step: Any) -> Any:
        if step.result is None and not self.is_off:
            # SGLang locks what it is about to copy, and may have added or split nodes above it.
            for action in step.actions:
                if isinstance(action, BackupKV):
                    self._follow(self._insert.key, action.node_ids[-1], None)
        return super()._inserted(step)

    def _follow(self, *args: Any, **kwargs: Any) -> None:
        super()._follow(*args, **kwargs)
        for upper, lower in self._tree.cut:
            if lower in self._locks:
                # The one lock holds both parts now, and can only be released for both.
                both = self._locks.pop(lower)
                self._lock(lower)
                self._core.dec_host_lock_ref(lower, both)
                self._lock(upper)
        self._tree.cut.clear()

    def commit_backup(self, node_id: int, host_indices: Any, *args: Any) -> Any:
        result = self._core.commit_backup(node_id, host_indices, *args)
        self.transferred["to_host"] += len(host_indices)
        if not self.is_off:
            with self._mirroring("a copied node is not in the tree"):
                self._tree.backed_up(node_id)
                self._lock(node_id)
        return result

    def commit_load_back(self, node_id: int, device_indices: Any, kv_xfer: Any, *args: Any) -> Any:
        result = self._core.commit_load_back(node_id, device_indices, kv_xfer, *args)
        self.transferred["to_device"] += len(device_indices)
        if not self.is_off:
            with self._mirroring("a loaded node is not in the tree"):
                self._tree.loaded(kv_xfer.nodes_to_load or ())
        return result

    def _lock(self, node_id: int) -> None:
        assert node_id not in self._locks, f"{node_id=}"
        self._locks[node_id] = self._core.inc_host_lock_ref(node_id).to_dec_params()

    def _unlock(self, node_id: int) -> None:
        self._core.dec_host_lock_ref(node_id, self._locks.pop(node_id))

    # --- Loading ahead ---

    def make_room(self, num_tokens: int) -> bool:
        """Whether that many tokens can be evicted without waiting for their copies. If not, the
        copies are begun."""
        if self._core.is_write_back and not self.num_writing and self._uncopied(num_tokens):
            self.write_ahead(num_tokens)
        return not self.num_writing

    def restore(self, req: Any) -> int | None:
        """Begin to load what a waiting request has in host memory. Returns its last node, for
        `is_restoring`; None: it cannot be loaded now."""
        cache = self._cache
        if cache.cache_controller.load_queue or not cache.has_free_load_back_slot():
            return None
        found = cache.match_prefix(MatchPrefixParams(key=port.lookup_key(req)))
        node_id: int = found.best_match_node
        if not found.host_hit_length or not cache.load_back(node_id):
            return None
        self._loads[node_id] = (cache.cache_controller.start_loading(), found.device_prefix_len)
        return node_id

    def is_restoring(self, node_id: int) -> bool:
        """Whether a load that ends with this node is under way."""
        return node_id in self._cache.ongoing_load_back

    def _is_loading(self, node_id: int) -> bool:
        """Whether a part of the path to a node is still being loaded ahead."""
        nodes = self._tree.nodes
        for anchor in [anchor for anchor in self._loads if not self.is_restoring(anchor)]:
            del self._loads[anchor]
        loading = {
            node.node_id
            for anchor, (_, start) in self._loads.items()
            for node in nodes[anchor].upwards()
            if node.start >= start
        }
        last = nodes.get(node_id)
        return last is not None and any(node.node_id in loading for node in last.upwards())

    # --- Eviction from the device ---

    def wants_copy(self, node: KvNode, *, is_ahead: bool = False) -> bool:
        """Whether a leaf is worth a copy, and worth more than the copy that would have to be given
        up for it. is_ahead: no eviction waits for the copy."""
        value, now_s = self._leaves.value, self._leaves.now_s
        if value.gain_of_copying(node, now_s, is_ahead=is_ahead) <= 0:
            return False
        if self._host_free() >= node.num_tokens:
            return True
        first = self._copies.first()
        if first is None:
            return False
        assert first.host_rank is not None
        return first.host_rank[0] < value.of_copy(node, now_s)

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        if self.is_off:
            return super().evict_device_leaf(node_id, is_write_back)
        node = self._tree.nodes[node_id]
        if node.on_host:
            result = self._core.evict_device_leaf(node_id, is_write_back)
            self._demoted(node_id, result)
            return result
        if not is_write_back:
            return super().evict_device_leaf(node_id, is_write_back)
        if self.wants_copy(node):
            self._least = self._leaves.value.of_copy(node, self._leaves.now_s)
            return self._core.evict_device_leaf(node_id, is_write_back)
        return self._drop(node_id, is_write_back)

    def _drop(self, node_id: int, is_write_back: bool) -> Any:
        """Evict a node without a copy, as SGLang does when host memory is full."""
        dropped = self.drop_subtree_no_host(node_id)
        if not dropped.is_dropped:  # a copy below it is being read
            return self._core.evict_device_leaf(node_id, is_write_back)
        result = EvictDeviceLeafResult()
        _move(dropped, result)
        return result

    def demote(self, node_id: int) -> Any:
        result = self._core.demote(node_id)
        if not self.is_off:
            self.transferred["waited"] += result.tracker[ComponentType.FULL]
            self._demoted(node_id, result)
        return result

    def _demoted(self, node_id: int, result: Any) -> None:
        num_tokens = result.tracker[ComponentType.FULL]
        self.evicted["all"] += num_tokens
        self.evicted["demoted"] += num_tokens
        with self._mirroring("an evicted node was not a leaf"):
            self._tree.demoted(node_id)

    def drop_subtree_no_host(self, node_id: int) -> Any:
        if self.is_off:
            return self._core.drop_subtree_no_host(node_id)
        node = self._tree.nodes[node_id]
        below = self._tree.below(node)
        for child in below:
            self._unlock(child.node_id)
        result = self._core.drop_subtree_no_host(node_id)
        if not result.is_dropped:
            for child in below:
                self._lock(child.node_id)
            return result
        num_tokens = result.tracker[ComponentType.FULL]
        self.evicted["all"] += num_tokens
        with self._mirroring("a dropped node was not a leaf"):
            self._count(node, num_tokens)
            for child in below:
                self._count(child, child.num_tokens)
            self._tree.evicted(node_id)
        return result

    # --- Eviction from host memory ---

    def drive_host_eviction(self, component_type: Any, num_tokens: int) -> Any:
        if self.is_off:
            return self._core.drive_host_eviction(component_type, num_tokens)
        total = DriveHostEvictionResult()
        kept: list[KvNode] = []
        while total.tracker[component_type] < num_tokens and len(kept) < _MAX_REFUSED:
            node = self._first_copy(kept)
            if node is None:
                break
            node_id, size = node.node_id, node.num_tokens
            self._unlock(node_id)
            result = self._core.drive_host_eviction(component_type, 1)
            freed = result.tracker[component_type]
            _move(result, total)
            if freed not in (0, size):
                self._switch_off(f"{freed} tokens left host memory where {size} were unlocked")
                break
            if not freed:
                self._lock(node_id)
                kept.append(node)
            else:
                if not node.on_device:
                    self._count(node, size)
                    self.evicted["host"] += size
                self._tree.copy_dropped(node_id)
        return total

    def _first_copy(self, kept: list[KvNode]) -> KvNode | None:
        """The copy to give up next. Except with ``write_back``, SGLang keeps the copies of nodes
        that are on the device."""
        for node in self._copies.sorted_nodes():
            assert node.host_rank is not None
            if node.host_rank[0] >= self._least:
                return None
            if node not in kept and (self._core.is_write_back or not node.on_device):
                return node
        return None

    # --- The cache ---

    def watch(self, cache: Any) -> None:
        """Also: an eviction does not wait for copies whose nodes stay locked until they are done,
        unless it frees too little without them."""
        self._cache = cache
        check = cache.writing_check

        def writing_check(write_back: bool = False, finish_count: int | None = None) -> None:
            pending = cache.ongoing_write_through.values()
            if write_back and not self.is_off and all([p.lock_params is not None for p in pending]):
                return
            check(write_back=write_back, finish_count=finish_count)

        cache.writing_check = writing_check
        ready = cache.ready_to_load_host_cache

        def ready_to_load_host_cache() -> int:
            """The load that the batch waits for, layer by layer. Loads run one after the other, so
            the latest stands for all."""
            number: int = ready()
            awaits, self._awaits_load = self._awaits_load, False
            if number < 0 and awaits and self._loads:
                number = list(self._loads.values())[-1][0]
            return number

        cache.ready_to_load_host_cache = ready_to_load_host_cache
        super().watch(cache)
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

    def evict_device_end(self, component_type: Any) -> None:
        self._least = float("inf")
        super().evict_device_end(component_type)

    def write_ahead(self, num_tokens: int) -> None:
        """Begin to copy what is worth it of the next tokens to be evicted. O(nodes)."""
        if self.is_off or not self._core.is_write_back or num_tokens <= 0:
            return
        for node, wanted in self._uncopied(num_tokens):
            if node.rank is not None:
                self._keep_head(node, wanted)
            self._write(node, self._leaves.value.of_copy(node, self._leaves.now_s))
        self._cache.flush_pending_backups()

    def _uncopied(self, num_tokens: int) -> list[tuple[KvNode, int]]:
        """Of the next tokens to be evicted, the nodes that are worth a copy and have none, each
        with the number of tokens that it and the nodes behind it make up."""
        found = []
        for node in itertools.islice(self._leaves.in_order(), _MAX_AHEAD):
            if not node.on_host and self.wants_copy(node, is_ahead=True):
                found.append((node, num_tokens))
            num_tokens -= node.num_tokens
            if num_tokens <= 0:
                break
        return found

    def write(self, node_id: int) -> None:
        """Begin to copy the nodes from this one up to the first that is locked or has a copy: they
        will be used again. O(depth)."""
        if self.is_off or not self._core.is_write_back or node_id not in self._tree.nodes:
            return
        path = self._tree.nodes[node_id].upwards()
        free = itertools.takewhile(lambda n: n.on_device and not (n.on_host or n.num_holds), path)
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
        nodes = (self._tree.nodes.get(node_id) for p in pending for node_id in p.publish_node_ids)
        return sum(node.num_tokens for node in nodes if node is not None)

    def _switch_off(self, why: str) -> None:
        super()._switch_off(why)
        for node_id in list(self._locks):
            try:
                self._unlock(node_id)
            except Exception:
                logger.exception("cosched: a copy in host memory stays locked")


class RankedHostedTreeCore(RankedTreeCore, HostedTreeCore):
    """One of several tensor-parallel ranks. SGLang copies (``write_through``), and all ranks finish
    a copy at the same step. Rank 0 says what is evicted from the device; copies are given up least
    recently used first (`LeastRecentlyUsed`), which needs no clock."""


def _move(result: Any, total: Any) -> None:
    """Move what a step of eviction has freed to the result of another."""
    for name in ("device_frees", "host_frees"):
        freed = getattr(result, name)
        for component, tensors in freed.items():
            getattr(total, name)[component].extend(tensors)
        freed.clear()
    for component, count in result.tracker.items():
        total.tracker[component] += count
    total.cache_actions.extend(result.cache_actions)
    result.cache_actions.clear()
