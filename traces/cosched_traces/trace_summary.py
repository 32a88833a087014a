"""Prefixes that the prompts of a workload share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from cosched_traces.workload import TraceRequest, Workload

STEP_TOKENS = 16


def shared_ratio(workload: Workload) -> float:
    """Share of the prompt tokens that an unbounded prefix cache would have. Token ids are compared
    in steps of 16."""
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
    """The parts (node, tokens) of each prompt. Two prompts share a node if they are equal up to its
    end; token ids are compared in steps of 16."""
    nodes: dict[tuple[int, Hashable, int], int] = {}
    for request in requests:
        node, path = 0, []
        for key, length in _parts(request):
            node = nodes.setdefault((node, key, length), len(nodes) + 1)
            path.append((node, length))
        yield path


def _parts(request: TraceRequest) -> Iterable[tuple[Hashable, int]]:
    if not request.token_ids:
        return (segment[:2] for segment in request.segments)
    ids = request.token_ids
    chunks = (tuple(ids[at : at + STEP_TOKENS]) for at in range(0, len(ids), STEP_TOKENS))
    return ((chunk, len(chunk)) for chunk in chunks)
