"""When decoding itself runs out of KV memory, offline requests give way first."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.core.request import RequestClass
    from cosched.core.wire import class_of_priority
    from cosched_patches.active import has_planning_policy

    def online_last(order: list[int], reqs: list[Any]) -> list[int]:
        if not has_planning_policy():
            return order
        # The list runs from most to least worth keeping; the sort is stable within a class.
        return sorted(
            order, key=lambda i: class_of_priority(reqs[i].priority) is RequestClass.OFFLINE
        )

    return online_last


SEAM = Seam(
    target="sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
    kind="after",
    signature=("reqs",),
    hook=_hook,
    why=(
        "A safety net: policies stop offline requests before memory runs out; should the engine "
        "still have to retract, stock would take the shortest outputs, which are online ones."
    ),
    upstream="sgl-project/sglang#26248",
)
