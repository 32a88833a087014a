"""Timeouts are for online requests; offline ones may wait, and be under way, for hours."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from sglang.srt.environ import envs

    from cosched.core.request import RequestClass
    from cosched.core.wire import class_of_priority
    from cosched.engine.guard import note_or_raise
    from cosched.engine.waiting import online_requests

    def online_only(original: Any, scheduler: Any) -> Any:
        timeouts = (envs.SGLANG_REQ_WAITING_TIMEOUT, envs.SGLANG_REQ_RUNNING_TIMEOUT)
        if not any(timeout.get() > 0 for timeout in timeouts):
            return original(scheduler)
        waiting = scheduler.waiting_queue
        try:
            scheduler.waiting_queue = online_requests(waiting)
            aborts = original(scheduler)
        except Exception as error:
            note_or_raise(scheduler, "waiting_timeout", error)
            return []
        finally:
            scheduler.waiting_queue = waiting
        # Under way since it was first admitted, however often it was stopped or held since.
        batches = (scheduler.running_batch, scheduler.last_batch)
        offline = {
            req.rid
            for batch in batches
            if batch is not None
            for req in batch.reqs
            if class_of_priority(req.priority) is RequestClass.OFFLINE
        }
        return [abort for abort in aborts if abort.rid not in offline]

    return online_only


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler._poll_timeout_aborts",
    kind="around",
    signature=("self",),
    hook=_hook,
    why=(
        "``SGLANG_REQ_WAITING_TIMEOUT`` and ``SGLANG_REQ_RUNNING_TIMEOUT`` would answer patient "
        "offline requests with 503; the latter counts from the first admission on."
    ),
)
