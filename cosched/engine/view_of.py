"""The view of a live SGLang scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from cosched.core.caps import EngineCaps
from cosched.core.estimates import LengthEstimate, Predictor
from cosched.core.group import NO_OTHERS, OtherRanks
from cosched.core.kv_state import KvState, Match
from cosched.core.memories import Memory
from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass
from cosched.core.view import (
    BatchRules,
    Decodes,
    Ended,
    OfflineLimits,
    OfflineOrder,
    Outlook,
    Progress,
    ToleranceHeadroom,
)
from cosched.engine import port
from cosched.engine.feature import Features
from cosched.engine.features.isolated_watch import IsolatedWatch
from cosched.engine.features.kv_manager import KvManager
from cosched.engine.features.recomputation import Recomputation
from cosched.engine.features.shared_reads import SharedReads
from cosched.engine.iteration import Moment
from cosched.engine.running import Running, own_tokens
from cosched.engine.running_table import RunningTable
from cosched.engine.tracked import TrackedRequest
from cosched.engine.waiting import WaitingQueue
from cosched.memory.kv_memory import promised_tokens
from cosched.predict.calibration import Calibrator

_NOTHING = Match(cached=0, evictable=0)


class Sources(Protocol):
    """The parts of the engine that a view reads; a `cosched.engine.controller.Controller` has them,
    and describes them."""

    scheduler: Any
    caps: EngineCaps
    predictor: Calibrator
    waiting: WaitingQueue
    table: RunningTable
    features: Features


class SchedulerView:
    """Implements `cosched.core.view.View` on a scheduler between two iterations.

    Made for each plan; everything that costs more than an attribute is computed when it is first
    needed.
    """

    def __init__(
        self,
        sources: Sources,
        running_batch: Any,
        moment: Moment,
        *,
        must_decode: bool,
        others: OtherRanks = NO_OTHERS,
    ) -> None:
        """must_decode: what of `BatchRules.must_decode` the controller knows."""
        self._sources = sources
        self._batch = running_batch
        self._moment = moment
        self._must_decode = must_decode
        self.others = others
        self.caps: EngineCaps = sources.caps
        self.predictor: Predictor = sources.predictor
        self.now_s: float = moment.now_s
        self.start_s: float = moment.start_s
        self._kv = sources.features.get(KvManager)
        self._matches: dict[Request, Match] = {}
        self._gains: dict[Request, port.Tokens] = {}
        self._shared: dict[RequestClass, Mapping[Request, int]] = {}

    @property
    def mean_iteration_s(self) -> float:
        return self._moment.mean_iteration_s

    @property
    def ended(self) -> Sequence[Ended]:
        return self._moment.ended

    @property
    def tokens_per_decode(self) -> float:
        return self._sources.table.tokens_per_decode

    def why_blocked(self, request: Request) -> SkipReason | None:
        return self._sources.features.why_blocked(request)

    @cached_property
    def recompute_debt_s(self) -> float:
        return self._sources.features[Recomputation].budget.debt_s(self.now_s)

    @cached_property
    def tolerance_headroom(self) -> ToleranceHeadroom | None:
        isolated = self._sources.features.get(IsolatedWatch)
        return None if isolated is None else isolated.headroom

    @cached_property
    def _running(self) -> Running:
        return self._sources.table.follow(self._batch)

    @cached_property
    def _holders(self) -> Running:
        """With requests of other microbatches, which hold KV and will take more."""
        parts = [*port.elsewhere(self._sources.scheduler)]
        return self._sources.table.follow(self._batch, parts) if parts else self._running

    @property
    def running(self) -> Sequence[TrackedRequest]:
        return self._running.everyone

    def running_of(self, request_class: RequestClass) -> Decodes:
        return self._running.by_class[request_class]

    @cached_property
    def unfinished(self) -> Sequence[TrackedRequest]:
        req = self._sources.scheduler.chunked_req
        return () if req is None else (req.cosched,)

    @cached_property
    def rules(self) -> BatchRules:
        caps = self.caps
        decodes_alone = caps.mixed_batches and port.replies_reach_checkpoint(
            self._sources.scheduler, self._batch
        )
        return BatchRules(
            mixed=caps.mixed_batches
            and not decodes_alone
            and self._running.mixes
            and all(request.traits.can_mix for request in self.unfinished),
            partial=caps.partial_decode
            and (self._running.are_plain or port.can_pause(self._batch)),
            must_decode=self._must_decode or decodes_alone,
        )

    def outlook(self) -> Outlook:
        kv_tree = None if self._kv is None else self._kv.core
        return self._sources.table.outlook(
            self._holders, kv_tree=kv_tree, gain_of=self.preemption_gain
        )

    def longest_left(self, request_class: RequestClass) -> int:
        return self._sources.table.longest_left(self._running, request_class)

    def progress(self) -> Progress:
        return self._running.progress

    def length(self, request: Request) -> LengthEstimate:
        assert isinstance(request, TrackedRequest), f"{type(request)=}"
        return self._sources.table.lengths.remaining(
            request, waits=self.waiting(request.rid) is not None
        )

    def waiting(self, rid: str) -> TrackedRequest | None:
        return self._sources.waiting.get(rid)

    def running_named(self, rids: Collection[str]) -> Mapping[str, TrackedRequest]:
        return self._sources.table.named(rids, self._running)

    def cannot_pause(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those that are about to end: the engine would not see their end."""
        if not self.rules.partial:
            return requests
        tracked = cast(Sequence[TrackedRequest], requests)
        if not port.are_any_ending([request.req for request in tracked]):
            return ()
        return [request for request in tracked if port.is_ending(request.req)]

    @property
    def online(self) -> Iterable[TrackedRequest]:
        return self._sources.waiting.online

    def offline_order(self) -> OfflineOrder:
        return self._sources.waiting.offline.order()

    @property
    def num_offline(self) -> int:
        return len(self._sources.waiting.offline)

    @property
    def num_behind(self) -> int:
        return self._sources.waiting.num_behind

    @property
    def offline_limits(self) -> OfflineLimits:
        limits, offline = self._sources.waiting.offline_limits, RequestClass.OFFLINE
        if limits.max_running is None:
            return limits
        num_here, num = (len(r.by_class[offline].requests) for r in (self._running, self._holders))
        return replace(limits, max_running=max(limits.max_running - (num - num_here), 0))

    def own(self) -> Mapping[RequestClass, int]:
        """KV tokens that requests of each class hold outside the tree."""
        return own_tokens(self.unfinished, self._holders.own())

    @cached_property
    def kv(self) -> KvState:
        scheduler = self._sources.scheduler
        running, own = self._holders, self.own()
        remaining, certain = running.to_come()
        return KvState(
            total=port.kv_total(scheduler),
            free=port.kv_free(scheduler),
            evictable=port.kv_evictable(scheduler),
            shared=port.kv_shared(scheduler),
            online=own[RequestClass.ONLINE],
            offline=own[RequestClass.OFFLINE],
            reserved=self._reserve(remaining)
            + self._reserve(certain, whole=True)
            + running.promised,
            promised=running.promised,
            next_step=running.next_step,
            shared_offline=0 if self._kv is None else self._kv.core.num_held_offline,
            kept=0 if self._kv is None else self._kv.online_reservation,
        )

    @cached_property
    def memories(self) -> Sequence[Memory]:
        return port.memories_of(self._sources.scheduler, self)

    def output_left(self) -> tuple[Any, Any]:
        """As `port.memory_kinds.EngineView`."""
        return self._running.output_left()

    @cached_property
    def free_slots(self) -> int:
        return port.free_slots(self._sources.scheduler, self._batch)

    def promised(self, request: Request) -> int | None:
        assert isinstance(request, TrackedRequest), f"{type(request)=}"
        return request.promised

    def reserve_of(self, request: Request) -> int:
        if request in self.unfinished:
            return 0
        assert isinstance(request, TrackedRequest), f"{type(request)=}"
        if request.promised is not None:
            num_left = max(request.promised - request.num_output_tokens, 0)
            kept = promised_tokens(num_left * request.traits.num_rows)
            running = self._running
            return kept - running.lent.get(request.rid, 0) - running.taken.get(request.rid, 0)
        remaining = request.max_new_tokens - request.num_output_tokens
        remaining *= request.traits.num_rows
        return self._reserve(np.array([remaining]), whole=request.reserves_all)

    def _reserve(self, remaining: Any, *, whole: bool = False) -> int:
        """SGLang's rule: a share of the remaining output, learned from past iterations, or all of
        it if it is certain."""
        if not len(remaining):
            return 0
        ratio = 1.0 if whole else port.reserve_ratio(self._sources.scheduler)
        kept = (np.minimum(remaining, self.caps.max_reserved_tokens) * ratio).astype(np.int64)
        return int(np.add.reduce(kept)) + len(remaining)

    def match(self, request: Request) -> Match:
        """Cached: the tree does not change while a plan is made."""
        match = self._matches.get(request)
        if match is None:
            match = self._matches[request] = self._look_up(request)
        return match

    def _look_up(self, request: Request) -> Match:
        tree = self._sources.scheduler.tree_cache
        req = _req(request)
        num_held = port.num_in_session(tree, req)
        if num_held is not None:
            return Match(cached=min(num_held, port.lookup_key(req).limit), evictable=0)
        assert isinstance(request, TrackedRequest), f"{type(request)=}"
        if self._kv is not None and not self._kv.may_have(request):
            return _NOTHING
        if self._kv is None and port.searches_host(self._sources.scheduler):
            found = port.find(tree, req)
            held = port.taken_at(tree, found)
            return Match(
                cached=found.num_device + found.num_host,
                evictable=held.kv,
                to_load=found.num_host,
                others=held.others,
            )
        found_here = port.peek(tree, req)
        num_tokens, node, num_pinned = found_here
        # Locking takes the whole last node; admission splits it where the match ends.
        evictable = (
            port.evictable_at(tree, node).kv
            if self._kv is None
            else self._kv.core.evictable_from(node)
        )
        num_evictable = max(evictable - (num_pinned - num_tokens), 0)
        host = 0 if self._kv is None else self._kv.num_on_host(request, node, num_tokens)
        return Match(
            cached=num_tokens + host,
            evictable=num_evictable,
            to_load=host,
            others=port.others_at(tree, found_here),
        )

    def num_common(self, request: Request, other: Request, least: int) -> int:
        return port.num_common(_req(request), _req(other), least)

    def num_shared(self, request: Request) -> int:
        """Computed once for each class."""
        reads = self._sources.features.get(SharedReads)
        if reads is None:
            return 0
        shared = self._shared.get(request.request_class)
        if shared is None:
            requests, contexts, _ = self.running_of(request.request_class)
            shared = reads.saved(requests, contexts.tolist())
            self._shared[request.request_class] = shared
        return shared.get(request, 0)

    def preemption_gain(self, request: Request) -> int:
        return self.gain_of(request).kv

    def gain_of(self, request: Request) -> port.Tokens:
        """As `port.memory_kinds.EngineView`."""
        gain = self._gains.get(request)
        if gain is None:
            req = _req(request)
            if self._kv is None or not port.has_one_pool(self._sources.scheduler):
                gain = port.gain_of_stopping(self._sources.scheduler.tree_cache, req)
            else:
                (shared,) = self._kv.core.gains_of_release((port.last_node(req),))
                gain = port.Tokens(shared + port.num_own(req), 0)
            self._gains[request] = gain
        return gain


def _req(request: Request) -> Any:
    assert isinstance(request, TrackedRequest), f"{type(request)=}"
    return request.req
