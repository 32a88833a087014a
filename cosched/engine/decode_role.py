"""The decode server of PD disaggregation: prompts were computed elsewhere, and their KV comes in.

SGLang admits requests in two steps. A request that has come waits for KV memory, then for its KV;
then it decodes with all others. A plan has no prefills, and says whose decode pauses. Around it:

* Online requests get memory first. Offline ones get none while the time is used up (the latest plan
  paused a decode), or beyond the operator's limits; the same for those that ran out of memory.
* Where memory runs out offline requests leave first. SGLang backs their KV up in host memory.

There is no offline pool: requests are at the prefill server at the same time, and wait in the order
of arrival. Nor is there a radix tree, so no order of eviction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.controller import Controller
from cosched.engine.port.partial import split
from cosched.wire import class_of_priority


class DecodeRole:
    """Calls of SGLang's decode loop, in their order."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._scheduler = controller.scheduler
        self.waiting = controller.waiting
        self._pauses = False
        """The latest plan paused a decode. The same on all ranks."""

    def admit(self, process: Callable[[], None]) -> None:
        """Memory is given to those that wait for it. process: SGLang's
        `Scheduler.process_decode_queue`."""
        with port.waiting_for_memory(self._scheduler, _is_offline, self._may_enter()):
            process()

    def _may_enter(self) -> int:
        """Offline requests that may get memory now."""
        if self._pauses:
            return 0
        most = self.waiting.offline_limits.most_running
        if most is None:
            return len(port.queued_for_memory(self._scheduler))
        inside = filter(_is_offline, port.with_memory(self._scheduler))
        return max(most - sum(1 for _ in inside), 0)

    def decode(self, update: Callable[[Any], Any], running_batch: Any) -> Any:
        """The running batch decodes, or a part of it, which is returned. update: SGLang's
        `Scheduler.update_running_batch`."""
        controller = self._controller
        if port.holds_ended(running_batch):
            running_batch.filter_batch()
        if running_batch.is_empty():
            return update(running_batch)
        for req in running_batch.reqs:
            self.waiting.track(req)
        controller.due = iteration = controller.plan(running_batch)
        paused = iteration.plan.paused
        self._pauses = bool(paused)
        part = split(running_batch, paused) if paused else None
        active = running_batch if part is None else part.active
        if not port.decodes_fit(active):
            part, active = None, running_batch
            port.retract(self._scheduler, running_batch, _is_offline)
        iteration.split = part
        return update(active)

    def next_batch(self, build: Callable[[], Any]) -> Any:
        """build: SGLang's `Scheduler.get_next_disagg_decode_batch_to_run`."""
        plan = build()
        if plan.batch_to_run is None:
            self._pauses = False
            self._controller.idle()
        plan.running_batch = self._controller.launched(plan.batch_to_run, plan.running_batch)
        return plan


def _is_offline(req: Any) -> bool:
    return class_of_priority(req.priority) is RequestClass.OFFLINE
