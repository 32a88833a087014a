"""Requests that sit out an iteration are running again once its batch is ready."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from sglang.srt.managers.scheduler import NextBatchPlan

    from cosched.engine.apply import rejoin_held

    def rejoined(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        def build() -> Any:
            next_batch = original(scheduler, *args, **kwargs)
            controller = getattr(scheduler, "cosched", None)
            if controller is not None:
                next_batch.running_batch = rejoin_held(
                    controller, next_batch.batch_to_run, next_batch.running_batch
                )
            return next_batch

        faults = getattr(scheduler, "cosched_faults", None)
        if faults is None:
            return build()
        next_batch = faults.next_batch(build)
        if next_batch is None:
            return NextBatchPlan(batch_to_run=None, running_batch=scheduler.running_batch)
        return next_batch

    return rejoined


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    kind="around",
    signature=("self", "running_batch", "last_batch"),
    hook=_hook,
    why=(
        "Partial decode: SGLang decodes its whole running batch or none of it. An iteration may "
        "run on a part of it; whatever looks at the running batch afterwards must see all of it. "
        "An exception while a batch is built is laid to a request (`cosched.engine.faults`)."
    ),
)
