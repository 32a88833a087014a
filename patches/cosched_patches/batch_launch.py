"""When a batch is launched, the time of an iteration starts, and attention learns who is in it."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.attention import launching

    def timed(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return original(scheduler, batch, *args, **kwargs)

        observer = getattr(scheduler, "cosched_observer", None)
        if observer is None:
            return run()
        with launching(batch):
            return scheduler.cosched_faults.run(lambda: observer.launch(run, batch), batch)

    return timed


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.run_batch",
    kind="around",
    signature=("self", "batch", "pp_proxy_tensors"),
    hook=_hook,
    why=(
        "Iterations are timed; an iteration starts when its batch is launched. And the attention "
        "backend `cosched_shared_prefix` plans from the requests of the batch, of which a forward "
        "pass knows only the rows of their KV. An exception in it is laid to a request "
        "(`cosched.engine.faults`); stock ends the scheduler."
    ),
)
