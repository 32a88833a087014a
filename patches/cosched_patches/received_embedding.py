"""The same for a request of a model that embeds, ranks or classifies."""

from __future__ import annotations

from dataclasses import replace

from cosched_patches import received_request
from cosched_patches.seam import Seam

__all__ = ["SEAM"]

SEAM: Seam = replace(
    received_request.SEAM,
    target="sglang.srt.managers.scheduler.Scheduler._handle_embedding_request",
    hook=lambda: received_request.SEAM.hook(),
)
