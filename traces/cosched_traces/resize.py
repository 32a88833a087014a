"""How long requests are: pure functions from workload to workload."""

from __future__ import annotations

from dataclasses import replace

from cosched_traces.errors import WorkloadError
from cosched_traces.transform import check_positive
from cosched_traces.workload import Segment, TraceRequest, Workload


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


def _scale(num_tokens: int, factor: float) -> int:
    return max(round(num_tokens * factor), 1)
