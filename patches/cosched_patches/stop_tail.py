"""Stop patterns are looked for at the end of the output."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.request import most_tail_tokens

    def bounded(original: Any, req: Any, new_accepted_len: int) -> int:
        num_tokens: int = original(req, new_accepted_len)
        return min(num_tokens, most_tail_tokens(req, new_accepted_len))

    return bounded


SEAM = Seam(
    target="sglang.srt.managers.schedule_batch.Req._stop_match_tail_len",
    kind="around",
    signature=("self", "new_accepted_len"),
    hook=_hook,
    why=(
        "For a pattern without a longest match SGLang decodes the whole output at every step, on "
        "the scheduler's thread."
    ),
)
