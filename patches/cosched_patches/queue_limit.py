"""A full queue turns online requests away; offline ones only the operator's own limit."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.core.request import RequestClass
    from cosched.core.wire import class_of_priority
    from cosched.engine.guard import note_or_raise
    from cosched.engine.waiting import online_requests

    def limit_online_only(original: Any, scheduler: Any, recv_req: Any) -> bool:
        if class_of_priority(recv_req.priority) is RequestClass.OFFLINE:
            gate = getattr(scheduler, "cosched_offline", None)
            return gate is not None and gate.turns_away(recv_req)
        if scheduler.max_queued_requests is None:
            return False
        # Stock code counts, and under priority scheduling may abort one of, what it sees here.
        waiting = scheduler.waiting_queue
        try:
            online = online_requests(waiting)
            scheduler.waiting_queue = list(online)
            turned_away: bool = original(scheduler, recv_req)
            left = {id(req) for req in scheduler.waiting_queue}
        except Exception as error:
            note_or_raise(scheduler, "queue_limit", error)
            return False
        finally:
            scheduler.waiting_queue = waiting
        for req in online:
            if id(req) not in left:
                waiting.remove(req)
        return turned_away

    return limit_online_only


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler._abort_on_queued_limit",
    kind="around",
    signature=("self", "recv_req"),
    hook=_hook,
    why=(
        "``--max-queued-requests`` protects online latency. Stock counts offline requests against "
        "it and answers them with 503, and aborts waiting ones for requests of higher priority. "
        "Offline requests have ``--cosched-max-offline-waiting``, and a server that is shutting "
        "down takes none."
    ),
    upstream="sgl-project/sglang#8743",
)
