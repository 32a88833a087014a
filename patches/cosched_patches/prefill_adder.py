"""SGLang's adder with a token limit per request."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.building import PlannedPrefillAdder

    def planned(original: Any, scheduler: Any) -> Any:
        return PlannedPrefillAdder

    return planned


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",
    kind="around",
    signature=("self",),
    hook=_hook,
    why="A plan says how many tokens each request gets; stock has one chunk size for all.",
)
