"""State slots: what state-space and linear-attention layers keep of a request.

A running request has a slot for its state, and with ``extra_buffer`` two for checkpoints; a node of
the radix tree may have one with the state at its end. Only up to such a checkpoint is a prefix
reusable, however much KV the tree has behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.kv_cache_configurator import MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_exec, mamba_checkpoint_grid, mamba_track_grid

from cosched.memory.node import PathNode


def has_states(tree: Any) -> bool:
    """Whether its nodes have checkpoints."""
    return bool(tree.supports_mamba())


def slots_left(scheduler: Any) -> int:
    """Slots that are free, or have a checkpoint that no request uses."""
    pool = scheduler.req_to_token_pool
    num_free = int(pool.mamba_allocator.schedulable_available_size())
    # Checkpoints in 8 bits have a pool of their own, and free no slot.
    is_apart = pool.mamba_ckpt_pool is not None
    return num_free if is_apart else num_free + int(scheduler.tree_cache.mamba_evictable_size())


def num_lost(scheduler: Any) -> int:
    """Slots of an idle engine that neither are free nor hold a checkpoint."""
    if not has_states(scheduler.tree_cache):
        return 0
    if scheduler.req_to_token_pool.mamba_ckpt_pool is not None:
        return 0
    held = slots_left(scheduler) + scheduler.tree_cache.mamba_protected_size()
    return int(scheduler.req_to_token_pool.mamba_allocator.size - held)


def end_allocation(scheduler: Any) -> None:
    """An iteration has failed that may have set slots aside for its batch."""
    if has_states(scheduler.tree_cache):
        scheduler.req_to_token_pool.mamba_allocator.alloc_group_end()


def slots_per_request(scheduler: Any) -> int:
    """Slots that a request may take: for its state, for checkpoints under way, and for one in the
    tree while another takes its place. SGLang sizes the pool so; 0: there are no slots."""
    if not has_states(scheduler.tree_cache):
        return 0
    pool = scheduler.req_to_token_pool
    most = MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO + pool.mamba_initial_tracking_slots
    return int(min(most, pool.mamba_allocator.size // scheduler.max_running_requests))


def slots_held(scheduler: Any) -> int:
    """Slots that preempting a request frees at least."""
    if not has_states(scheduler.tree_cache):
        return 0
    return 1 + int(scheduler.req_to_token_pool.mamba_initial_tracking_slots)


def checkpoint_tokens(scheduler: Any) -> int:
    """Prompt tokens of the shortest chunk that leaves a checkpoint."""
    tree = scheduler.tree_cache
    if not (has_states(tree) and get_exec().mamba.enable_mamba_extra_buffer):
        return 1
    return int(mamba_checkpoint_grid(tree.page_size))


def replies_reach_checkpoint(scheduler: Any, running_batch: Any) -> bool:
    """Whether the next decode of a running request gets to a checkpoint of its reply, which SGLang
    makes where no prefill is beside it. After one iteration of decodes alone not again, so that
    prefills go on when many requests are at one."""
    tree, last = scheduler.tree_cache, scheduler.last_batch
    if not (has_states(tree) and get_exec().mamba.enable_mamba_extra_buffer):
        return False
    if last is None or not last.forward_mode.is_extend() or scheduler.attn_dp_enabled:
        return False
    if running_batch.is_empty() or running_batch.seq_lens_cpu is None:
        return False
    behind = (running_batch.seq_lens_cpu + 1) % mamba_track_grid(tree.page_size)
    return bool((behind == 0).any())


def num_kept(req: Any) -> int:
    """Computed tokens of a request under way up to its last checkpoint, which the tree has or gets
    when it is preempted."""
    kv = req.kv
    if kv.mamba_ping_pong_track_buffer is None:
        return int(kv.kv_committed_len)  # the state itself goes into the tree
    return max(int(kv.cache_protected_len), int(kv.mamba_last_track_seqlen or 0))


def checkpoint_at(core: Any, path: Sequence[PathNode], num_matched: int) -> PathNode | None:
    """The last node of a path that ends within the match and has a checkpoint."""
    for node in reversed(path):
        if node.end <= num_matched:
            value = core.get_component_device_value(node.node_id, ComponentType.MAMBA)
            if value is not None:
                return node
    return None


@contextmanager
def as_finished(req: Any) -> Iterator[None]:
    """SGLang hands the state of a finished request to the tree. The same is right for one that is
    preempted: its results are known, so the state is that of its computed tokens."""
    req.finished_reason = FINISH_ABORT()
    try:
        yield
    finally:
        req.finished_reason = None


def drop_unused(tree: Any, req: Any) -> None:
    """Free the slot of a waiting request that was looked up for admission, and was refused."""
    req.kv.mamba_cow_src_index = None
    req.kv.mamba_needs_clear = False
    if req.kv.holds_mamba and not req.kv.holds_kv and not req.session:
        tree.req_to_token_pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
        req.kv.mamba_pool_idx = None
