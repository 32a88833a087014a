"""Hooks in KV memory and in the model runner of a scheduler."""

from __future__ import annotations

from typing import Any

from cosched.config import planning_config
from cosched.core.request import RequestClass
from cosched.engine.port.read_once import graph_variants
from cosched.papers.bros.sglang_pages import (
    BidirectionalAllocator,
    allocate_for,
    free_row,
    num_saved,
)
from cosched.wire import class_of_priority
from cosched_patches.seam import Seam, after, around


def retract_offline_first(order: list[int], reqs: list[Any]) -> list[int]:
    """When decoding itself runs out of KV memory, offline requests are retracted first: a safety
    net, as policies preempt them before. Stock would retract the shortest outputs, which are online
    ones. (sgl-project/sglang#26248)"""
    if planning_config() is None:
        return order
    # From most to least worth keeping; the sort is stable within a class.
    return sorted(order, key=lambda i: class_of_priority(reqs[i].priority) is RequestClass.OFFLINE)


def choose_allocator(stock: Any, platform: Any) -> Any:
    """With ``kv.bidirectional_pages`` an online and an offline request may share a KV page; stock
    gives each its own."""
    config = planning_config()
    is_shared = config is not None and config.kv.bidirectional_pages
    return BidirectionalAllocator if is_shared else stock


def count_shared_once(sizes: tuple[int, int], checker: Any) -> tuple[int, int]:
    """SGLang's check for memory leaks takes each request to have pages of its own, and would end a
    scheduler that shares pages."""
    full, swa = sizes
    return full - num_saved(checker), swa


def add_graph_variants(stock: Any, hf_config: Any) -> Any:
    """With shared-prefix attention every size of decode batch is captured twice: attention by
    SGLang's backend, and by the plan of shared prefixes. SGLang asks before each replay which of
    the two it is."""
    return stock or graph_variants()


_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_CACHE = "sglang.srt.mem_cache"
_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
_PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"
_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"

SEAMS: tuple[Seam, ...] = (
    after(f"{_BATCH}._get_decode_retraction_order", "reqs", retract_offline_first),
    after(f"{_PLATFORM}.get_paged_allocator_cls", "self", choose_allocator),
    around(f"{_CACHE}.allocation.alloc_for_extend", "batch", allocate_for),
    around(f"{_CACHE}.allocation.alloc_for_decode", "batch, token_per_req", allocate_for),
    around(f"{_CACHE}.base_prefix_cache.BasePrefixCache.free_kv_row", "self, kv, ranges", free_row),
    after(f"{_CHECKER}._get_total_uncached_sizes", "self", count_shared_once),
    after(f"{_RUNNER}.create_attention_graph_variants", "hf_config", add_graph_variants),
)
