"""A page that two requests share is free when both are out."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.bidirectional import free_row

    def free(original: Any, cache: Any, kv: Any, ranges: Any) -> None:
        free_row(original, cache, kv, ranges)

    return free


SEAM = Seam(
    target="sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.free_kv_row",
    kind="around",
    signature=("self", "kv", "ranges"),
    hook=_hook,
    why="The allocator gets slots alone, from which whose they are cannot be told.",
)
