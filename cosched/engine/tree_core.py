"""SGLang's radix tree, watched: a `KvTree` is told what happens, and asked who is evicted next.

SGLang drives eviction step by step (`UnifiedRadixCache._evict_components`): start, next node, evict
this leaf, end. Its tree core answers "next node" by its own order, which knows no classes and no
future. `WatchedTreeCore` stands before the core, passes everything on, and answers that one
question itself. The default core is Rust and panics for good when it is told to evict anything but
an evictable leaf, so `KvTree` follows every lock and every split, and its sum of evictable tokens
is compared with the core's before each eviction: should they ever differ, the engine's own order
takes over until the server is started again.

Only trees of full attention: state-space layers and sliding windows evict by other rules. With host
memory: `cosched.engine.host_core`.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from cosched.core.request import RequestClass
from cosched.core.wire import class_of_priority
from cosched.engine import port
from cosched.memory.eviction import Leaves
from cosched.memory.occupancy import LIKELY
from cosched.memory.tree import KvNode, KvTree
from cosched.pool.radix import pack

logger = logging.getLogger(__name__)

_LEAST_TAIL = 256
"""Tokens that are worth cutting a node for, and left of it."""


def can_watch(scheduler: Any) -> bool:
    """Whether cosched can say what this scheduler's tree evicts."""
    tree = scheduler.tree_cache
    return (
        type(tree) is UnifiedRadixCache
        and not tree.disable
        and tuple(tree.tree_components) == (ComponentType.FULL,)
        and not tree.tree_core.is_eagle
        and (not scheduler.enable_hierarchical_cache or _can_watch_host(tree))
        # What is copied when depends on clocks, which differ between ranks.
        and (not scheduler.enable_hierarchical_cache or port.parallel().tp_size == 1)
    )


def _can_watch_host(tree: Any) -> bool:
    """Whether it keeps contexts there, and has nothing below it."""
    return tree.host_memory_mode == "cache" and not tree.enable_storage


class WatchedTreeCore:
    """Stands in for ``UnifiedRadixCache.tree_core``. See the module's docstring."""

    _OWN: ClassVar[frozenset[str]] = frozenset(
        {"_core", "_insert", "_leaves", "_quota", "_tree", "_wanted", "evicted", "is_off"}
    )
    """Attributes that are not the core's."""

    def __init__(self, core: Any, tree: KvTree, leaves: Leaves) -> None:
        self._core = core
        self._tree = tree
        self._leaves = leaves
        self._insert: Any = None
        self._quota = 0
        self._wanted: int | None = None
        self.is_off = False
        """The engine's own order holds: something was not as it should be."""
        self.evicted: Counter[str] = Counter()
        """Tokens evicted since the start: all of them, and by what they were (`KvOccupancy`)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._core, name, value)

    # --- What changes the tree ---

    def reset(self) -> None:
        self._core.reset()
        self._tree.reset()

    def match_prefix(self, params: Any) -> Any:
        result = self._core.match_prefix(params)
        self._follow(
            params.key,
            self._end_of(result),
            None if params.req is None else _is_online(params.req.priority),
        )
        return result

    def _end_of(self, match: Any) -> int:
        """The last node of a match."""
        node_id: int = match.last_device_node
        return node_id

    def begin_insert(self, params: Any) -> Any:
        self._insert = params
        return self._inserted(self._core.begin_insert(params))

    def resume_insert(self) -> Any:
        return self._inserted(self._core.resume_insert())

    def _inserted(self, step: Any) -> Any:
        if step.result is not None:
            params, self._insert = self._insert, None
            # Where nothing is new it only cuts a node at the end of the prompt, with a priority
            # that is not the request's.
            is_use = params.prev_prefix_len < len(params.key)
            self._follow(
                params.key,
                step.result.last_device_node,
                _is_online(params.priority) if is_use else None,
                is_inserted=True,
            )
        return step

    def _follow(
        self, key: Any, node_id: int, is_online: bool | None, *, is_inserted: bool = False
    ) -> None:
        if self.is_off:
            return
        try:
            path = port.path_of(self._core, node_id)
            self._tree.settle(
                _namespace(key), path, _packer(key), is_online=is_online, is_inserted=is_inserted
            )
        except Exception as error:
            self._switch_off(f"a node is not where it should be: {error!r}")

    def inc_lock_ref(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        result = self._core.inc_lock_ref(node_id, *args, **kwargs)
        self._tree.hold(node_id)
        return result

    def dec_lock_ref(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        result = self._core.dec_lock_ref(node_id, *args, **kwargs)
        self._release(node_id)
        return result

    def inc_full_pin(self, node_id: int) -> None:
        self._core.inc_full_pin(node_id)
        self._tree.hold(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        self._core.dec_full_pin(node_id)
        self._release(node_id)

    def _release(self, node_id: int) -> None:
        if self.is_off:
            return
        try:
            self._tree.release(node_id)
        except Exception as error:
            self._switch_off(f"a lock was released that was not there: {error!r}")

    # --- Eviction ---

    def watch(self, cache: Any) -> None:
        """Take the place of a cache's tree core.

        What an allocation misses is noted on the way: the walk over the tree is told to go on until
        the allocation fits, and not how little that may be.
        """
        cache.tree_core = self
        original = cache.evict_for_alloc

        def evict_for_alloc(params: Any, **kwargs: Any) -> Any:
            self._wanted = params.num_tokens
            try:
                return original(params, **kwargs)
            finally:
                self._wanted = None

        cache.evict_for_alloc = evict_for_alloc

    def _agrees(self) -> bool:
        """Whether the engine's tree is what it is taken for; where it is not, the order is switched
        off."""
        if not self.is_off and self._tree.num_evictable != self._core.full_evictable_size():
            self._switch_off(
                f"{self._tree.num_evictable} tokens are evictable by its own count, "
                f"{self._core.full_evictable_size()} by the engine's"
            )
        return not self.is_off

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        self._quota = request_cnt
        if not self._agrees():
            self._core.evict_device_start(component_type, request_cnt)

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        if self.is_off:
            return self._core.evict_device_next_node(component_type, tracker)
        node = self._leaves.first() if tracker[component_type] < self._quota else None
        if node is None:
            return EvictDeviceNextNodeResult()
        assert node.rank is not None
        if node.rank[0] > 0:
            self._keep_head(node, self._missing(tracker[component_type]))
        return EvictDeviceNextNodeResult(node_id=node.node_id, made_progress=True)

    def _missing(self, num_evicted: int) -> int:
        """Tokens that the allocation still needs."""
        return (self._quota if self._wanted is None else self._wanted) - num_evicted

    def _keep_head(self, node: KvNode, wanted: int) -> None:
        """Cut a leaf that somebody may come for, so that only its tail goes (BROS §5.2 in the
        tree's terms). The tail keeps the node's id."""
        num_left = node.num_tokens - max(wanted, _LEAST_TAIL)
        num_left -= num_left % self._core.page_size
        if num_left >= _LEAST_TAIL:
            # A lookup of the head splits the node where the head ends.
            namespace, packed = node.head(num_left)
            self.match_prefix(MatchPrefixParams(key=_key(namespace, packed)))

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        result = self._core.evict_device_leaf(node_id, is_write_back)
        num_tokens = result.tracker[ComponentType.FULL]
        self.evicted["all"] += num_tokens
        if not self.is_off:
            try:
                self._count(self._tree.nodes[node_id], num_tokens)
                self._tree.evicted(node_id)
            except Exception as error:
                self._switch_off(f"what was evicted was no leaf: {error!r}")
        return result

    def _count(self, node: KvNode, num_tokens: int) -> None:
        evicted = self.evicted
        evicted["online" if node.is_online else "offline"] += num_tokens
        if node.references:
            evicted["referenced"] += num_tokens
        if self._leaves.worth.chance_of_return(node, self._leaves.now_s) >= LIKELY:
            evicted["returning"] += num_tokens

    def evict_device_end(self, component_type: Any) -> None:
        if self.is_off:
            self._core.evict_device_end(component_type)

    def _switch_off(self, why: str) -> None:
        logger.error(
            "cosched: %s; SGLang's own eviction order is used until the server is restarted", why
        )
        self.is_off = True


def _is_online(priority: int | None) -> bool:
    return class_of_priority(priority) is RequestClass.ONLINE


def _key(namespace: Hashable, packed: bytes) -> Any:
    assert isinstance(namespace, tuple)
    extra_key, cache_salt = namespace
    ids = array("q", np.frombuffer(packed, dtype=np.int32).astype(np.int64).tobytes())
    return RadixKey(ids, extra_key, cache_salt=cache_salt)


def _namespace(key: Any) -> Hashable:
    return key.extra_key, key.cache_salt


def _packer(key: Any) -> Callable[[int, int], bytes]:
    ids = key.raw_token_ids()

    def packed(start: int, end: int) -> bytes:
        return pack(ids[start:end])

    return packed
