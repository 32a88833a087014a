"""SGLang's radix tree with cosched's eviction order.

SGLang evicts in steps (`UnifiedRadixCache._evict_components`): start, next node, evict this leaf,
end. Its tree core chooses the next node by an order that knows neither classes nor waiting
requests. A `WatchedTreeCore` wraps the core, passes every call on, mirrors the tree in a `KvTree`,
and answers "next node" from that mirror. The default core is written in Rust and panics for good if
it is asked to evict anything but an evictable leaf. Therefore the mirror follows every lock and
split, and its number of evictable tokens is compared with the core's before each eviction. If they
differ, or if a step of the mirror fails, SGLang's own order is used until the server is restarted.

With EAGLE the keys of the engine's tree are pairs of neighbouring tokens. The mirror stores the
second token of each pair, and the first token of all as part of the namespace (`place_of`).

Where the tree also has checkpoints of states or the KV of sliding windows, SGLang evicts these by
its LRU order, and a leaf with its own. KV is evicted in cosched's order: first what no checkpoint,
or no window, makes reusable any more. Host memory: `cosched.engine.host_core`.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

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
from cosched.memory.eviction import Eviction, Leaves
from cosched.memory.node import KvNode
from cosched.memory.occupancy import LIKELY
from cosched.memory.tree import KvTree
from cosched.pool.radix import pack

logger = logging.getLogger(__name__)

_LEAST_TAIL = 256
"""Fewest tokens that a node is split for, and fewest that are left of it."""

_BESIDE = (ComponentType.MAMBA, ComponentType.SWA)
"""Kinds of memory of which a tree may manage one beside the KV: checkpoints of states, and the KV
of sliding windows."""

_OWN = frozenset({"beside", "evicted", "in_pairs", "is_off", "transferred"})
"""Public attributes of the wrapper. Private ones are its own too; SGLang sets public ones of the
core."""


def can_watch(scheduler: Any) -> bool:
    """Whether cosched knows the radix tree of this scheduler. `cosched.engine.support` has already
    ruled out the arguments with which it does not follow it."""
    tree = scheduler.tree_cache
    return (
        type(tree) is UnifiedRadixCache
        and not tree.disable
        and tree.tree_components[0] == ComponentType.FULL
        and tuple(tree.tree_components[1:]) in ((), *((kind,) for kind in _BESIDE))
    )


class WatchedTreeCore:
    """Takes the place of ``UnifiedRadixCache.tree_core``. See the docstring of the module.

    beside   the kind of memory that its nodes have beside the KV (`_BESIDE`); None: none
    in_pairs the engine's keys are pairs of tokens
    is_off   SGLang's own order is used, because the mirror was wrong
    evicted  tokens evicted since the start: ``all``, and by the uses of `KvOccupancy`
    """

    def __init__(self, core: Any, tree: KvTree, leaves: Leaves) -> None:
        self._core = core
        self._tree = tree
        self._leaves = leaves
        self._insert: Any = None
        self._quota = 0
        self._wanted: int | None = None
        self.beside: ComponentType | None = None
        self._useless: list[int] = []
        """Nodes that may be leaves without a checkpoint, or without a window."""
        self.in_pairs = bool(core.is_eagle)
        self.is_off = False
        self.evicted: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._core, name, value)

    @contextmanager
    def _mirroring(self, problem: str) -> Iterator[None]:
        """A step of the mirror. If it fails, SGLang's eviction order is used from now on."""
        try:
            yield
        except Exception as error:
            self._switch_off(f"{problem}: {error!r}")

    def _switch_off(self, why: str) -> None:
        logger.error(
            "cosched: %s; SGLang's own eviction order is used until the server is restarted", why
        )
        self.is_off = True

    # --- What changes the tree ---

    def reset(self) -> None:
        self._core.reset()
        self._tree.reset()

    def match_prefix(self, params: Any) -> Any:
        result = self._core.match_prefix(params)
        is_online = None if params.req is None else _is_online(params.req.priority)
        if self.beside is not None:  # it may have split a node behind what can be reused
            self._follow(params.key, self._core.match_full_device_prefix(params.key)[1], None)
        self._follow(params.key, self._end_of(result), is_online)
        return result

    def _end_of(self, match: Any) -> int:
        """The last node of a match."""
        return int(match.last_device_node)

    def begin_insert(self, params: Any) -> Any:
        self._insert = params
        return self._inserted(self._core.begin_insert(params))

    def resume_insert(self) -> Any:
        return self._inserted(self._core.resume_insert())

    def _inserted(self, step: Any) -> Any:
        if step.result is not None:
            params, self._insert = self._insert, None
            # Without new tokens SGLang only splits a node at the end of the prompt, with a
            # priority that is not the request's.
            is_use = params.prev_prefix_len < len(params.key)
            is_online = _is_online(params.priority) if is_use else None
            self._follow(params.key, step.result.last_device_node, is_online, is_inserted=True)
        return step

    def _follow(
        self, key: Any, node_id: int, is_online: bool | None, *, is_inserted: bool = False
    ) -> None:
        if self.is_off:
            return
        with self._mirroring("a node is not where it should be"):
            path = port.path_of(self._core, node_id)
            namespace, packed = place_of(
                (key.extra_key, key.cache_salt), key.raw_token_ids(), in_pairs=self.in_pairs
            )
            self._tree.settle(namespace, path, packed, is_online=is_online, is_inserted=is_inserted)

    def inc_lock_ref(self, node_id: int, skipped: Sequence[Any] = ()) -> Any:
        result = self._core.inc_lock_ref(node_id, skipped)
        if ComponentType.FULL not in skipped:
            self._tree.hold(node_id)
        return result

    def dec_lock_ref(self, node_id: int, params: Any, *args: Any) -> Any:
        result = self._core.dec_lock_ref(node_id, params, *args)
        if ComponentType.FULL not in params.skipped_lock_components:
            self._release(node_id)
        return result

    def inc_full_pin(self, node_id: int) -> None:
        self._core.inc_full_pin(node_id)
        self._tree.hold(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        self._core.dec_full_pin(node_id)
        self._release(node_id)

    def _release(self, node_id: int) -> None:
        if not self.is_off:
            with self._mirroring("a lock was released that was not taken"):
                self._tree.release(node_id)

    # --- Eviction ---

    def watch(self, cache: Any) -> None:
        """Take the place of a cache's tree core. The size of each allocation is noted, because the
        steps of an eviction do not say how few tokens are enough."""
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
        """Whether the mirror is right. If it is not, it is switched off."""
        if not self.is_off and self._tree.num_evictable != self._core.full_evictable_size():
            self._switch_off(
                f"{self._tree.num_evictable} tokens are evictable by its own count, "
                f"{self._core.full_evictable_size()} by the engine's"
            )
        return not self.is_off

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        if component_type != ComponentType.FULL:
            self._core.evict_device_start(component_type, request_cnt)
        else:
            self._start(request_cnt)

    def _start(self, request_cnt: int) -> None:
        self._quota = request_cnt
        if not self._agrees():
            self._core.evict_device_start(ComponentType.FULL, request_cnt)

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        if component_type == ComponentType.FULL and not self._is_by_engine():
            return self._next_node(tracker, tracker[component_type])
        return self._core.evict_device_next_node(component_type, tracker)

    def _next_node(self, tracker: Any, num_evicted: int) -> Any:
        node = self._useless_leaf() or self._leaves.first() if num_evicted < self._quota else None
        if node is None:
            return EvictDeviceNextNodeResult()
        assert node.rank is not None
        return self._evict(node, num_evicted, keeps_head=node.rank[0] > 0)

    def _useless_leaf(self) -> KvNode | None:
        """One without what makes it reusable: no request will find it."""
        while self._useless:
            node = self._tree.nodes.get(self._useless.pop())
            if node is not None and node.is_leaf and not self._is_reusable(node):
                return node
        return None

    def _is_reusable(self, node: KvNode) -> bool:
        return self._core.get_component_device_value(node.node_id, self.beside) is not None

    def _evict(self, node: KvNode, num_evicted: int, *, keeps_head: bool) -> Any:
        if keeps_head and self.beside is None:
            wanted = self._quota if self._wanted is None else self._wanted
            self._keep_head(node, wanted - num_evicted)
        return EvictDeviceNextNodeResult(node_id=node.node_id, made_progress=True)

    def _keep_head(self, node: KvNode, wanted: int) -> None:
        """Split a leaf that may be reused, so that only its tail is evicted (BROS §5.2 on a radix
        tree). The tail keeps the node's id."""
        num_left = node.num_tokens - max(wanted, _LEAST_TAIL)
        num_left -= num_left % self._core.page_size
        if num_left >= _LEAST_TAIL:
            # Looking up the head splits the node where the head ends.
            self.match_prefix(MatchPrefixParams(key=_key(*node.head(num_left))))

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        result = self._core.evict_device_leaf(node_id, is_write_back)
        num_tokens = result.tracker[ComponentType.FULL]
        self.evicted["all"] += num_tokens
        if not self.is_off:
            with self._mirroring("an evicted node was not a leaf"):
                node = self._tree.nodes[node_id]
                self._count(node, num_tokens)
                self._tree.evicted(node_id)
                if self.beside is not None and node.parent is not None:
                    self._useless.append(node.parent.node_id)
        return result

    def _count(self, node: KvNode, num_tokens: int) -> None:
        evicted = self.evicted
        evicted["online" if node.is_online else "offline"] += num_tokens
        if node.references:
            evicted["referenced"] += num_tokens
        if self._leaves.value.chance_of_reuse(node, self._leaves.now_s) >= LIKELY:
            evicted["returning"] += num_tokens

    def evict_device_end(self, component_type: Any) -> None:
        if component_type != ComponentType.FULL or self._is_by_engine():
            self._core.evict_device_end(component_type)

    def _is_by_engine(self) -> bool:
        """Whether the eviction of KV under way is in SGLang's order."""
        return self.is_off


class RankedTreeCore(WatchedTreeCore):
    """One of several tensor-parallel ranks. Each has a tree, and all must evict the same nodes.

    The order depends on clocks, learned values and waiting requests, which only rank 0 knows. Rank
    0 sends a list of nodes with each plan (`cosched.engine.ranks`), and every rank evicts the first
    node of it that is a leaf. Trees that get the same operations number their nodes alike. Without
    a list, or after its end, SGLang's own order is used, which is the same on all ranks.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._given: deque[Eviction] | None = None
        self._by_engine = True

    def give(self, evictions: Sequence[Eviction] | None) -> None:
        """What is evicted until the next plan, in this order; None: SGLang's order."""
        self._given = None if evictions is None else deque(evictions)

    def _start(self, request_cnt: int) -> None:
        if self._given is not None:
            if self.is_off:
                raise RuntimeError("this rank has lost track of its KV after rank 0 sent its list")
            if not self._agrees():
                self._given = None  # on all ranks: they compare equal numbers
        self._quota = request_cnt
        self._by_engine = self._given is None
        if self._by_engine:
            self._core.evict_device_start(ComponentType.FULL, request_cnt)

    def _next_node(self, tracker: Any, num_evicted: int) -> Any:
        if num_evicted >= self._quota:
            return EvictDeviceNextNodeResult()
        while self._given:
            node_id, keeps_head = self._given.popleft()
            node = self._tree.nodes.get(node_id)
            if node is not None and node.is_leaf:
                return self._evict(node, num_evicted, keeps_head=keeps_head)
        self._by_engine = True
        self._core.evict_device_start(ComponentType.FULL, self._quota)
        return self._core.evict_device_next_node(ComponentType.FULL, tracker)

    def _is_by_engine(self) -> bool:
        return self._by_engine


def _is_online(priority: int | None) -> bool:
    return class_of_priority(priority) is RequestClass.ONLINE


Namespace = tuple[Hashable, ...]
"""Extra key, cache salt, and with keys in pairs the first token."""


def place_of(
    prefix_key: Namespace, ids: Sequence[int], *, in_pairs: bool
) -> tuple[Namespace, Callable[[int, int], bytes]]:
    """Where the mirror keeps a request: its namespace, and its packed tokens by start and end.
    in_pairs: the engine's keys are pairs of tokens."""
    if not in_pairs:
        return prefix_key, lambda start, end: pack(ids[start:end])
    return (*prefix_key, *ids[:1]), lambda start, end: pack(ids[start + 1 : end + 1])


def tokens_at(namespace: Namespace, packed: bytes) -> tuple[Namespace, bytes]:
    """The reverse: prefix key and packed tokens from the first one on."""
    (first,) = namespace[2:] or (None,)
    return namespace[:2], packed if first is None else pack((cast(int, first),)) + packed


def _key(namespace: Hashable, packed: bytes) -> Any:
    assert isinstance(namespace, tuple)
    (extra_key, cache_salt), packed = tokens_at(namespace, packed)
    ids = array("q", np.frombuffer(packed, dtype=np.int32).astype(np.int64).tobytes())
    return RadixKey(ids, extra_key, cache_salt=cache_salt)
