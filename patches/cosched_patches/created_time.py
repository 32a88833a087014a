"""When a request came to the server goes with it to the scheduler."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    def with_created_time(original: Any, times: Any) -> Any:
        state = original(times)
        created_s = getattr(times, "created_time", 0.0)
        return {**state, "created_time": created_s} if created_s else state

    return with_created_time


SEAM = Seam(
    target="sglang.srt.observability.req_time_stats.ReqTimeStatsBase.__getstate__",
    kind="around",
    signature=("self",),
    hook=_hook,
    why=(
        "A client counts from when it sent its request, and the scheduler looks for requests "
        "between two iterations only. SGLang has the field on both sides, and a comment where it "
        "could be filled: in what the server and the controller of data-parallel replicas send."
    ),
)
