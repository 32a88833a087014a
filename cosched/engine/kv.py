"""KV memory of a scheduler: eviction order, cost of evictions, online reservation, host memory.

`KvManager` connects `cosched.memory` to an engine: SGLang's radix tree, the pool of waiting
requests, the reuse learned from past requests, and the costs of the predictor.
"""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.runtime_context import get_memory

from cosched.core.estimates import Predictor
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.host_core import HostedTreeCore
from cosched.engine.kv_readers import KvReaders
from cosched.engine.running import own_tokens
from cosched.engine.tracked import TrackedRequest
from cosched.engine.tree_core import KvTreeCore
from cosched.memory.config import KvConfig
from cosched.memory.demand import OnlineDemand
from cosched.memory.eviction import CopyOrder, Eviction, LeastRecentlyUsed, Leaves
from cosched.memory.node import KvNode, Visit
from cosched.memory.occupancy import HostOccupancy, KvOccupancy, UseCount, dealt
from cosched.memory.reuse import ReuseModel, block_hashes
from cosched.memory.value import KvValue, RecomputeCosts
from cosched.policies import EVICTION_ORDERS, RESERVATIONS
from cosched.pool.pool import OfflinePool
from cosched.pool.radix import Shared, pack
from cosched.pool.tenants import TenantPool

_LEARN_PERIOD_S = 1.0  # between two samples of the demand and of the turnover
_TURNOVER_SHARE = 0.1  # of the newest sample in the moving average of evicted tokens
_PLANS_PER_REFRESH = 8  # costs are learned again every 8 plans, ...
_REFRESHED_DEPTHS = 8  # ... at 8 depths of a prompt
_CHUNKS_AHEAD = 2  # iterations whose tokens are copied to host memory before their place is needed
_MAX_AHEAD = 0.25  # of the device's memory that is copied ahead
_MAX_RESTORING = 4  # waiting online requests whose KV in host memory is looked up
_MIN_LOAD_S = 0.01  # a shorter load is done by the iteration that needs it
_MAX_WAIT = 20  # plans for which a request waits for the copies of what it replaces
_MIN_LEFT = 0.05  # of the device's memory that loading ahead leaves to running requests


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


class _Loading(NamedTuple):
    """KV of a waiting request is being loaded from host memory, up to this node."""

    node_id: int


class _MakingRoom(NamedTuple):
    """KV that the load replaces is being copied to host memory, for this number of plans."""

    num_plans: int


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


class KvManager:
    """One per scheduler whose tree can be watched. Makes the tree ask it what to evict next."""

    def __init__(
        self,
        scheduler: Any,
        config: KvConfig,
        *,
        pool: Callable[[], OfflinePool[TrackedRequest]],
        online: Iterable[TrackedRequest],
        ttft_s: float | None,
    ) -> None:
        """pool: the present pool of offline requests; online: waiting online requests, oldest
        first; ttft_s: target of online requests that name none."""
        self._scheduler = scheduler
        self._pool = pool
        self._online = online
        self._ttft_s = ttft_s
        self.config = config
        self.reuse = ReuseModel(half_life_s=config.half_life_s, horizon_s=config.horizon_s)
        self.costs = RecomputeCosts()
        value = KvValue(self.reuse, self.costs, late_weight=config.late_weight)
        value.transfer_s = transfer_s_of(scheduler, config.host_bandwidth_gb_s)
        assert config.eviction is not None, "resolved, and one of `EVICTION_ORDERS`"
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
        self._num_ahead = min(
            _CHUNKS_AHEAD * (scheduler.chunked_prefill_size or scheduler.max_prefill_tokens),
            int(_MAX_AHEAD * port.kv_total(scheduler)),
        )
        self._uses = UseCount(self.core, value)
        self.demand = OnlineDemand(window_s=config.window_s, deviations=config.deviations)
        self._used_before = 0
        """Tokens evicted since the start, less the free ones, at the latest `_write_ahead`."""
        self._gone: list[TrackedRequest] = []
        self._not_on_host: set[TrackedRequest] = set()
        """Waiting requests that have nothing in host memory that is worth loading ahead."""
        self._restoring: dict[TrackedRequest, _Loading | _MakingRoom] = {}
        """Waiting requests whose KV is on its way from host memory."""
        self._num_plans = 0
        self._learnt_s = -math.inf
        self._device_turnover = _Turnover()
        self._host_turnover = _Turnover()

    # --- Requests come and go ---

    def arrived(self, tracked: TrackedRequest, now_s: float) -> None:
        """A new request waits."""
        if tracked.request_class is RequestClass.ONLINE:
            tracked.kv_hashes = block_hashes(tracked.req.origin_input_ids)
            tracked.kv_turn = self.reuse.arrived(tracked.kv_hashes, now_s)

    def online_waits(self, tracked: TrackedRequest) -> None:
        """An online request waits: it is new, or was preempted."""
        if self.may_have(tracked):
            self.readers.expect(tracked, self.core.root_node, self._key(tracked))

    def online_waits_no_more(self, tracked: TrackedRequest) -> None:
        """It is admitted, or has ended."""
        self.readers.no_longer_expect(tracked)

    def waits(self, tracked: TrackedRequest, *, by: int) -> None:
        """An offline request waits (1), or waits no longer (-1)."""
        if isinstance(self._pool(), TenantPool) and self.may_have(tracked):
            self.readers.refer(self.core.root_node, self._key(tracked), by)

    def ended(self, tracked: TrackedRequest) -> None:
        """A request has ended; its memory is released before the next plan."""
        if tracked.request_class is RequestClass.ONLINE:
            self._gone.append(tracked)

    def path_of(self, tracked: TrackedRequest) -> Iterator[KvNode]:
        """What an admitted request uses of the tree, from its end upwards."""
        node = self.core.nodes.get(port.last_node(tracked.req))
        return iter(()) if node is None else node.upwards()

    def forget_waiting(self) -> None:
        """The pool no longer reports which requests wait."""
        for node in self.core.nodes.values():
            node.passing, node.stops = 0, {}

    def _future(self, ids: array[int], namespace: Hashable) -> Sequence[Shared]:
        pool = self._pool()
        return pool.future_references(pack(ids), namespace) if isinstance(pool, TenantPool) else ()

    def _key(self, tracked: TrackedRequest) -> Any:
        return port.tree_key(tracked.req, in_pairs=self.core.is_eagle)

    # --- Between two plans ---

    def advance(
        self, now_s: float, predictor: Predictor, *, own: Callable[[], Mapping[RequestClass, int]]
    ) -> None:
        """Update everything before a plan is made. own: KV tokens that requests under way hold
        outside the tree."""
        for tracked in self._gone:
            self._leave(tracked, now_s)
        self._gone.clear()
        self.reuse.advance(now_s)
        if self._learnt_s == -math.inf:
            self.costs.refresh(predictor)
        self._num_plans += 1
        if not self._num_plans % _PLANS_PER_REFRESH:  # in small steps: no plan takes long
            self.costs.refresh(predictor, num_steps=_REFRESHED_DEPTHS)
        host_s = self._host_turnover.seconds(self._num_on_host)
        self.reuse.refresh(
            now_s,
            discount_s=self._device_turnover.seconds(self.core.num_evictable),
            host_discount_s=None if self.copies is None else host_s,
            num_kinds=1,
        )
        if now_s - self._learnt_s >= _LEARN_PERIOD_S:
            self._learn(now_s, own()[RequestClass.ONLINE])
        self.leaves.advance(now_s)
        if self.copies is not None and not self._is_ranked:
            assert isinstance(self.core, HostedTreeCore)
            self.copies.advance(now_s)
            self._restore_ahead(self.core)
            self._write_ahead(self.core)

    def use_transfer(self, transfer_s: float) -> None:
        """Set the time to copy a token from or to host memory [s]."""
        self.leaves.value.transfer_s = transfer_s

    def is_restoring(self, tracked: TrackedRequest) -> bool:
        """Whether its KV is on its way from host memory. It is admitted after that."""
        return tracked in self._restoring

    def _restore_ahead(self, core: HostedTreeCore) -> None:
        """Begin to load what the oldest online requests have in host memory, if an iteration would
        wait for it."""
        before, self._restoring = self._restoring, {}
        for tracked, state in before.items():
            if isinstance(state, _Loading) and core.is_restoring(state.node_id):
                self._restoring[tracked] = state
        if not self._num_on_host:
            return
        oldest = list(itertools.islice(self._online, _MAX_RESTORING))
        self._not_on_host.intersection_update(oldest)
        for tracked in oldest:
            if tracked not in self._restoring and tracked not in self._not_on_host:
                step = self._restore(core, tracked, before.get(tracked))
                if step is not None:
                    self._restoring[tracked] = step

    def _restore(
        self, core: HostedTreeCore, tracked: TrackedRequest, before: _Loading | _MakingRoom | None
    ) -> _Loading | _MakingRoom | None:
        """One step of a load; None: there is nothing to wait for."""
        scheduler = self._scheduler
        found = port.peek(scheduler.tree_cache, tracked.req)
        num_host = self.num_on_host(tracked, found.node, found.num_tokens)
        if num_host * self.leaves.value.transfer_s < _MIN_LOAD_S:
            self._not_on_host.add(tracked)
            return None
        need = num_host + len(port.token_ids(tracked.req)) - found.num_tokens
        free = port.kv_free(scheduler)
        headroom = free + self.core.num_evictable + core.num_writing
        if need > headroom - _MIN_LEFT * port.kv_total(scheduler):
            return None
        num_plans = before.num_plans + 1 if isinstance(before, _MakingRoom) else 0
        if num_plans < _MAX_WAIT and not core.make_room(num_host - free):
            return _MakingRoom(num_plans)
        node_id = core.restore(tracked.req)
        return None if node_id is None else _Loading(node_id)

    def _write_ahead(self, core: HostedTreeCore) -> None:
        """Copy what is evicted next, each time that an eighth of what was copied is used up."""
        free = port.kv_free(self._scheduler)
        missing = self._num_ahead - free
        used = core.evicted["all"] - free
        if missing > 0 and abs(used - self._used_before) >= self._num_ahead // 8:
            self._used_before = used
            core.write_ahead(missing - core.num_writing)

    def checkpoint(self, tracked: TrackedRequest) -> None:
        """A preempted request has released its memory: begin to copy to host memory what it has
        left in the tree."""
        if isinstance(self.core, HostedTreeCore):
            self.core.write(tracked.req.last_node)

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
        kind = self.reuse.ended(
            tracked.kv_hashes,
            turn=tracked.kv_turn,
            num_tokens=num_tokens,
            num_needed=round(num_tokens * self.leaves.value.lateness(num_tokens, ttft_s)),
            now_s=now_s,
        )
        tracked.kv_hashes = ()
        visit = Visit(kind, now_s, num_tokens, ttft_s)
        self.core.left(tracked.req.last_node, visit)

    def _learn(self, now_s: float, num_own: int) -> None:
        elapsed_s = now_s - self._learnt_s
        self._device_turnover.learn(self.core.evicted["all"], elapsed_s)
        self._host_turnover.learn(self.core.evicted["host"], elapsed_s)
        self._learnt_s = now_s
        self.demand.sample(self._online_tokens(num_own), now_s)

    def _online_tokens(self, num_own: int) -> int:
        """Held by online requests, and needed by those that are expected to continue. num_own:
        those that they hold outside the tree."""
        held = num_own + self.core.num_held_online
        if not RESERVATIONS[self.config.reservation].counts_returning:
            return held
        expected = self.reuse.expected_tokens()
        # KV in host memory needs no place on the device until it is used again. It counts by the
        # time of loading it, relative to the time of computing it.
        on_host = min(expected, port.host_total(self._scheduler))
        expected -= on_host * (1.0 - self.leaves.value.loading_share)
        return held + round(expected)

    @property
    def _num_on_host(self) -> int:
        """Tokens of all copies in host memory."""
        return port.host_total(self._scheduler) - port.host_free(self._scheduler)

    def _own_tokens(self) -> Mapping[RequestClass, int]:
        """Tokens that requests under way hold outside the tree."""
        reqs = dict.fromkeys(port.under_way(self._scheduler))
        if self._scheduler.chunked_req is not None:
            reqs[self._scheduler.chunked_req] = None
        return own_tokens([req.cosched for req in reqs])

    def count_uses(self) -> None:
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
        if not self.config.reserve:
            return 0
        reservation = RESERVATIONS[self.config.reservation]
        return reservation.tokens(self.demand, port.kv_total(self._scheduler))
