"""``stop_regex`` by `cosched.limits.patterns`."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import FINISHED_MATCHED_REGEX

from cosched.limits.patterns import matches

__all__ = ["MOST_TAIL_TOKENS", "finish_by_pattern", "most_tail_tokens"]

MOST_TAIL_TOKENS = 256
"""A match of a pattern is looked for in that many tokens at the end of the output."""


def most_tail_tokens(req: Any, new_accepted_len: int) -> int:
    """Most tokens to decode for stop strings and patterns."""
    longest: int = max(req.sampling_params.stop_str_max_len, MOST_TAIL_TOKENS)
    return longest + max(new_accepted_len, 1)


def finish_by_pattern(req: Any, new_accepted_len: int) -> bool:
    """Whether the new tokens end in a match; the request then finishes there."""
    tail_len = req._stop_match_tail_len(new_accepted_len)
    start = len(req.output_ids) - tail_len
    window = req.output_ids[start:]
    for num_tokens in range(max(1, len(window) - new_accepted_len + 1), len(window) + 1):
        text = req.tokenizer.decode(window[:num_tokens])
        for pattern in req.sampling_params.stop_regex_strs:
            if matches(pattern, text):
                req.finished_reason = FINISHED_MATCHED_REGEX(matched=pattern)
                req.finished_len = start + num_tokens
                return True
    return False
