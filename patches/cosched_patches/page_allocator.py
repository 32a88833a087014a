"""The allocator of KV pages knows both sides of a page, where the configuration asks for it."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.bidirectional import BidirectionalAllocator
    from cosched_patches.active import shares_pages

    def allocator_class(original: Any, platform: Any) -> Any:
        return BidirectionalAllocator if shares_pages() else original(platform)

    return allocator_class


SEAM = Seam(
    target="sglang.srt.platforms.interface.SRTPlatform.get_paged_allocator_cls",
    kind="around",
    signature=("self",),
    hook=_hook,
    why="An online and an offline request may share a page; stock gives each its own.",
)
