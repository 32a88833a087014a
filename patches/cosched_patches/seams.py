"""All seams, in the order in which a request meets them."""

from __future__ import annotations

from cosched_patches import (
    batch_launch,
    batch_result,
    beam_prompt,
    decode_retraction,
    detokenizer_processes,
    generate_request,
    http_json,
    http_processes,
    http_routes,
    idle,
    internal_state,
    lora_admission,
    next_batch,
    penalties,
    prefill_adder,
    prefill_batch,
    queue_limit,
    refusal_status,
    request_abort,
    scheduler_init,
    scheduler_processes,
    set_state,
    sigterm,
    waiting_timeout,
    warmup,
)
from cosched_patches.seam import Seam

__all__ = ["SEAMS"]

SEAMS: tuple[Seam, ...] = (
    http_processes.SEAM,
    scheduler_processes.SEAM,
    detokenizer_processes.SEAM,
    http_routes.SEAM,
    warmup.SEAM,
    http_json.SEAM,
    generate_request.SEAM,
    refusal_status.SEAM,
    scheduler_init.SEAM,
    beam_prompt.SEAM,
    queue_limit.SEAM,
    waiting_timeout.SEAM,
    request_abort.SEAM,
    prefill_batch.SEAM,
    prefill_adder.SEAM,
    lora_admission.SEAM,
    penalties.SEAM,
    next_batch.SEAM,
    decode_retraction.SEAM,
    batch_launch.SEAM,
    batch_result.SEAM,
    internal_state.SEAM,
    set_state.SEAM,
    idle.SEAM,
    sigterm.SEAM,
)
