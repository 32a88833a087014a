"""All seams, in the order in which a request meets them."""

from __future__ import annotations

from cosched_patches import (
    batch_launch,
    batch_result,
    decode_retraction,
    generate_request,
    http_json,
    http_processes,
    internal_state,
    next_batch,
    prefill_adder,
    prefill_batch,
    queue_limit,
    request_abort,
    scheduler_init,
    waiting_timeout,
)
from cosched_patches.seam import Seam

__all__ = ["SEAMS"]

SEAMS: tuple[Seam, ...] = (
    http_processes.SEAM,
    http_json.SEAM,
    generate_request.SEAM,
    scheduler_init.SEAM,
    queue_limit.SEAM,
    waiting_timeout.SEAM,
    request_abort.SEAM,
    prefill_batch.SEAM,
    prefill_adder.SEAM,
    next_batch.SEAM,
    decode_retraction.SEAM,
    batch_launch.SEAM,
    batch_result.SEAM,
    internal_state.SEAM,
)
