"""The allocator is told whose tokens a prefill computes."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.bidirectional import allocate_for

    def allocate(original: Any, batch: Any) -> Any:
        return allocate_for(original, batch)

    return allocate


SEAM = Seam(
    target="sglang.srt.mem_cache.allocation.alloc_for_extend",
    kind="around",
    signature=("batch",),
    hook=_hook,
    why="The allocator gets lengths alone; who shares a page depends on each request's class.",
)
