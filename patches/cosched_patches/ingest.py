"""Requests are received at the last moment before the next iteration must be planned."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    def at_the_last_moment(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        controller = getattr(scheduler, "cosched", None)
        if controller is not None:
            controller.wait_for_requests()
        return original(scheduler, *args, **kwargs)

    return at_the_last_moment


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.ingest_requests",
    kind="around",
    signature=("self", "stop_at_pause"),
    hook=_hook,
    why=(
        "Under the overlap scheduler SGLang plans an iteration as soon as the one before it has "
        "begun: who comes meanwhile waits for both. It has time until the one before is nearly "
        "over."
    ),
)
