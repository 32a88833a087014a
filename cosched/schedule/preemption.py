"""How a request is stopped: what is expected to be lost until it resumes decides (own)."""

from __future__ import annotations

from cosched.core.batch import BatchTotals
from cosched.core.plan import PreemptMode
from cosched.core.request import Request
from cosched.core.view import View


def num_lost(view: View, request: Request) -> int:
    """KV tokens of a running request, or of an unfinished prefill, that are expected to be evicted
    before it resumes. The request that takes its place is expected to take as much memory, the free
    first; the tail beyond that is evicted."""
    return max(request.num_computed_tokens - max(view.kv.free, 0), 0)


def recompute_s(view: View, request: Request) -> float:
    """Time to compute again what stopping it is expected to lose, in chunks [s]."""
    num_tokens = num_lost(view, request)
    if not num_tokens:
        return 0.0
    num_chunk = min(num_tokens, view.caps.max_chunk_tokens or num_tokens)
    chunk = BatchTotals()
    chunk.add_prefill(num_chunk, request.num_computed_tokens - num_chunk)
    return view.predictor.predict_s(chunk) * num_tokens / num_chunk


def stop_mode(view: View, request: Request) -> PreemptMode:
    """The mode by which resuming a running request, or an unfinished prefill, takes least time.

    What is lost (`num_lost`) is computed again, or loaded where it was copied to host memory
    before. Copying goes on beside the iterations and is not counted. Of equals what moves least.
    RECOMPUTE is never better than what the tree keeps of itself: it is for those who want the
    memory at once.
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
