"""An online and an offline request share a page of KV, where the configuration asks for it."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["ALLOCATOR", "DECODE", "EXTEND", "FREE", "MEMORY_CHECK"]

_VERSIONS = ("0.5.23",)


def _allocator_hook() -> Any:
    from cosched.engine.port.bidirectional import BidirectionalAllocator
    from cosched_patches.active import shares_pages

    def allocator_class(original: Any, platform: Any) -> Any:
        return BidirectionalAllocator if shares_pages() else original(platform)

    return allocator_class


def _allocate_hook() -> Any:
    from cosched.engine.port.bidirectional import allocate_for

    return allocate_for


def _free_hook() -> Any:
    from cosched.engine.port.bidirectional import free_row

    return free_row


def _memory_check_hook() -> Any:
    from cosched.engine.port.bidirectional import num_saved

    def uncached(original: Any, checker: Any) -> tuple[int, int]:
        full, swa = original(checker)
        return full - num_saved(checker), swa

    return uncached


ALLOCATOR = Seam(
    target="sglang.srt.platforms.interface.SRTPlatform.get_paged_allocator_cls",
    kind="around",
    signature=("self",),
    hook=_allocator_hook,
    why="Pages that two requests share need an allocator that knows both sides of a page.",
    versions=_VERSIONS,
)

EXTEND = Seam(
    target="sglang.srt.mem_cache.allocation.alloc_for_extend",
    kind="around",
    signature=("batch",),
    hook=_allocate_hook,
    why="The allocator gets lengths alone; who shares a page depends on the class of each request.",
    versions=_VERSIONS,
)

DECODE = Seam(
    target="sglang.srt.mem_cache.allocation.alloc_for_decode",
    kind="around",
    signature=("batch", "token_per_req"),
    hook=_allocate_hook,
    why="The same for the next token of each running request.",
    versions=_VERSIONS,
)

FREE = Seam(
    target="sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.free_kv_row",
    kind="around",
    signature=("self", "kv", "ranges"),
    hook=_free_hook,
    why="A shared page is free when both are out; from its slots alone that cannot be told.",
    versions=_VERSIONS,
)

MEMORY_CHECK = Seam(
    target=(
        "sglang.srt.managers.scheduler_components.invariant_checker."
        "SchedulerInvariantChecker._get_total_uncached_sizes"
    ),
    kind="around",
    signature=("self",),
    hook=_memory_check_hook,
    why="SGLang's check for leaks while it is busy takes each request to have pages of its own.",
    versions=_VERSIONS,
)
