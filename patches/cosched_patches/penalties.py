"""Penalties count each generated token once."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.penalties import count_outputs

    def count_each_once(original: Any, batch: Any) -> None:
        if not count_outputs(batch):
            original(batch)

    return count_each_once


SEAM = Seam(
    target="sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
    kind="around",
    signature=("self",),
    hook=_hook,
    why=(
        "A decode adds each request's latest token to what its penalties count. Requests that sat "
        "out an iteration, or were stopped and resumed, would miss tokens."
    ),
)
