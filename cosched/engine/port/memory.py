"""KV memory and request rows: of the engine, of one request, and in the radix tree."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore

from cosched.engine.port.request import token_ids
from cosched.memory.node import PathNode

# --- The engine's ---


def kv_total(scheduler: Any) -> int:
    """KV tokens of the device."""
    return int(scheduler.max_total_num_tokens)


def kv_free(scheduler: Any) -> int:
    """Free KV tokens of the device."""
    return int(scheduler.token_to_kv_pool_allocator.available_size())


def kv_evictable(scheduler: Any) -> int:
    """KV tokens that only the radix tree holds."""
    return int(scheduler.tree_cache.evictable_size())


def kv_shared(scheduler: Any) -> int:
    """KV tokens of the radix tree that requests use, each once."""
    return int(scheduler.tree_cache.protected_size())


def host_total(scheduler: Any) -> int:
    """KV tokens of host memory; 0: there is none."""
    if not scheduler.enable_hierarchical_cache:
        return 0
    return int(scheduler.tree_cache.cache_controller.mem_pool_host.size)


def host_free(scheduler: Any) -> int:
    """Free KV tokens of host memory."""
    if not scheduler.enable_hierarchical_cache:
        return 0
    return int(scheduler.tree_cache.cache_controller.mem_pool_host.available_size())


def free_slots(scheduler: Any, running_batch: Any) -> int:
    """Requests that may join those of `running_batch`."""
    slots = scheduler.get_num_allocatable_reqs(len(running_batch.reqs), running_batch=running_batch)
    return int(slots)


def num_slots_taken(scheduler: Any) -> int:
    """Requests that have a slot, whether they run in this iteration or not."""
    rows = scheduler.req_to_token_pool
    return int(rows.size - rows.available_size())


def reserve_ratio(scheduler: Any) -> float:
    """The share of the output still to come that SGLang keeps free for running requests, learnt
    from past iterations. See `reserves_whole_output`."""
    return float(scheduler.new_token_ratio_tracker.current)


def reserves_whole_output(req: Any) -> bool:
    """Whether all of the output to come is kept free for it, and not a share: it cannot end
    early."""
    return bool(req.sampling_params.ignore_eos)


def row_generations(scheduler: Any) -> Any:
    """Of each request row a number that changes when another request gets it: an array of int64,
    which the engine goes on writing."""
    return scheduler.req_to_token_pool.req_generation.numpy()


# --- A request's ---


def num_committed(req: Any) -> int:
    """Tokens whose KV is computed."""
    return req.kv.kv_committed_len  # type: ignore[no-any-return]


def num_own(req: Any) -> int:
    """KV tokens that it holds beside what the radix tree owns."""
    return int(req.kv.kv_allocated_len) - int(req.kv.cache_protected_len)


def num_prefix(req: Any) -> int:
    """Tokens at its head whose KV its next chunk finds."""
    return int(req.prefix_len)


def holds_memory(req: Any) -> bool:
    """Whether it holds a row, KV or a lock on the radix tree."""
    return req.lock is not None or bool(req.kv.holds_kv)


def gain_of_stopping(tree: Any, req: Any) -> int:
    """KV tokens that stopping a running request would leave free or evictable; measured by
    releasing its lock on the tree for a moment."""
    before: int = tree.evictable_size()
    tree.unlock(req.lock)
    shared: int = tree.evictable_size() - before
    req.lock = tree.lock(req.last_node)
    return num_own(req) + shared


def release(tree: Any, req: Any, *, keep: bool) -> None:
    """Give back the memory of a running request. keep: the tree first takes its prompt and the
    generated tokens; they stay as evictable nodes, and all but the last token is matched there when
    it resumes. Not with a Mamba tree, which takes finished requests only."""
    release_kv_cache(req, tree, checkpoint=keep)


def release_whatever(tree: Any, req: Any) -> None:
    """Give back all that a request holds, wherever its iteration was interrupted."""
    kv = req.kv
    if kv.holds_kv:
        # Where allocation failed midway, a row may be there without the tokens behind it.
        kv.kv_committed_len = max(kv.kv_committed_len, kv.cache_protected_len)
        kv.kv_allocated_len = max(kv.kv_allocated_len, kv.kv_committed_len)
        release_kv_cache(req, tree, checkpoint=False)
    elif req.lock is not None:
        tree.unlock(req.lock)
        req.lock = None


# --- The radix tree ---


class Peek(NamedTuple):
    """What the radix tree holds of a request on the device, looked at without a trace.

    num_tokens  at its head
    node        the last node on the way
    num_pinned  that a lock on this node would take: it may go on behind the match
    """

    num_tokens: int
    node: Any
    num_pinned: int


class Found(NamedTuple):
    """The same by SGLang's whole search, which counts as a use and may split a node.

    num_device, num_host  tokens at its head on the device, and behind them on the host
    node                  the last node on the device
    """

    num_device: int
    num_host: int
    node: Any


def lookup_key(req: Any) -> Any:
    """What admission will look up (`Req.init_next_round_input`): all tokens but those that must be
    computed in any case."""
    ids = token_ids(req)
    if req.positional_embed_overrides is not None:
        ids = ids[:0]
    limit = req._compute_max_prefix_len(len(ids))
    return RadixKey(token_ids=ids, extra_key=req.extra_key, limit=limit, cache_salt=req.cache_salt)


def peek(tree: Any, req: Any) -> Peek:
    """Changes nothing that eviction sees."""
    return Peek(*tree.tree_core.match_full_device_prefix(lookup_key(req)))


def find(tree: Any, req: Any) -> Found:
    """What the tree holds of a request, host memory included."""
    found = tree.match_prefix(MatchPrefixParams(key=lookup_key(req)))
    return Found(found.device_prefix_len, int(found.host_hit_length), found.last_device_node)


def num_in_session(tree: Any, req: Any) -> int | None:
    """Tokens that a streaming session has kept for its next request (`find_active_slot`); None:
    what is cached of it is in the tree."""
    if req.session is None or not req.session.streaming or req.to_finish is not None:
        return None
    slot = tree.session.slots.get(req.session.session_id)
    return int(slot.kv.kv_committed_len) if slot is not None and slot.kv.holds_kv else None


def evictable_at(tree: Any, node: Any) -> int:
    """Tokens from a node up to the root that no request holds, measured by a short lock."""
    before: int = tree.evictable_size()
    lock = tree.inc_lock_ref(node)
    held: int = before - tree.evictable_size()
    tree.dec_lock_ref(node, lock.to_dec_params())
    return held


def last_node(req: Any) -> Any:
    """The node of the tree that a running request holds, with those above it."""
    return req.last_node


def path_of(core: Any, node_id: int) -> list[PathNode]:
    """The nodes from the root, which is left out, to this one."""
    # The binding of the Rust core gives plain tuples, which its adapter turns into structs.
    if isinstance(core, RustUnifiedTreeCore):
        path = core._binding.collect_path_info([node_id])[0]
        return [PathNode(node[0], node[2], node[3]) for node in path]
    (path,) = core.collect_path_info([node_id])
    return [PathNode(node.node_id, node.path_start, node.path_end) for node in path]
