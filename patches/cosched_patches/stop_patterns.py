"""Stop patterns are matched in linear time, at the end of the output."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.request import finish_by_pattern

    def match(original: Any, req: Any, new_accepted_len: int = 1) -> bool:
        params = req.sampling_params
        patterns = params.stop_regex_strs
        if not patterns:
            return bool(original(req, new_accepted_len))
        if params.stop_strs:
            params.stop_regex_strs = []
            try:
                if original(req, new_accepted_len):
                    return True
            finally:
                params.stop_regex_strs = patterns
        return finish_by_pattern(req, new_accepted_len)

    return match


SEAM = Seam(
    target="sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
    kind="around",
    signature=("self", "new_accepted_len"),
    hook=_hook,
    why=(
        "SGLang matches ``stop_regex`` with Python's `re` at every step, on the scheduler's "
        "thread: ``(a+)+$`` takes time exponential in the text."
    ),
)
