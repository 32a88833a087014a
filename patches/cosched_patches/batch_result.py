"""The time of an iteration ends when its result is there."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    def timed(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
        def process() -> Any:
            observer = getattr(scheduler, "cosched_observer", None)
            iteration = None if observer is None else observer.finish(result)
            answer = original(scheduler, batch, result)
            controller = getattr(scheduler, "cosched", None)
            if controller is not None:
                controller.on_result(iteration, batch)
            return answer

        faults = getattr(scheduler, "cosched_faults", None)
        return process() if faults is None else faults.process(process, batch, result)

    return timed


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    kind="around",
    signature=("self", "batch", "result"),
    hook=_hook,
    why=(
        "Iterations are timed; an iteration ends when its result is there. Under the overlap "
        "scheduler that is known only here, after the next batch was launched. An exception in it "
        "is laid to a request (`cosched.engine.faults`); stock ends the scheduler."
    ),
)
