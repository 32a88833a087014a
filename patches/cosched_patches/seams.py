"""All seams, in the order in which a request meets them."""

from __future__ import annotations

from cosched_patches import (
    batch_launch,
    batch_result,
    beam_prompt,
    chat_messages,
    created_time,
    decode_retraction,
    detokenizer_processes,
    generate_request,
    graph_variants,
    http_app,
    http_json,
    http_processes,
    idle,
    ingest,
    internal_state,
    lora_admission,
    memory_check,
    next_batch,
    page_allocator,
    page_decode,
    page_extend,
    page_free,
    penalties,
    prefill_adder,
    prefill_batch,
    queue_limit,
    refusal_status,
    request_abort,
    request_values,
    scheduler_init,
    scheduler_processes,
    set_state,
    sigterm,
    waiting_timeout,
    warmup,
)
from cosched_patches.seam import Seam

__all__ = ["SEAMS", "seams_for"]

SEAMS: tuple[Seam, ...] = (
    http_processes.SEAM,
    scheduler_processes.SEAM,
    detokenizer_processes.SEAM,
    http_app.SEAM,
    warmup.SEAM,
    warmup.SEAM_0_5_21,
    http_json.SEAM,
    chat_messages.SEAM,
    chat_messages.SEAM_0_5_21,
    generate_request.SEAM,
    refusal_status.SEAM,
    request_values.SEAM,
    created_time.SEAM,
    scheduler_init.SEAM,
    graph_variants.SEAM,
    ingest.SEAM,
    ingest.SEAM_0_5_21,
    beam_prompt.SEAM,
    queue_limit.SEAM,
    waiting_timeout.SEAM,
    request_abort.SEAM,
    prefill_batch.SEAM,
    prefill_adder.SEAM,
    prefill_adder.SEAM_0_5_21,
    lora_admission.SEAM,
    penalties.SEAM,
    next_batch.SEAM,
    decode_retraction.SEAM,
    page_allocator.SEAM,
    page_extend.SEAM,
    page_decode.SEAM,
    page_free.SEAM,
    memory_check.SEAM,
    batch_launch.SEAM,
    batch_result.SEAM,
    internal_state.SEAM,
    set_state.SEAM,
    idle.SEAM,
    sigterm.SEAM,
)
"""Those of every supported version; where a place differs between versions there are several."""


def seams_for(version: str) -> tuple[Seam, ...]:
    """Those of one supported version."""
    return tuple(seam for seam in SEAMS if version in seam.versions)
