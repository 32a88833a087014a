"""Whether and how to preempt a request, by what it is expected to lose before it resumes (own)."""

from __future__ import annotations

from cosched.core.batch import BatchTotals
from cosched.core.plan import PreemptMode
from cosched.core.request import Request
from cosched.core.view import View


def num_lost(view: View, request: Request) -> int:
    """Tokens of a running request or an unfinished prefill that are expected to be lost before it
    resumes: what any kind of memory does not keep, and KV that is evicted. The request that takes
    its place is assumed to need as much memory, and takes free memory first."""
    lost = [memory.num_lost(request) for memory in view.memories]
    return max(request.num_computed_tokens - max(view.kv.free, 0), 0, *lost)


def should_finish(view: View, request: Request) -> bool:
    """True if the rest of its output takes less time than recomputing what no checkpoint keeps."""
    kept = [memory.num_kept(request) for memory in view.memories]
    num_behind = request.num_computed_tokens - min(kept, default=request.num_computed_tokens)
    if num_behind <= 0:
        return False
    rest_s = view.length(request).median * view.mean_iteration_s
    return rest_s < _seconds(view, request, num_behind)


def recompute_s(view: View, request: Request) -> float:
    """Time to recompute what preempting it is expected to lose, in chunks [s]."""
    return _seconds(view, request, num_lost(view, request))


def _seconds(view: View, request: Request, num_tokens: int) -> float:
    """Time to compute the last `num_tokens` of its computed tokens, in chunks [s]."""
    if not num_tokens:
        return 0.0
    num_chunk = min(num_tokens, view.caps.max_chunk_tokens or num_tokens)
    chunk = BatchTotals()
    chunk.add_prefill(num_chunk, request.num_computed_tokens - num_chunk)
    return view.predictor.predict_s(chunk) * num_tokens / num_chunk


def has_checkpoints(view: View) -> bool:
    """True if a prefix is found again only up to a checkpoint."""
    return any(memory.has_checkpoints for memory in view.memories)


def can_copy(view: View, num_tokens: int = 0) -> bool:
    """True if so much KV of a preempted request can be copied elsewhere; 0: any at all."""
    return any(memory.can_copy(num_tokens) for memory in view.memories)


def preempt_mode(view: View, request: Request) -> PreemptMode:
    """The mode in which a running request or an unfinished prefill resumes soonest.

    What is lost (`num_lost`) is recomputed, or loaded if it was copied.
    Copying happens beside the iterations and is not counted. RECOMPUTE is never better than
    KEEP_KV here: it is for policies that need the memory at once.
    """
    num_tokens, lost = request.num_computed_tokens, num_lost(view, request)
    if not lost or not can_copy(view, lost):
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
