"""The waiting timeout is for online requests; offline ones may wait for hours."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from sglang.srt.environ import envs

    from cosched.engine.guard import note_or_raise
    from cosched.engine.waiting import online_requests

    def online_only(original: Any, scheduler: Any) -> Any:
        waiting = scheduler.waiting_queue
        if envs.SGLANG_REQ_WAITING_TIMEOUT.get() <= 0:
            return original(scheduler)
        try:
            scheduler.waiting_queue = online_requests(waiting)
            return original(scheduler)
        except Exception as error:
            note_or_raise(scheduler, "waiting_timeout", error)
            return []
        finally:
            scheduler.waiting_queue = waiting

    return online_only


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler._poll_timeout_aborts",
    kind="around",
    signature=("self",),
    hook=_hook,
    why="``SGLANG_REQ_WAITING_TIMEOUT`` would answer patient offline requests with 503.",
)
