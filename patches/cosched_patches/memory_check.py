"""SGLang's check for leaks of a busy scheduler counts shared pages once."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.bidirectional import num_saved

    def uncached(original: Any, checker: Any) -> tuple[int, int]:
        full, swa = original(checker)
        return full - num_saved(checker), swa

    return uncached


SEAM = Seam(
    target=(
        "sglang.srt.managers.scheduler_components.invariant_checker."
        "SchedulerInvariantChecker._get_total_uncached_sizes"
    ),
    kind="around",
    signature=("self",),
    hook=_hook,
    why="It takes each request to have pages of its own, and would end a scheduler that is right.",
)
