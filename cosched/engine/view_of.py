"""The view of a live SGLang scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule

from cosched.core.caps import EngineCaps
from cosched.core.request import PLAIN, Request, RequestClass
from cosched.core.view import Backlog, BatchRules, Decodes, KvState, Match, OfflineLimits
from cosched.engine.partial import can_hold, can_split
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
        max_prefills=get_schedule().prefill_max_requests,
        max_reserved_tokens=CLIP_MAX_NEW_TOKENS,
        chunk_align=scheduler.truncation_align_size or 1,
        max_adapters=scheduler.max_loras_per_batch if scheduler.enable_lora else None,
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
    """Tokens at the head of a waiting request whose KV is in the radix tree; changes nothing in
    it."""
    num_tokens, *_ = tree_cache.tree_core.match_full_device_prefix(_key(request.req))
    return int(num_tokens)


def _key(req: Any) -> Any:
    """What admission will look up (`Req.init_next_round_input`): all tokens but those that must be
    computed in any case."""
    token_ids = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
    if req.positional_embed_overrides is not None:
        token_ids = token_ids[:0]
    limit = req._compute_max_prefix_len(len(token_ids))
    return RadixKey(
        token_ids=token_ids, extra_key=req.extra_key, limit=limit, cache_salt=req.cache_salt
    )


def _num_in_session(tree_cache: Any, req: Any) -> int | None:
    """Tokens that a streaming session has kept for its next request (`find_active_slot`); None:
    what is cached of it is in the tree."""
    if req.session is None or not req.session.streaming or req.to_finish is not None:
        return None
    slot = tree_cache.session.slots.get(req.session.session_id)
    return int(slot.kv.kv_committed_len) if slot is not None and slot.kv.holds_kv else None


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
        decodes_due: bool,
        is_barred: Callable[[Request], bool],
    ) -> None:
        self._scheduler = scheduler
        self._batch = running_batch
        self._waiting = waiting
        self.caps = caps
        self.now_s = now_s
        self.start_s = start_s
        self.is_barred = is_barred
        self._decodes_due = decodes_due
        self._matches: dict[Request, Match] = {}

    @cached_property
    def _running(self) -> _Running:
        """One pass over the running batch."""
        everyone: list[TrackedRequest] = []
        remaining: list[int] = []
        next_step = 0
        mixes = True
        page = self.caps.page_size
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
            num_computed = req.kv.kv_committed_len
            contexts.append(num_computed + 1)
            traits = tracked.traits
            if traits is not PLAIN:
                mixes = mixes and traits.can_mix
                remaining[-1] *= traits.num_rows
            if not num_computed % page:
                next_step += page * traits.num_rows
        by_class = {request_class: Decodes(*lists) for request_class, lists in decodes.items()}
        return _Running(everyone, by_class, remaining, next_step, mixes)

    @property
    def running(self) -> Sequence[TrackedRequest]:
        return self._running.everyone

    def running_of(self, request_class: RequestClass) -> Decodes:
        return self._running.by_class[request_class]

    @cached_property
    def unfinished(self) -> Sequence[TrackedRequest]:
        req = self._scheduler.chunked_req
        return () if req is None else (req.cosched,)

    @cached_property
    def rules(self) -> BatchRules:
        caps = self.caps
        return BatchRules(
            mixed=caps.mixed_batches
            and self._running.mixes
            and all(request.traits.can_mix for request in self.unfinished),
            partial=caps.partial_decode and can_hold(self._batch),
            decodes_due=self._decodes_due,
        )

    def is_waiting(self, rid: str) -> bool:
        return self._waiting.get(rid) is not None

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
            next_step=self._running.next_step,
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
        remaining = request.max_new_tokens - request.num_output_tokens
        return self._reserve((remaining * request.traits.num_rows,))

    def _reserve(self, remaining: Sequence[int]) -> int:
        """SGLang's rule: a share of the output still to come, learnt from past iterations."""
        ratio: float = self._scheduler.new_token_ratio_tracker.current
        most = self.caps.max_reserved_tokens
        return sum([int((n if n < most else most) * ratio) for n in remaining]) + len(remaining)

    def match(self, request: Request) -> Match:
        """Looked up once: nothing changes in the tree while a plan is made."""
        match = self._matches.get(request)
        if match is None:
            match = self._matches[request] = self._look_up(request)
        return match

    def _look_up(self, request: Request) -> Match:
        tree = self._scheduler.tree_cache
        req = _req(request)
        key = _key(req)
        num_held = _num_in_session(tree, req)
        if num_held is not None:
            return Match(cached=min(num_held, key.limit), evictable=0)
        if self._scheduler.enable_hierarchical_cache and get_parallel().tp_size == 1:
            # Only the whole search knows what is on the host. It touches what it finds, so with
            # several ranks, of which one plans, their trees would differ.
            found = tree.match_prefix(MatchPrefixParams(key=key))
            host = int(found.host_hit_length)
            num_device = len(found.device_indices)
            held = self._evictable_at(found.last_device_node)
            return Match(cached=num_device + host, evictable=held, host=host)
        num_tokens, node, num_pinned = tree.tree_core.match_full_device_prefix(key)
        # A lock takes the whole of the last node; admission splits it where the match ends.
        held = max(self._evictable_at(node) - (num_pinned - num_tokens), 0)
        return Match(cached=num_tokens, evictable=held)

    def _evictable_at(self, node: Any) -> int:
        """Tokens from a node of the tree up to the root that nobody holds."""
        tree = self._scheduler.tree_cache
        before: int = tree.evictable_size()
        lock = tree.inc_lock_ref(node)
        held: int = before - tree.evictable_size()
        tree.dec_lock_ref(node, lock.to_dec_params())
        return held

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
    """What a plan reads of all running requests.

    remaining  output still to come of each
    next_step  KV tokens that their next decodes take
    mixes      all of them may decode beside a prefill
    """

    everyone: list[TrackedRequest]
    by_class: dict[RequestClass, Decodes]
    remaining: list[int]
    next_step: int
    mixes: bool


def _req(request: Request) -> Any:
    assert isinstance(request, TrackedRequest), f"{type(request)=}"
    return request.req
