"""What a line of a job costs: its device seconds in the best batch of the job (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cosched.core.batch import BatchShape, Prefill

CHUNK_TOKENS = 8192
"""Prompt tokens of the largest iteration: more gain nothing."""

NUM_HALVINGS = 24
"""Steps of a bisection."""

MOST_DOUBLINGS = 8
"""An iteration 256 times as long because of online requests leaves no time for a job."""


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


def most_per_s(
    iteration_s: Callable[[float, float], float], *, largest: float, limit_s: float
) -> float:
    """Jobs per second of equal iterations, each with the same share of the job.

    iteration_s  share of the job, and the time whose other work is in the iteration too [s] -> time
                 of the iteration [s]
    largest      share of the job that one iteration can hold
    limit_s      most time of an iteration [s]
    """
    longest_s = min(limit_s, iteration_s(largest, 0.0))
    for _ in range(MOST_DOUBLINGS):
        if longest_s == limit_s or iteration_s(largest, longest_s) <= longest_s:
            break
        longest_s = min(limit_s, 2 * longest_s)
    if iteration_s(0.0, longest_s) > longest_s:
        return 0.0
    if iteration_s(largest, longest_s) > longest_s:
        share = _least(lambda s: iteration_s(s, longest_s) > longest_s, most=largest)
        return share / longest_s
    return largest / _least(lambda s: iteration_s(largest, s) <= s, most=longest_s)


def _least(holds: Callable[[float], bool], *, most: float) -> float:
    """The least number, at most `most`, from which on `holds` is true."""
    low, high = 0.0, most
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
