"""What each line of a job costs in the best batch of the job alone, by a cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cosched.core.batch import BatchShape, Prefill
from cosched.cost_models.base import CostModel
from cosched.metrics.job import LineCost
from cosched_traces.summary import prefix_parts
from cosched_traces.workload import TraceRequest

__all__ = ["line_costs"]

CHUNK_TOKENS = 8192
"""Prompt tokens of an iteration that only prefills: more gain nothing."""


def line_costs(
    requests: Sequence[TraceRequest],
    cost_model: CostModel,
    *,
    kv_tokens: int,
    max_running: int,
) -> dict[str, LineCost]:
    """rid -> cost. Every prompt token that lines share is computed once, and divided equally among
    them. Decodes run in the largest batch that the KV memory and the slots hold.

    kv_tokens    capacity of the KV memory
    max_running  most requests that decode in one iteration
    """
    own = _own_tokens(requests)
    contexts = [r.num_prompt_tokens + r.num_output_tokens / 2 for r in requests]
    mean_context = sum(contexts) / max(len(contexts), 1)
    num_decodes = max(1, min(max_running, int(kv_tokens / max(mean_context, 1.0))))
    decode_s: dict[int, float] = {}
    costs = {}
    for request, num_own, context in zip(requests, own, contexts, strict=True):
        # To 64 tokens: a job has thousands of lengths, and a decode hardly differs between them.
        rounded = max(64 * round(context / 64), 1)
        if rounded not in decode_s:
            batch = BatchShape(decodes=[rounded] * num_decodes)
            decode_s[rounded] = cost_model.iteration_s(batch) / num_decodes
        prompt_s = _prompt_s(cost_model, request.num_prompt_tokens, num_own)
        costs[request.rid] = LineCost(prompt_s=prompt_s, token_s=decode_s[rounded])
    return costs


def _own_tokens(requests: Sequence[TraceRequest]) -> list[float]:
    """Of each prompt, the tokens that it has to compute, its part of shared ones included."""
    paths = list(prefix_parts(requests))
    num_lines = Counter(node for path in paths for node, _ in path)
    return [sum(length / num_lines[node] for node, length in path) for path in paths]


def _prompt_s(cost_model: CostModel, num_tokens: int, num_own: float) -> float:
    """Time of the last `num_own` tokens of a prompt, in full iterations of like ones."""
    left, seconds = max(round(num_own), 1), 0.0
    position = max(num_tokens - left, 0)
    while left >= CHUNK_TOKENS:
        seconds += cost_model.iteration_s(_prefills(CHUNK_TOKENS, position, 1))
        position, left = position + CHUNK_TOKENS, left - CHUNK_TOKENS
    if left:
        num_alike = max(CHUNK_TOKENS // left, 1)
        seconds += cost_model.iteration_s(_prefills(left, position, num_alike)) / num_alike
    return seconds


def _prefills(num_new: int, num_cached: int, num: int) -> BatchShape:
    prefills: Iterable[Prefill] = [Prefill(num_new, num_cached)] * num
    return BatchShape(prefills=list(prefills))
