"""SGLang's adder with a token limit per request."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM", "SEAM_0_5_21"]


def _hook() -> Any:
    from cosched.engine.port.building import PlannedPrefillAdder

    def planned(original: Any, scheduler: Any) -> Any:
        return PlannedPrefillAdder

    return planned


def _class_hook() -> Any:
    from cosched.engine.port.building import PlannedPrefillAdder

    return PlannedPrefillAdder


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",
    kind="around",
    signature=("self",),
    hook=_hook,
    why="A plan says how many tokens each request gets; stock has one chunk size for all.",
    versions=("0.5.23",),
)

SEAM_0_5_21 = Seam(
    target="sglang.srt.managers.schedule_policy.PrefillAdder",
    kind="replace",
    signature=(
        "page_size",
        "tree_cache",
        "token_to_kv_pool_allocator",
        "running_batch",
        "new_token_ratio",
        "rem_input_tokens",
        "rem_chunk_tokens",
        "num_mixed_decode_tokens",
        "priority_scheduling_preemption_threshold",
        "max_prefill_bs",
        "max_running_requests",
        "prefill_max_requests",
        "prefill_delayer_single_pass",
        "dllm_config",
        "waiting_queue_len",
        "prefill_tile_block_m",
    ),
    hook=_class_hook,
    why="A plan says how many tokens each request gets; stock has one chunk size for all.",
    versions=("0.5.21",),
)
