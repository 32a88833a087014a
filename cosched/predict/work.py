"""What a line of a job costs: its device seconds in the best batch of the job (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cosched.core.batch import BatchShape, Prefill

CHUNK_TOKENS = 8192
"""Prompt tokens of the largest iteration: more gain nothing."""


class LineCost(NamedTuple):
    """What one line of a job costs in the best batch of the job alone.

    prompt_s  device time of its prompt, without what other lines of the job share [s]
    token_s   its share of a decode, for each output token after the first [s]
    """

    prompt_s: float
    token_s: float

    def total_s(self, num_output_tokens: int) -> float:
        return self.prompt_s + self.token_s * max(num_output_tokens - 1, 0)


def prompt_cost_s(iteration_s: Callable[[BatchShape], float], start: int, num_tokens: int) -> float:
    """Time of `num_tokens` of a prompt after the first `start`, in full iterations of like ones."""
    seconds = 0.0
    while num_tokens >= CHUNK_TOKENS:
        seconds += iteration_s(BatchShape(prefills=[Prefill(CHUNK_TOKENS, start)]))
        start, num_tokens = start + CHUNK_TOKENS, num_tokens - CHUNK_TOKENS
    if num_tokens:
        num_alike = CHUNK_TOKENS // num_tokens
        prefills = [Prefill(num_tokens, start)] * num_alike
        seconds += iteration_s(BatchShape(prefills=prefills)) / num_alike
    return seconds


def token_cost_s(
    iteration_s: Callable[[BatchShape], float], context: int, *, num_decodes: int
) -> float:
    """Share of one decode in an iteration of like ones."""
    return iteration_s(BatchShape(decodes=[context] * num_decodes)) / num_decodes
