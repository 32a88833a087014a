"""Requests that sit out an iteration are running again once its batch is ready."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.apply import rejoin_held

    def rejoined(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        next_batch = original(scheduler, *args, **kwargs)
        controller = getattr(scheduler, "cosched", None)
        if controller is not None:
            next_batch.running_batch = rejoin_held(
                controller, next_batch.batch_to_run, next_batch.running_batch
            )
        return next_batch

    return rejoined


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    kind="around",
    signature=("self", "running_batch", "last_batch"),
    hook=_hook,
    why=(
        "Partial decode: SGLang decodes its whole running batch or none of it. An iteration may "
        "run on a part of it; whatever looks at the running batch afterwards must see all of it."
    ),
)
