"""How a request is stopped: what is expected to be lost until it resumes decides (own)."""

from __future__ import annotations

from cosched.core.batch import BatchTotals
from cosched.core.plan import PreemptMode
from cosched.core.request import Request
from cosched.core.view import View

__all__ = ["stop_mode"]


def stop_mode(view: View, request: Request) -> PreemptMode:
    """The mode by which resuming a running request, or an unfinished prefill, takes least time.

    Whoever takes its place is expected to take as much memory, the free first: of what it leaves in
    the tree the tail beyond that goes, and is computed anew, or loaded where it was copied to host
    memory before. Copying goes on beside the iterations and is not counted. Of equals what moves
    least. RECOMPUTE is never better than what the tree keeps of itself: it is for those who want
    the memory at once.
    """
    num_tokens = request.num_computed_tokens
    num_lost = max(num_tokens - max(view.kv.free, 0), 0)
    if not num_lost or view.kv.host_free < num_lost:
        return PreemptMode.KEEP_KV
    computing = BatchTotals()
    computing.add_prefill(num_lost + 1, num_tokens - num_lost)
    loading = BatchTotals()
    loading.add_prefill(1, num_tokens)
    loading.add_load(num_lost)
    predictor = view.predictor
    if predictor.predict_s(loading) < predictor.predict_s(computing):
        return PreemptMode.CHECKPOINT
    return PreemptMode.KEEP_KV
