"""Iterations are timed: launched here, done there."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["LAUNCH", "RESULT"]


def _launch_hook() -> Any:
    def timed(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        observer = getattr(scheduler, "cosched_observer", None)
        if observer is None:
            return original(scheduler, batch, *args, **kwargs)
        return observer.launch(lambda: original(scheduler, batch, *args, **kwargs), batch)

    return timed


def _result_hook() -> Any:
    def timed(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
        observer = getattr(scheduler, "cosched_observer", None)
        if observer is not None:
            observer.finish(batch, result)
        return original(scheduler, batch, result)

    return timed


LAUNCH = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.run_batch",
    kind="around",
    signature=("self", "batch", "pp_proxy_tensors"),
    hook=_launch_hook,
    why="The time of an iteration starts when its batch is launched.",
)

RESULT = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    kind="around",
    signature=("self", "batch", "result"),
    hook=_result_hook,
    why=(
        "The time of an iteration ends when its result is there; under the overlap scheduler that "
        "is known only here, after the next batch was launched."
    ),
)
