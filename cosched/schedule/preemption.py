"""How to preempt a request, by what is expected to be evicted before it resumes (own)."""

from __future__ import annotations

from cosched.core.batch import BatchTotals
from cosched.core.plan import PreemptMode
from cosched.core.request import Request
from cosched.core.view import View


def num_lost(view: View, request: Request) -> int:
    """KV tokens of a running request or an unfinished prefill that are expected to be evicted
    before it resumes: the request that takes its place is assumed to need as much memory, and takes
    free memory first."""
    return max(request.num_computed_tokens - max(view.kv.free, 0), 0)


def recompute_s(view: View, request: Request) -> float:
    """Time to recompute what preempting it is expected to lose, in chunks [s]."""
    num_tokens = num_lost(view, request)
    if not num_tokens:
        return 0.0
    num_chunk = min(num_tokens, view.caps.max_chunk_tokens or num_tokens)
    chunk = BatchTotals()
    chunk.add_prefill(num_chunk, request.num_computed_tokens - num_chunk)
    return view.predictor.predict_s(chunk) * num_tokens / num_chunk


def preempt_mode(view: View, request: Request) -> PreemptMode:
    """The mode in which a running request or an unfinished prefill resumes soonest.

    What is lost (`num_lost`) is recomputed, or loaded if it was copied to host memory.
    Copying happens beside the iterations and is not counted. RECOMPUTE is never better than
    KEEP_KV here: it is for policies that need the memory at once.
    """
    num_tokens, lost = request.num_computed_tokens, num_lost(view, request)
    if not lost or view.kv.host_free < lost:
        return PreemptMode.KEEP_KV
    computing = BatchTotals()
    computing.add_prefill(lost + 1, num_tokens - lost)
    loading = BatchTotals()
    loading.add_prefill(1, num_tokens)
    loading.add_load(lost)
    predictor = view.predictor
    if predictor.predict_s(loading) < predictor.predict_s(computing):
        return PreemptMode.CHECKPOINT
    return PreemptMode.KEEP_KV
