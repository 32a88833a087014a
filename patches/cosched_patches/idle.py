"""A pool that the operator has paused does not count as work."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    def idle_but_for_the_paused(
        original: Any, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False
    ) -> bool:
        controller = getattr(scheduler, "cosched", None)
        waiting = scheduler.waiting_queue
        if controller is not None and not controller.waiting.may_admit:
            # Not `ignore_waiting`: it walks the queue.
            scheduler.waiting_queue = []
        try:
            idle: bool = original(
                scheduler, for_health_check=for_health_check, ignore_waiting=ignore_waiting
            )
        finally:
            scheduler.waiting_queue = waiting
        return idle

    return idle_but_for_the_paused


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
    kind="around",
    signature=("self", "for_health_check", "ignore_waiting"),
    hook=_hook,
    why=(
        "With a paused pool and nothing else to do, ``/flush_cache`` would be refused, and "
        "``/health`` would wait for an iteration that never comes."
    ),
)
