"""The allocator is told whose next tokens it makes room for."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.bidirectional import allocate_for

    def allocate(original: Any, batch: Any, token_per_req: int) -> Any:
        return allocate_for(original, batch, token_per_req)

    return allocate


SEAM = Seam(
    target="sglang.srt.mem_cache.allocation.alloc_for_decode",
    kind="around",
    signature=("batch", "token_per_req"),
    hook=_hook,
    why="As for a prefill: who shares a page depends on each request's class.",
)
