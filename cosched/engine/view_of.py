"""The view of a live SGLang scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, match_prefix_for_req
from sglang.srt.runtime_context import get_exec

from cosched.core.caps import EngineCaps
from cosched.core.request import Request, RequestClass
from cosched.core.view import Backlog, Decodes, KvState, Match, OfflineLimits
from cosched.engine.partial import can_split
from cosched.engine.tracked import TrackedRequest
from cosched.engine.waiting import WaitingQueue
from cosched.latency.graphs import GraphSizes

__all__ = ["SchedulerView", "caps_of", "graph_sizes_of", "num_cached"]


def caps_of(scheduler: Any) -> EngineCaps:
    """The limits of a scheduler, read once after it was built."""
    return EngineCaps(
        page_size=scheduler.page_size,
        max_running_requests=scheduler.max_running_requests,
        max_chunk_tokens=scheduler.chunked_prefill_size,
        max_prefill_tokens=scheduler.max_prefill_tokens,
        max_reserved_tokens=CLIP_MAX_NEW_TOKENS,
        mixed_batches=bool(scheduler.is_mixed_chunk),
        partial_decode=can_split(scheduler),
        overlap=bool(scheduler.enable_overlap),
    )


def graph_sizes_of(scheduler: Any) -> GraphSizes | None:
    """The sizes that its batches are padded to for CUDA graphs; None: they are not."""
    config = get_exec().graph.cuda_graph_config
    if scheduler.device == "cpu" or config is None:
        return None

    def sizes(phase: Any) -> tuple[int, ...]:
        return () if phase.backend == "disabled" else tuple(sorted(phase.bs or ()))

    graphs = GraphSizes(prefill=sizes(config.prefill), decode=sizes(config.decode))
    return graphs if graphs.prefill or graphs.decode else None


def num_cached(tree_cache: Any, request: TrackedRequest) -> int:
    """Tokens at the head of a waiting request whose KV is in the radix tree."""
    req = request.req
    return len(match_prefix_for_req(tree_cache, req, req.origin_input_ids).device_indices)


class SchedulerView:
    """Implements `cosched.core.view.View` on a scheduler between two iterations.

    Made anew for each plan; everything that costs more than an attribute is computed when it is
    first asked for.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        running_batch: Any,
        waiting: WaitingQueue,
        caps: EngineCaps,
        now_s: float,
        start_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._batch = running_batch
        self._waiting = waiting
        self.caps = caps
        self.now_s = now_s
        self.start_s = start_s

    @cached_property
    def _running(self) -> _Running:
        """One pass over the running batch."""
        everyone: list[TrackedRequest] = []
        remaining: list[int] = []
        decodes: dict[RequestClass, tuple[list[TrackedRequest], list[int]]]
        decodes = {request_class: ([], []) for request_class in RequestClass}
        for req in self._batch.reqs:
            if req.finished_reason is not None:
                continue  # stays in the batch until that is next filtered
            tracked = req.cosched
            everyone.append(tracked)
            remaining.append(tracked.max_new_tokens - len(req.output_ids))
            requests, contexts = decodes[tracked.request_class]
            requests.append(tracked)
            contexts.append(req.kv.kv_committed_len + 1)
        by_class = {request_class: Decodes(*lists) for request_class, lists in decodes.items()}
        return _Running(everyone, by_class, remaining)

    @property
    def running(self) -> Sequence[TrackedRequest]:
        return self._running.everyone

    def running_of(self, request_class: RequestClass) -> Decodes:
        return self._running.by_class[request_class]

    @cached_property
    def unfinished(self) -> Sequence[TrackedRequest]:
        req = self._scheduler.chunked_req
        return () if req is None else (req.cosched,)

    @property
    def online(self) -> Iterable[TrackedRequest]:
        return self._waiting.online

    @property
    def offline(self) -> Iterable[TrackedRequest]:
        return self._waiting.offline

    @property
    def num_offline(self) -> int:
        return len(self._waiting.offline)

    @property
    def backlog(self) -> Backlog:
        return self._waiting.backlog

    @property
    def offline_limits(self) -> OfflineLimits:
        return self._waiting.offline_limits

    @cached_property
    def kv(self) -> KvState:
        scheduler = self._scheduler
        return KvState(
            total=scheduler.max_total_num_tokens,
            free=scheduler.token_to_kv_pool_allocator.available_size(),
            evictable=scheduler.tree_cache.evictable_size(),
            reserved=self._reserve(self._running.remaining),
        )

    @cached_property
    def free_slots(self) -> int:
        slots: int = self._scheduler.get_num_allocatable_reqs(
            len(self._batch.reqs), running_batch=self._batch
        )
        return slots

    def reserve_of(self, request: Request) -> int:
        if request in self.unfinished:
            return 0
        assert isinstance(request, TrackedRequest), f"{type(request)=}"
        return self._reserve((request.max_new_tokens - request.num_output_tokens,))

    def _reserve(self, remaining: Sequence[int]) -> int:
        """SGLang's rule: a share of the output still to come, learnt from past iterations."""
        ratio: float = self._scheduler.new_token_ratio_tracker.current
        most = self.caps.max_reserved_tokens
        return sum([int((n if n < most else most) * ratio) for n in remaining]) + len(remaining)

    def match(self, request: Request) -> Match:
        req = _req(request)
        tree = self._scheduler.tree_cache
        req.init_next_round_input(tree)
        before = tree.evictable_size()
        lock = tree.inc_lock_ref(req.last_node)
        held = before - tree.evictable_size()
        tree.dec_lock_ref(req.last_node, lock.to_dec_params())
        return Match(cached=len(req.prefix_indices), evictable=held)

    def preemption_gain(self, request: Request) -> int:
        """Measured by releasing the request's lock on the tree for a moment."""
        req = _req(request)
        tree = self._scheduler.tree_cache
        own = int(req.kv.kv_allocated_len) - int(req.kv.cache_protected_len)
        before = tree.evictable_size()
        tree.unpin(req)
        shared: int = tree.evictable_size() - before
        req.lock_receipt = tree.inc_lock_ref(req.last_node).to_dec_params()
        return own + shared


class _Running(NamedTuple):
    """What a plan reads of all running requests; remaining: output still to come of each."""

    everyone: list[TrackedRequest]
    by_class: dict[RequestClass, Decodes]
    remaining: list[int]


def _req(request: Request) -> Any:
    assert isinstance(request, TrackedRequest), f"{type(request)=}"
    return request.req
