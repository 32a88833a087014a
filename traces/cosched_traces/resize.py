"""How long requests are: pure functions from workload to workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from cosched_traces.errors import WorkloadError
from cosched_traces.transform import check_positive
from cosched_traces.workload import Segment, TraceRequest, Workload

__all__ = ["Limited", "Overlong", "limit_tokens", "rescale_lengths"]


def rescale_lengths(workload: Workload, *, prompt: float = 1.0, output: float = 1.0) -> Workload:
    """Lengths times a factor, at least 1 token.

    Each segment is scaled by itself, so that segments that were shared still are.
    """
    check_positive("prompt factor", prompt)
    check_positive("output factor", output)

    def scaled(request: TraceRequest) -> TraceRequest:
        if request.token_ids and prompt != 1:
            raise WorkloadError(f"{request.rid}: a prompt of given tokens cannot be rescaled")
        segments = tuple(Segment(s.key, _scale(s.num_tokens, prompt)) for s in request.segments)
        limit = request.max_new_tokens
        return replace(
            request,
            segments=segments,
            num_output_tokens=_scale(request.num_output_tokens, output),
            max_new_tokens=None if limit is None else _scale(limit, output),
        )

    note = f"prompts times {prompt:g}, outputs times {output:g}"
    return workload.changed(tuple(map(scaled, workload.requests)), note)


class Overlong(Enum):
    """What to do with a request of more tokens than the context holds.

    TRUNCATE  cut the end of its prompt, so that shared prefixes stay shared; an output that leaves
              no room for a prompt is cut first
    DROP      leave it out
    """

    TRUNCATE = "truncate"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """A workload within a limit, and how many requests that changed."""

    workload: Workload
    num_truncated: int
    num_dropped: int


def limit_tokens(workload: Workload, max_total_tokens: int, *, how: Overlong) -> Limited:
    """Hold prompt + output of every request within `max_total_tokens`."""
    if max_total_tokens < 2:
        raise WorkloadError(f"max_total_tokens {max_total_tokens} leaves no room for a reply")
    kept: list[TraceRequest] = []
    num_over = 0
    for request in workload.requests:
        num_new_tokens = max(request.num_output_tokens, request.max_new_tokens or 0)
        if request.num_prompt_tokens + num_new_tokens <= max_total_tokens:
            kept.append(request)
            continue
        num_over += 1
        if how is Overlong.TRUNCATE:
            kept.append(_truncated(request, max_total_tokens))
    note = f"{how.value} {num_over} requests over {max_total_tokens} tokens"
    truncated = how is Overlong.TRUNCATE
    return Limited(
        workload=workload.changed(tuple(kept), note),
        num_truncated=num_over if truncated else 0,
        num_dropped=0 if truncated else num_over,
    )


def _truncated(request: TraceRequest, max_total_tokens: int) -> TraceRequest:
    room = max_total_tokens - 1
    num_output_tokens = min(request.num_output_tokens, room)
    limit = None if request.max_new_tokens is None else min(request.max_new_tokens, room)
    left = max_total_tokens - max(num_output_tokens, limit or 0)
    token_ids = request.token_ids[:left]
    segments: list[Segment] = []
    for segment in request.segments:
        if left > 0:
            segments.append(Segment(segment.key, min(segment.num_tokens, left)))
            left -= segment.num_tokens
    return replace(
        request,
        token_ids=token_ids,
        segments=tuple(segments),
        num_output_tokens=num_output_tokens,
        max_new_tokens=limit,
    )


def _scale(num_tokens: int, factor: float) -> int:
    return max(round(num_tokens * factor), 1)
