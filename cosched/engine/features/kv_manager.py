"""KV memory of a scheduler: eviction order, cost of evictions, online reservation, host memory.

`KvManager` connects `cosched.memory` to an engine: SGLang's radix tree, the pool of waiting
requests, the reuse learned from past requests, and the costs of the predictor.
"""

from __future__ import annotations

import logging
import math
import os
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.runtime_context import get_memory

from cosched.core.estimates import Predictor
from cosched.core.plan import PreemptMode
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.feature import Feature
from cosched.engine.host_core import HostedTreeCore
from cosched.engine.kv_readers import KvReaders
from cosched.engine.running import own_tokens
from cosched.engine.support import chooses_evictions
from cosched.engine.tracked import TrackedRequest
from cosched.engine.tree_core import KvTreeCore, can_watch
from cosched.engine.waiting import WaitingQueue
from cosched.memory.config import KvConfig
from cosched.memory.eviction import CopyOrder, Eviction, LeastRecentlyUsed, Leaves
from cosched.memory.node import KvNode, Visit
from cosched.memory.occupancy import HostOccupancy, KvOccupancy, UseCount, dealt
from cosched.memory.reuse import ReuseModel, block_hashes
from cosched.memory.value import KvValue, RecomputeCosts
from cosched.policies import EVICTION_ORDERS, RESERVATIONS
from cosched.pool.radix import Shared, pack
from cosched.pool.tenants import TenantPool

logger = logging.getLogger(__name__)

_LEARN_PERIOD_S = 1.0  # between two samples of the demand and of the turnover
_TURNOVER_SHARE = 0.1  # of the newest sample in the moving average of evicted tokens
_PLANS_PER_REFRESH = 8  # costs are learned again every 8 plans, ...
_REFRESHED_DEPTHS = 8  # ... at 8 depths of a prompt


def transfer_s_of(scheduler: Any, bandwidth_gb_s: float) -> float:
    """Time to copy the KV of a token from or to host memory [s]; inf without host memory."""
    if not scheduler.enable_hierarchical_cache:
        return math.inf
    pool = scheduler.tree_cache.cache_controller.mem_pool_host
    return float(pool.size_per_token) / (bandwidth_gb_s * 1e9)


def _make_tree_core(params: Any, components: Any) -> KvTreeCore:
    kind = HostedTreeCore if get_memory().enable_hierarchical_cache else KvTreeCore
    return kind(params, components)


_BACKEND = "cosched"
"""Name of this tree core in SGLang's registry."""

register_tree_core_backend(_BACKEND, _make_tree_core)


@contextmanager
def with_tree_core() -> Iterator[None]:
    """A scheduler that is built meanwhile gets a tree whose order of eviction can be chosen."""
    variable = envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND
    before = os.environ.get(variable.name)
    variable.set(_BACKEND)
    try:
        yield
    finally:
        variable.clear()
        if before is not None:
            variable.set(before)


class _Turnover:
    """How fast a memory is evicted: a moving average."""

    def __init__(self) -> None:
        self._num_evicted = 0
        self._per_s = 0.0

    def learn(self, num_evicted: int, elapsed_s: float) -> None:
        """num_evicted: tokens since the start; elapsed_s: since the last call, inf in the first."""
        rate = (num_evicted - self._num_evicted) / elapsed_s
        self._per_s += _TURNOVER_SHARE * (rate - self._per_s)
        self._num_evicted = num_evicted

    def seconds(self, num_tokens: int) -> float:
        """Time until that many tokens are evicted [s]; inf if none are."""
        return max(num_tokens / self._per_s, 1.0) if self._per_s > 0 else math.inf


class _Visitor(NamedTuple):
    """An online request, as the reuse of its session has it (`ReuseModel.arrived`)."""

    hashes: Sequence[int]
    turn: int


_NEW = _Visitor((), 1)


class KvManager(Feature):
    """Makes the tree of a scheduler ask it what to evict next. On a rank that does not plan it only
    follows: the first rank says what is evicted (`give`)."""

    place = "kv"

    @classmethod
    def of(cls, controller: Any) -> KvManager | None:
        config, scheduler = controller.config, controller.scheduler
        if not chooses_evictions(scheduler.server_args, config):
            return None  # `describe` says so
        if not can_watch(scheduler):
            logger.warning(
                "cosched: SGLang's order evicts KV: cosched does not know the radix tree %s",
                type(scheduler.tree_cache).__name__,
            )
            return None
        return cls(
            scheduler,
            config.named_kv(),
            waiting=controller.waiting,
            predictor=controller.predictor,
            ttft_s=config.slo.targets().ttft_s,
        )

    def __init__(
        self,
        scheduler: Any,
        config: KvConfig,
        *,
        waiting: WaitingQueue,
        predictor: Predictor,
        ttft_s: float | None,
    ) -> None:
        """ttft_s: target of online requests that name none."""
        self._scheduler = scheduler
        self._waiting = waiting
        self._predictor = predictor
        self._ttft_s = ttft_s
        self.config = config
        self.plans = port.parallel().plans
        self._visitors: dict[str, _Visitor] = {}
        """Online requests under way, by rid."""
        self.reuse = ReuseModel(half_life_s=config.half_life_s, horizon_s=config.horizon_s)
        self.costs = RecomputeCosts()
        value = KvValue(self.reuse, self.costs, late_weight=config.late_weight)
        value.transfer_s = transfer_s_of(scheduler, config.host_bandwidth_gb_s)
        assert config.eviction is not None, "resolved, and one of `EVICTION_ORDERS`"
        assert config.reservation is not None, "resolved, and one of `RESERVATIONS`"
        self.leaves = Leaves(EVICTION_ORDERS[config.eviction](value), value)
        self.copies: Leaves | None = None
        """Copies in host memory that can be given up; None: there is no host memory."""
        self._is_ranked = not port.parallel().is_alone
        if scheduler.enable_hierarchical_cache:
            order = LeastRecentlyUsed() if self._is_ranked else CopyOrder(value)
            self.copies = Leaves(order, value, slot="host_rank")
        self.core: KvTreeCore = scheduler.tree_cache.tree_core
        self.readers = KvReaders(scheduler.page_size, self._future, self.core.changed)
        if self.copies is not None:
            assert isinstance(self.core, HostedTreeCore)
            self.core.use_host(self.copies, partial(port.host_free, scheduler))
        self.core.watch(scheduler.tree_cache, self.leaves, self.readers, is_given=self._is_ranked)
        self._uses = UseCount(self.core, value)
        self.reservation = RESERVATIONS[config.reservation](
            window_s=config.window_s, deviations=config.deviations
        )
        self._gone: list[TrackedRequest] = []
        self._num_plans = 0
        self._learnt_s = -math.inf
        self._device_turnover = _Turnover()
        self._host_turnover = _Turnover()

    # --- Requests come and go ---

    def on_arrival(self, request: TrackedRequest) -> None:
        if self.plans and request.request_class is RequestClass.ONLINE:
            hashes = block_hashes(request.req.origin_input_ids)
            now_s = self._waiting.clock.now_s()
            turn = self.reuse.arrived(hashes, now_s)
            self.reservation.arrived(now_s)
            self._visitors[request.rid] = _Visitor(hashes, turn)

    def on_queued(self, request: TrackedRequest) -> None:
        if self.plans and request.request_class is RequestClass.OFFLINE:
            self._refer(request, 1)
        elif self.plans and self.may_have(request):
            self.readers.expect(request, self.core.root_node, self._key(request))

    def on_unqueued(self, request: TrackedRequest) -> None:
        if self.plans and request.request_class is RequestClass.OFFLINE:
            self._refer(request, -1)
        elif self.plans:
            self.readers.no_longer_expect(request)

    def _refer(self, request: TrackedRequest, by: int) -> None:
        """An offline request waits (1), or waits no longer (-1)."""
        if isinstance(self._waiting.offline, TenantPool) and self.may_have(request):
            self.readers.refer(self.core.root_node, self._key(request), by)

    def on_finished(self, request: TrackedRequest) -> None:
        """Its memory is released before the next plan."""
        if request.request_class is RequestClass.ONLINE:
            self._gone.append(request)

    def on_aborted(self, request: TrackedRequest) -> None:
        self._visitors.pop(request.rid, None)

    def on_preempted(self, request: TrackedRequest, mode: PreemptMode, **_: Any) -> None:
        """What it has left in the tree begins to be copied to host memory."""
        if mode is PreemptMode.CHECKPOINT and isinstance(self.core, HostedTreeCore):
            self.core.write(request.req.last_node)

    def path_of(self, tracked: TrackedRequest) -> Iterator[KvNode]:
        """What an admitted request uses of the tree, from its end upwards."""
        node = self.core.nodes.get(port.last_node(tracked.req))
        return iter(()) if node is None else node.upwards()

    def on_pool_failed(self) -> None:
        """The queue that takes its place knows of no prefixes."""
        for node in self.core.nodes.values():
            node.passing, node.stops = 0, {}

    def _future(self, ids: array[int], namespace: Hashable) -> Sequence[Shared]:
        pool = self._waiting.offline
        return pool.future_references(pack(ids), namespace) if isinstance(pool, TenantPool) else ()

    def _key(self, tracked: TrackedRequest) -> Any:
        return port.tree_key(tracked.req, in_pairs=self.core.is_eagle)

    # --- Between two plans ---

    def on_look(self, view: Any) -> None:
        """view: a `cosched.engine.view_of.SchedulerView`."""
        now_s, predictor = view.now_s, self._predictor
        for tracked in self._gone:
            self._leave(tracked, now_s)
        self._gone.clear()
        self.reuse.advance(now_s)
        if self._learnt_s == -math.inf:
            self.costs.refresh(predictor)
        self._num_plans += 1
        if not self._num_plans % _PLANS_PER_REFRESH:  # in small steps: no plan takes long
            self.costs.refresh(predictor, num_steps=_REFRESHED_DEPTHS)
        host_s = self._host_turnover.seconds(self.num_copied)
        self.reuse.refresh(
            now_s,
            discount_s=self._device_turnover.seconds(self.core.num_evictable),
            host_discount_s=None if self.copies is None else host_s,
            num_kinds=1,
        )
        if now_s - self._learnt_s >= _LEARN_PERIOD_S:
            self._learn(now_s, view.own()[RequestClass.ONLINE])
        self.leaves.advance(now_s)
        if self.copies is not None and not self._is_ranked:
            self.copies.advance(now_s)

    def use_transfer(self, transfer_s: float) -> None:
        """Set the time to copy a token from or to host memory [s]."""
        self.leaves.value.transfer_s = transfer_s

    def may_have(self, tracked: TrackedRequest) -> bool:
        """False if no KV of a waiting request is in the tree, on the device or on the host. O(1),
        and much cheaper than a lookup."""
        return self.core.has_first_page(self._key(tracked))

    def num_on_host(self, tracked: TrackedRequest, node_id: int, num_device: int) -> int:
        """Tokens of a waiting request that admission would load from host memory. They follow
        those that are on the device, which end with this node. Changes nothing."""
        if not isinstance(self.core, HostedTreeCore):
            return 0
        found = self.core.num_on_host(port.lookup_key(tracked.req), node_id, num_device)
        return found if found >= self._scheduler.tree_cache.load_back_threshold else 0

    def _leave(self, tracked: TrackedRequest, now_s: float) -> None:
        num_tokens = tracked.num_prompt_tokens + tracked.num_output_tokens
        ttft_s = tracked.slo.ttft_s or self._ttft_s
        visitor = self._visitors.pop(tracked.rid, _NEW)
        kind = self.reuse.ended(
            visitor.hashes,
            turn=visitor.turn,
            num_tokens=num_tokens,
            num_needed=round(num_tokens * self.leaves.value.lateness(num_tokens, ttft_s)),
            now_s=now_s,
        )
        visit = Visit(kind, now_s, num_tokens, ttft_s)
        self.core.left(tracked.req.last_node, visit)

    def _learn(self, now_s: float, num_own: int) -> None:
        elapsed_s = now_s - self._learnt_s
        self._device_turnover.learn(self.core.evicted["all"], elapsed_s)
        self._host_turnover.learn(self.core.evicted["host"], elapsed_s)
        self._learnt_s = now_s
        self.reservation.sample(self._online_tokens(num_own), now_s)

    def _online_tokens(self, num_own: int) -> int:
        """Held by online requests, and needed by those that are expected to continue. num_own:
        those that they hold outside the tree."""
        held = num_own + self.core.num_held_online
        if not self.reservation.counts_returning:
            return held
        expected = self.reuse.expected_tokens()
        # KV in host memory needs no place on the device until it is used again. It counts by the
        # time of loading it, relative to the time of computing it.
        on_host = min(expected, port.host_total(self._scheduler))
        expected -= on_host * (1.0 - self.leaves.value.loading_share)
        return held + round(expected)

    @property
    def num_copied(self) -> int:
        """Tokens of all copies in host memory."""
        return port.host_total(self._scheduler) - port.host_free(self._scheduler)

    def _own_tokens(self) -> Mapping[RequestClass, int]:
        """Tokens that requests under way hold outside the tree."""
        reqs = dict.fromkeys(port.under_way(self._scheduler))
        if self._scheduler.chunked_req is not None:
            reqs[self._scheduler.chunked_req] = None
        return own_tokens([req.cosched for req in reqs])

    def on_report(self, *, is_idle: bool) -> None:
        """A step of what `occupancy` says."""
        self._uses.step(self.leaves.now_s)

    def occupancy(self) -> KvOccupancy:
        """What the memory is used for now. What unused KV in a large tree is good for is as old as
        the latest count."""
        self._uses.look(self.leaves.now_s)
        own, core, scheduler = self._own_tokens(), self.core, self._scheduler
        evicted, (saved, parted) = self.core.evicted, port.savings(scheduler)
        host = None
        if isinstance(self.core, HostedTreeCore):
            free = port.host_free(scheduler)
            used, of = port.host_total(scheduler) - free, self._uses.on_host
            host = HostOccupancy(
                free=free,
                demoted=evicted["demoted"],
                **dealt(used, of, "doubled", "returning", "referenced"),
                **self.core.transferred,
            )
        return KvOccupancy(
            free=port.kv_free(scheduler),
            running_online=core.num_held_online + own[RequestClass.ONLINE],
            running_offline=core.num_held_offline + own[RequestClass.OFFLINE],
            **dealt(core.num_evictable, self._uses.on_device, "returning", "referenced"),
            kept=self.online_reservation,
            evicted_online=evicted["online"],
            evicted_offline=evicted["offline"],
            evicted_referenced=evicted["referenced"],
            evicted_returning=evicted["returning"],
            saved=saved,
            parted=parted,
            host=host,
        )

    # --- Several ranks ---

    def next_to_go(self, num_tokens: int) -> Sequence[Eviction]:
        """What an allocation of that many tokens evicts."""
        return self.leaves.next_to_go(num_tokens - port.kv_free(self._scheduler))

    def give(self, evictions: Sequence[Eviction] | None) -> None:
        """What is evicted until the next plan; None: SGLang's order is used."""
        self.core.give(evictions)

    # --- What a view asks ---

    @property
    def online_reservation(self) -> int:
        """Tokens that are reserved for online requests (`KvState.kept`)."""
        return self.reservation.tokens(port.kv_total(self._scheduler))
