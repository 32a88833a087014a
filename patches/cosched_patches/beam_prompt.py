"""A beam search whose prompt does not fit one iteration is answered with an error."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from sglang.srt.runtime_context import get_schedule

    def refuse_long_prompts(original: Any, coordinator: Any, req: Any, recv_req: Any) -> str | None:
        limit = get_schedule().chunked_prefill_size
        num_tokens = len(req.origin_input_ids)
        if limit is not None and 0 < limit < num_tokens:
            return (
                f"Beam search is not supported for prompts of more than {limit} tokens here "
                f"(--chunked-prefill-size); this one has {num_tokens}."
            )
        error: str | None = original(coordinator, req, recv_req)
        return error

    return refuse_long_prompts


SEAM = Seam(
    target="sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
    kind="around",
    signature=("self", "req", "recv_req"),
    hook=_hook,
    why=(
        "SGLang 0.5.21 keeps no chunk of such a prompt in the radix tree and begins anew with each "
        "chunk, until memory is full and the scheduler ends: one request would end the server. "
        "0.5.23 goes on in the request's row."
    ),
    versions=("0.5.21",),
)
