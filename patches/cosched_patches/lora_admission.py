"""A request is admitted only if its LoRA adapter fits beside those of held requests."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.apply import held_adapters

    def count_held(original: Any, scheduler: Any, req: Any, running_loras: set[str | None]) -> bool:
        controller = getattr(scheduler, "cosched", None)
        if controller is not None:
            running_loras = running_loras | held_adapters(controller)
        return bool(original(scheduler, req, running_loras))

    return count_held


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.can_schedule_lora_req",
    kind="around",
    signature=("self", "req", "running_loras"),
    hook=_hook,
    why=(
        "Adapters of requests that sit out the iteration stay in use. Stock counts those of the "
        "batch that runs; one too many would be admitted."
    ),
)
