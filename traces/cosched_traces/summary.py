"""A workload in numbers: for reports, and to check a trace against what is published of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cosched.core.request import RequestClass
from cosched_traces.workload import TraceRequest, Workload

STEP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts and lengths [tokens]; None where the workload has no requests or no rate.

    shared_ratio   share of the prompt tokens that an unbounded prefix cache would have
    """

    name: str
    num_requests: int
    num_online: int
    span_s: float
    mean_rate: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    mean_prompt_tokens: float | None
    max_prompt_tokens: int | None
    mean_output_tokens: float | None
    max_output_tokens: int | None
    shared_ratio: float | None
    notes: tuple[str, ...]


def summarize(workload: Workload) -> Summary:
    requests = workload.requests
    prompts = np.array([r.num_prompt_tokens for r in requests], dtype=np.int64)
    outputs = np.array([r.num_output_tokens for r in requests], dtype=np.int64)
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    some = bool(requests)
    return Summary(
        name=workload.name,
        num_requests=len(requests),
        num_online=len(workload.of_class(RequestClass.ONLINE).requests),
        span_s=span_s,
        mean_rate=(len(requests) - 1) / span_s if span_s > 0 else None,
        num_prompt_tokens=int(prompts.sum()),
        num_output_tokens=int(outputs.sum()),
        mean_prompt_tokens=float(prompts.mean()) if some else None,
        max_prompt_tokens=int(prompts.max()) if some else None,
        mean_output_tokens=float(outputs.mean()) if some else None,
        max_output_tokens=int(outputs.max()) if some else None,
        shared_ratio=shared_ratio(workload) if some else None,
        notes=workload.notes,
    )


def shared_ratio(workload: Workload) -> float:
    """Share of prompt tokens that stand, with everything before them, in an earlier prompt.

    Prompts are followed segment by segment until one is new; of a segment whose key was seen at
    this place with another length, the shorter of the two counts. Prompts of token ids are compared
    in steps of 16 tokens.
    """
    longest: dict[tuple[int, Hashable], int] = {}  # after (prefix, key): most tokens seen
    prefixes: dict[tuple[int, Hashable, int], int] = {}  # (prefix, key, tokens): longer prefix
    num_shared = num_tokens = 0
    for request in workload.requests:
        num_tokens += request.num_prompt_tokens
        prefix = 0
        for key, length in _parts(request):
            num_shared += min(length, longest.get((prefix, key), 0))
            longest[prefix, key] = max(length, longest.get((prefix, key), 0))
            prefix = prefixes.setdefault((prefix, key, length), len(prefixes) + 1)
    return num_shared / num_tokens if num_tokens else 0.0


def prefix_parts(requests: Iterable[TraceRequest]) -> Iterator[list[tuple[int, int]]]:
    """Of each prompt, its parts as (node, tokens). Two prompts have a node in common where they
    are equal up to its end; token ids are compared in steps of 16."""
    nodes: dict[tuple[int, Hashable, int], int] = {}
    for request in requests:
        node, path = 0, []
        for key, length in _parts(request):
            node = nodes.setdefault((node, key, length), len(nodes) + 1)
            path.append((node, length))
        yield path


def _parts(request: TraceRequest) -> Iterable[tuple[Hashable, int]]:
    if not request.token_ids:
        return request.segments
    ids = request.token_ids
    chunks = (tuple(ids[at : at + STEP_TOKENS]) for at in range(0, len(ids), STEP_TOKENS))
    return ((chunk, len(chunk)) for chunk in chunks)
