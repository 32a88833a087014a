"""Orders in which a client that knows the whole offline set can send it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from cosched.core.batch import BatchShape, Prefill
from cosched.cost_models.base import CostModel
from cosched.cost_models.specs import model_spec
from cosched.simulation.machine import Machine
from cosched_traces.workload import TraceRequest

__all__ = ["SENT", "in_order"]

_BATCH = 64
"""Requests that decode together, of which a request's decode steps take their share of the time."""


def in_order(
    requests: Sequence[TraceRequest], order: str, *, machine: Machine, cost_model: CostModel
) -> list[TraceRequest]:
    """The requests as `order`, one of `SENT`, has them."""
    return SENT[order](requests, machine, cost_model)


def _depth_first(
    requests: Sequence[TraceRequest], machine: Machine, cost_model: CostModel
) -> list[TraceRequest]:
    """Sorted by the prompts' tokens: those that share a prefix follow each other."""
    return [requests[i] for i in _sorted_by_prompt(_prompts(requests, machine))]


def _prefixes_ahead(
    requests: Sequence[TraceRequest], machine: Machine, cost_model: CostModel
) -> list[TraceRequest]:
    """Depth first, and the first request on each prefix one chunk of prompt tokens earlier.

    Those that begin alike and fall into one iteration each compute the prefix: SGLang caches it
    when the iteration is over.
    """
    prompts = _prompts(requests, machine)
    order = _sorted_by_prompt(prompts)
    shared = [0, *(_num_shared(prompts[a], prompts[b]) for a, b in pairwise(order)), 0]
    computed = 0  # tokens of those that are not moved
    keys = []
    for position, index in enumerate(order):
        if shared[position + 1] > shared[position]:
            keys.append((computed - machine.chunk(), position))
        else:
            keys.append((computed, position))
            computed += len(prompts[index]) - shared[position]
    return [requests[order[position]] for _, position in sorted(keys)]


def _cheapest(
    requests: Sequence[TraceRequest], machine: Machine, cost_model: CostModel
) -> list[TraceRequest]:
    """Most tokens per second first, as though nothing were shared: best where the window ends
    before the set does."""

    def seconds_per_token(request: TraceRequest) -> float:
        prompt, reply = request.num_prompt_tokens, request.num_output_tokens
        prefill = BatchShape(prefills=[Prefill(num_new=prompt, num_cached=0)])
        step = BatchShape(decodes=[prompt + reply // 2 + 1] * _BATCH)
        seconds = cost_model.iteration_s(prefill) + reply * cost_model.iteration_s(step) / _BATCH
        return seconds / (prompt + reply)

    return sorted(requests, key=seconds_per_token)


SENT: Mapping[str, Callable[[Sequence[TraceRequest], Machine, CostModel], list[TraceRequest]]] = {
    "depth-first": _depth_first,
    "prefixes-ahead": _prefixes_ahead,
    "cheapest": _cheapest,
}
"""By name."""


def _prompts(requests: Sequence[TraceRequest], machine: Machine) -> list[array[int]]:
    vocab_size = model_spec(machine.model).vocab
    return [request.prompt(vocab_size=vocab_size) for request in requests]


def _sorted_by_prompt(prompts: Sequence[array[int]]) -> list[int]:
    return sorted(range(len(prompts)), key=lambda i: prompts[i].tobytes())


def _num_shared(one: array[int], other: array[int]) -> int:
    """Tokens in which they begin alike."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one)[:size] != np.asarray(other)[:size])
    return int(differs[0]) if len(differs) else size
