"""When a request came to the server goes with it to the scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM", "SEAM_OF_REPLICAS"]


def _hook() -> Any:
    def with_created_time(original: Any, times: Any) -> Any:
        return {**original(times), "created_time": times.created_time}

    return with_created_time


SEAM = Seam(
    target="sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__",
    kind="around",
    signature=("self",),
    hook=_hook,
    why=(
        "A client counts from when it sent its request, and the scheduler looks for requests "
        "between two iterations only. SGLang has the field on both sides and a comment where it "
        "could be filled."
    ),
)

SEAM_OF_REPLICAS = replace(
    SEAM,
    target="sglang.srt.observability.req_time_stats.DPControllerReqTimeStats.__getstate__",
    why="The same on its way through the controller of data-parallel replicas.",
)
