"""KV memory and request rows: of the engine, of one request, and in the radix tree."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.swa import is_swa_req_ring
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from cosched.engine.port import states
from cosched.engine.port.request import token_ids
from cosched.memory.node import PathNode
from cosched.memory.window_memory import WindowMemory, WindowPool

# --- The engine's ---


def kv_total(scheduler: Any) -> int:
    """KV tokens of the device."""
    return int(scheduler.max_total_num_tokens)


def kv_free(scheduler: Any) -> int:
    """Free KV tokens of the device."""
    allocator = scheduler.token_to_kv_pool_allocator
    if window_tokens(scheduler) is None:
        return int(allocator.available_size())
    return int(allocator.full_available_size())


def kv_evictable(scheduler: Any) -> int:
    """KV tokens that only the radix tree holds."""
    return int(scheduler.tree_cache.evictable_size())


def kv_shared(scheduler: Any) -> int:
    """KV tokens of the radix tree that requests use. Shared ones count once."""
    return int(scheduler.tree_cache.protected_size())


def window_tokens(scheduler: Any) -> int | None:
    """Tokens before its own that a token of a layer with sliding windows attends to, if the KV of
    these layers has a pool of its own."""
    tree = scheduler.tree_cache
    return int(tree.sliding_window_size) if _has_window_pool(tree) else None


def window_slack(scheduler: Any) -> int:
    """Tokens behind its window that a decoding request may hold: SGLang frees them in batches of
    whole pages."""
    tree = scheduler.tree_cache
    for_drafts: int = tree.swa_retain_window - tree.sliding_window_size
    interval: int = envs.SGLANG_SWA_EVICTION_INTERVAL.get()
    page: int = scheduler.page_size
    return for_drafts + interval + 2 * page


def window_pool(scheduler: Any, *, reserved: int) -> WindowPool:
    """That pool."""
    allocator, window = scheduler.token_to_kv_pool_allocator, window_tokens(scheduler)
    assert window is not None
    return WindowPool(
        window=window,
        slack=window_slack(scheduler),
        free=int(allocator.swa_available_size()),
        evictable=int(scheduler.tree_cache.swa_evictable_size()),
        reserved=reserved,
    )


def has_one_pool(scheduler: Any) -> bool:
    """Whether the KV of all layers is in one pool."""
    return not _has_window_pool(scheduler.tree_cache)


def _has_window_pool(tree: Any) -> bool:
    """A pool of which a request takes a fixed part with its row (a ring) needs no account."""
    allocator = tree.token_to_kv_pool_allocator
    return bool(tree.supports_swa()) and not is_swa_req_ring(allocator)


def host_total(scheduler: Any) -> int:
    """KV tokens of host memory; 0 without host memory."""
    if not scheduler.enable_hierarchical_cache:
        return 0
    return int(scheduler.tree_cache.cache_controller.mem_pool_host.size)


def host_free(scheduler: Any) -> int:
    """Free KV tokens of host memory."""
    if not scheduler.enable_hierarchical_cache:
        return 0
    return int(scheduler.tree_cache.cache_controller.mem_pool_host.available_size())


def savings(scheduler: Any) -> tuple[int, int]:
    """KV tokens that pages with two owners save now, and ends of requests that were copied to
    another page since the start; of an allocator that has such pages."""
    counts = getattr(scheduler.token_to_kv_pool_allocator, "savings", None)
    return (0, 0) if counts is None else counts()


def free_slots(scheduler: Any, running_batch: Any) -> int:
    """Requests that may join those of `running_batch`."""
    slots = scheduler.get_num_allocatable_reqs(len(running_batch.reqs), running_batch=running_batch)
    return int(slots)


def num_slots_taken(scheduler: Any) -> int:
    """Requests that have a slot, running or paused."""
    rows = scheduler.req_to_token_pool
    return int(rows.size - rows.available_size())


def reserve_ratio(scheduler: Any) -> float:
    """Share of the remaining output that SGLang keeps free for running requests, learned from past
    iterations. See `reserves_whole_output`."""
    return float(scheduler.new_token_ratio_tracker.current)


def reserves_whole_output(req: Any) -> bool:
    """Whether SGLang keeps memory free for all of its remaining output: it cannot end early."""
    return bool(req.sampling_params.ignore_eos)


def row_generations(scheduler: Any) -> Any:
    """A number per request row that changes when another request gets the row: an array of int64.
    The engine writes to it."""
    return scheduler.req_to_token_pool.req_generation.numpy()


# --- A request's ---


def num_committed(req: Any) -> int:
    """Computed tokens."""
    return req.kv.kv_committed_len  # type: ignore[no-any-return]


def num_allocated(req: Any) -> int:
    """KV tokens that it holds. More than it has computed with speculative decoding."""
    return req.kv.kv_allocated_len  # type: ignore[no-any-return]


def num_own(req: Any) -> int:
    """KV tokens that it holds outside the radix tree."""
    return int(req.kv.kv_allocated_len) - int(req.kv.cache_protected_len)


def num_prefix(req: Any) -> int:
    """Tokens before its next chunk."""
    return int(req.prefix_len)


def holds_memory(req: Any) -> bool:
    """Whether it holds a row, KV or a lock on the radix tree."""
    return req.lock is not None or bool(req.kv.holds_kv or req.kv.holds_mamba)


class Tokens(NamedTuple):
    """KV tokens of all layers but those with sliding windows, and of the pool of these; 0 without
    one."""

    kv: int
    in_window: int

    @property
    def others(self) -> dict[str, int]:
        """As `Match.others`."""
        return {WindowMemory.name: self.in_window} if self.in_window else {}


def gain_of_stopping(tree: Any, req: Any) -> Tokens:
    """What preempting a running request would make free or evictable. Measured by releasing its
    lock on the tree for a moment."""
    before = _evictable(tree)
    tree.unlock(req.lock)
    after = _evictable(tree)
    req.lock = tree.lock(req.last_node, req.lock.receipt.skipped_lock_components)
    own_in_window = 0
    if _has_window_pool(tree):
        first = max(req.kv.get_evicted_seqlen(ComponentType.SWA), req.kv.cache_protected_len)
        own_in_window = num_allocated(req) - first
    return Tokens(
        num_own(req) + after.kv - before.kv,
        own_in_window + after.in_window - before.in_window,
    )


def num_own_in_window(req: Any) -> int:
    """Tokens of its output that it holds in the pool of windows, outside the radix tree."""
    kv = req.kv
    allocated: int = kv.kv_allocated_len
    freed: int = kv.get_evicted_seqlen(ComponentType.SWA)
    protected: int = kv.cache_protected_len
    return max(allocated - max(freed, protected, len(req.origin_input_ids)), 0)


def _evictable(tree: Any) -> Tokens:
    in_window = tree.swa_evictable_size() if _has_window_pool(tree) else 0
    return Tokens(int(tree.evictable_size()), int(in_window))


def release(tree: Any, req: Any, *, keep: bool) -> None:
    """Release the memory of a running request. keep: its KV is put into the tree as evictable
    nodes, and all but the last token is found there when it resumes; with state slots, what is
    before its last checkpoint (`states.num_kept`)."""
    if keep and states.has_states(tree):
        with states.as_finished(req):
            release_kv_cache(req, tree, checkpoint=True)
    else:
        release_kv_cache(req, tree, checkpoint=keep)


def release_whatever(tree: Any, req: Any) -> None:
    """Release everything that a request holds, at whatever point its iteration was interrupted."""
    kv = req.kv
    if kv.holds_kv:
        # If an allocation failed, the request may have a row without tokens.
        kv.kv_committed_len = max(kv.kv_committed_len, kv.cache_protected_len)
        kv.kv_allocated_len = max(kv.kv_allocated_len, kv.kv_committed_len)
        release_kv_cache(req, tree, checkpoint=False)
    elif req.lock is not None:
        tree.unlock(req.lock)
        req.lock = None
    if states.has_states(tree):
        states.drop_unused(tree, req)


# --- The radix tree ---


class Peek(NamedTuple):
    """What the radix tree holds of a request on the device.

    num_tokens  of its prefix
    node        the last node of the prefix
    num_pinned  tokens that a lock on this node would hold: it may be longer than the match
    """

    num_tokens: int
    node: Any
    num_pinned: int


class Found(NamedTuple):
    """The same, with host memory. num_device, num_host: tokens of its prefix on the device, and
    behind them on the host; num_host_window: of the pool of windows, tokens to load; node: the last
    node on the device."""

    num_device: int
    num_host: int
    num_host_window: int
    node: Any


def lookup_key(req: Any) -> Any:
    """What admission will look up (`Req.init_next_round_input`): all tokens except those that must
    be computed."""
    ids = token_ids(req)
    if req.positional_embed_overrides is not None:
        ids = ids[:0]
    limit = req._compute_max_prefix_len(len(ids))
    return RadixKey(token_ids=ids, extra_key=req.extra_key, limit=limit, cache_salt=req.cache_salt)


def tree_key(req: Any, *, in_pairs: bool) -> Any:
    """What of a request may be in the tree: all tokens. in_pairs: its keys are pairs of tokens."""
    ids = token_ids(req)
    return RadixKey(ids, req.extra_key, is_bigram=in_pairs, cache_salt=req.cache_salt)


def peek(tree: Any, req: Any) -> Peek:
    """Look up a request without marking anything as used."""
    core, key = tree.tree_core, lookup_key(req)
    found = Peek(*core.match_full_device_prefix(key))
    if states.has_states(tree):
        node = states.checkpoint_at(core, path_of(core, found.node), found.num_tokens)
        if node is None:
            return Peek(0, tree.root_node_handle(), 0)
        return Peek(node.end, node.node_id, node.end)
    if found.num_tokens and _has_window_pool(tree):
        return _with_whole_window(tree, key, found)
    return found


def _with_whole_window(tree: Any, key: Any, found: Peek) -> Peek:
    """The longest part of a match whose last window is in the tree, as SGLang's search finds
    it: up to the end of a node."""
    core, window = tree.tree_core, tree.swa_retain_window
    gaps = core.swa_tombstone_ranges(key, 0, found.num_tokens)
    if not gaps:
        return found
    for node in reversed(path_of(core, found.node)):
        end = min(node.end, found.num_tokens)
        begins = [stop for start, stop in gaps if start < end]
        if not begins or end - begins[-1] >= window:
            return Peek(end, node.node_id, node.end)
    return Peek(0, tree.root_node_handle(), 0)


def find(tree: Any, req: Any) -> Found:
    """SGLang's full search, which counts as a use and may split a node."""
    found = tree.match_prefix(MatchPrefixParams(key=lookup_key(req)))
    return Found(
        found.device_prefix_len,
        int(found.host_hit_length),
        int(found.swa_host_hit_length),
        found.last_device_node,
    )


def touch(tree: Any, req: Any) -> None:
    """Count as a use of what `peek` finds of a waiting request: SGLang evicts it later."""
    tree.touch_prefix(lookup_key(req))


def num_in_session(tree: Any, req: Any) -> int | None:
    """Tokens that a streaming session keeps for its next request (`find_active_slot`); None: its
    cached tokens are in the tree."""
    if req.session is None or not req.session.streaming or req.to_finish is not None:
        return None
    slot = tree.session.slots.get(req.session.session_id)
    return int(slot.kv.kv_committed_len) if slot is not None and slot.kv.holds_kv else None


def evictable_at(tree: Any, node: Any) -> Tokens:
    """What a lock on a node takes: tokens from it up to the root that no request holds, and those
    of the last window. Measured by a lock for a moment."""
    before = _evictable(tree)
    lock = tree.inc_lock_ref(node)
    held = _evictable(tree)
    tree.dec_lock_ref(node, lock.to_dec_params())
    return Tokens(before.kv - held.kv, before.in_window - held.in_window)


def taken_at(tree: Any, found: Found) -> Tokens:
    """What admitting a request takes out of what is free or evictable."""
    held = evictable_at(tree, found.node)
    return Tokens(held.kv, held.in_window + found.num_host_window)


def others_at(tree: Any, found: Peek) -> dict[str, int]:
    """`Match.others` of a request. Where the match ends inside of a node, admission splits it."""
    if not (found.num_tokens and _has_window_pool(tree)):
        return {}
    if found.num_pinned == found.num_tokens:
        return evictable_at(tree, found.node).others
    *before, last = path_of(tree.tree_core, found.node)
    part = found.num_tokens - last.start
    held = evictable_at(tree, before[-1].node_id).in_window if before else 0
    return Tokens(0, part + held).others


def last_node(req: Any) -> Any:
    """The node up to which a running request holds the tree."""
    return req.last_node


def path_of(core: Any, node_id: int) -> list[PathNode]:
    """The nodes from below the root to this one."""
    # Without the adapter of the Rust core, which makes a struct of each node.
    if isinstance(core, RustUnifiedTreeCore):
        path = core._binding.collect_path_info([node_id])[0]
        return [PathNode(node[0], node[2], node[3]) for node in path]
    (path,) = core.collect_path_info([node_id])
    return [PathNode(node.node_id, node.path_start, node.path_end) for node in path]
