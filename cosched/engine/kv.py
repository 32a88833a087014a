"""KV memory of a scheduler: what is evicted first, what its loss costs, what online requests need.

Ties the parts of `cosched.memory` to an engine: the tree that follows SGLang's, the pool that knows
the waiting requests, the reuse that is learned from requests, the costs of the predictor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cosched.core.estimates import Predictor
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.host_core import HostedTreeCore
from cosched.engine.port import bidirectional
from cosched.engine.ranked_core import RankedTreeCore
from cosched.engine.running import own_tokens
from cosched.engine.tracked import TrackedRequest
from cosched.engine.tree_core import WatchedTreeCore
from cosched.memory.config import KvConfig
from cosched.memory.demand import OnlineDemand
from cosched.memory.eviction import ORDERS, CopyOrder, Eviction, Leaves, Prices, Worth
from cosched.memory.occupancy import (
    HostOccupancy,
    KvOccupancy,
    host_occupancy_of,
    occupancy_of,
)
from cosched.memory.returns import ReturnModel, block_hashes
from cosched.memory.tree import KvTree, Visit
from cosched.pool.pool import OfflinePool
from cosched.pool.prefix_pool import PrefixPool
from cosched.pool.radix import Shared, pack

_LEARN_PERIOD_S = 1.0
"""Between two samples of the demand and of the turnover."""
_PRICED_AT_ONCE = 8
"""Depths at which the price of a token is asked anew with each `_PLANS_PER_PRICE`th plan."""
_PLANS_PER_PRICE = 8
_MOST_KEPT = 0.75
"""Share of what the online demand of now leaves of the memory that is kept at most for what more
it may become: offline work goes on."""
_TURNOVER_SHARE = 0.1
"""Of the newest second in the moving average of evicted tokens."""
_CHUNKS_AHEAD = 2
"""So many iterations' tokens are copied to host memory before their place is needed."""
_MOST_RESTORING = 4
"""Waiting online requests that are looked at for what they have in host memory."""
_LEAST_WAIT_S = 0.01
"""What takes less to load is loaded in the iteration that needs it."""
_MOST_WAITED = 20
"""Plans for which a request waits until what goes for it is copied."""
_LEFT_SHARE = 0.05
"""Of the device's memory, that loading ahead leaves to what runs."""
_MOST_AHEAD = 0.25
"""Of the device's memory, that is copied ahead at most."""


def transfer_s_of(scheduler: Any, bandwidth_gb_s: float) -> float:
    """What a token of KV takes from host memory or to it [s]; inf: there is none."""
    if not scheduler.enable_hierarchical_cache:
        return math.inf
    pool = scheduler.tree_cache.cache_controller.mem_pool_host
    return float(pool.size_per_token) / (bandwidth_gb_s * 1e9)


class _Loading(NamedTuple):
    """What a waiting request has in host memory is being loaded; it ends with this node."""

    node_id: int


class _MakingWay(NamedTuple):
    """What goes for it is being copied, for so many plans."""

    num_plans: int


class KvManager:
    """One per scheduler whose tree can be watched. Makes its tree ask it who is evicted next."""

    def __init__(
        self,
        scheduler: Any,
        config: KvConfig,
        *,
        pool: Callable[[], OfflinePool[TrackedRequest]],
        online: Iterable[TrackedRequest],
        ttft_s: float | None,
    ) -> None:
        """pool: where offline requests wait now; online: online requests that wait, oldest first.
        ttft_s: target of online requests that name none."""
        self._scheduler = scheduler
        self._pool = pool
        self._online = online
        self._ttft_s = ttft_s
        self.config = config
        self.returns = ReturnModel(half_life_s=config.half_life_s, horizon_s=config.horizon_s)
        self.prices = Prices()
        worth = Worth(self.returns, self.prices, late_weight=config.late_weight)
        worth.transfer_s = transfer_s_of(scheduler, config.host_bandwidth_gb_s)
        assert config.eviction is not None, "resolved, and one of `ORDERS`"
        self.leaves = Leaves(ORDERS[config.eviction](worth), worth)
        self.copies: Leaves | None = None
        """What is in host memory and can be given up; None: there is no host memory."""
        if scheduler.enable_hierarchical_cache:
            self.copies = Leaves(CopyOrder(worth), worth, slot="host_rank")
        self.kv_tree = KvTree(
            page_size=scheduler.page_size,
            leaves=self.leaves,
            copies=self.copies,
            future=self._future,
        )
        cache = scheduler.tree_cache
        self.core = self._core_of(cache)
        self.core.watch(cache)
        self._num_ahead = min(
            _CHUNKS_AHEAD * (scheduler.chunked_prefill_size or scheduler.max_prefill_tokens),
            int(_MOST_AHEAD * port.kv_total(scheduler)),
        )
        self.demand = OnlineDemand(window_s=config.window_s, deviations=config.deviations)
        self._used_before = 0
        """Tokens that were evicted since the start, less those free, when it was last looked at
        what goes next."""
        self._gone: list[TrackedRequest] = []
        self._with_nothing: set[TrackedRequest] = set()
        """Waiting requests that were seen to have next to nothing in host memory."""
        self._restoring: dict[TrackedRequest, _Loading | _MakingWay] = {}
        """Waiting requests whose KV is on its way from host memory."""
        self._num_plans = 0
        self._learnt_s = -math.inf
        self._evicted_before = 0
        self._evicted_per_s = 0.0
        self._given_up_before = 0
        self._given_up_per_s = 0.0

    def _core_of(self, cache: Any) -> WatchedTreeCore:
        watched = cache.tree_core, self.kv_tree, self.leaves
        if self.copies is not None:
            return HostedTreeCore(*watched, self.copies, partial(port.host_free, self._scheduler))
        if port.parallel().tp_size > 1:
            return RankedTreeCore(*watched)
        return WatchedTreeCore(*watched)

    # --- Requests come and go ---

    def arrived(self, tracked: TrackedRequest, now_s: float) -> None:
        """A new request waits."""
        if tracked.request_class is RequestClass.ONLINE:
            tracked.kv_hashes = block_hashes(tracked.req.origin_input_ids)
            tracked.kv_turn = self.returns.arrived(tracked.kv_hashes, now_s)

    def online_waits(self, tracked: TrackedRequest) -> None:
        """An online request waits now: it is new, or was preempted."""
        ids = port.token_ids(tracked.req)
        if self.kv_tree.knows(tracked.prefix_key, pack(ids[: self._scheduler.page_size])):
            self.kv_tree.expect(tracked, tracked.prefix_key, pack(ids))

    def online_waits_no_more(self, tracked: TrackedRequest) -> None:
        """It is admitted, or gone."""
        self.kv_tree.no_longer_expect(tracked)

    def waits(self, tracked: TrackedRequest, *, by: int) -> None:
        """An offline request waits now (1), or does no more (-1)."""
        if not isinstance(self._pool(), PrefixPool):
            return
        ids = port.token_ids(tracked.req)
        if self.kv_tree.knows(tracked.prefix_key, pack(ids[: self._scheduler.page_size])):
            self.kv_tree.refer(tracked.prefix_key, pack(ids), by)

    def ended(self, tracked: TrackedRequest) -> None:
        """A request is over; its memory is given back before the next plan."""
        if tracked.request_class is RequestClass.ONLINE:
            self._gone.append(tracked)

    def forget_waiting(self) -> None:
        """The pool does not say any more who waits."""
        for node in self.kv_tree.nodes.values():
            node.passing, node.stops = 0, {}

    def _future(self, packed: bytes, namespace: Hashable) -> Sequence[Shared]:
        pool = self._pool()
        return pool.future_references(packed, namespace) if isinstance(pool, PrefixPool) else ()

    # --- Between two plans ---

    def advance(self, now_s: float, predictor: Predictor) -> None:
        """Take in what has happened, before a plan is made."""
        for tracked in self._gone:
            self._leave(tracked, now_s)
        self._gone.clear()
        self.returns.advance(now_s)
        if self._learnt_s == -math.inf:
            self.prices.refresh(predictor)
        # A little at a time: all at once would be felt.
        self._num_plans += 1
        if not self._num_plans % _PLANS_PER_PRICE:
            self.prices.refresh(predictor, num_steps=_PRICED_AT_ONCE)
        self.returns.refresh(
            now_s,
            discount_s=self.turnover_s,
            host_discount_s=None if self.copies is None else self.host_turnover_s,
            num_kinds=1,
        )
        if now_s - self._learnt_s >= _LEARN_PERIOD_S:
            self._learn(now_s)
        self.leaves.advance(now_s)
        if self.copies is not None:
            self.copies.advance(now_s)
            self._restore_ahead()
            self._write_ahead()

    def use_transfer(self, transfer_s: float) -> None:
        """A token takes so long from host memory or to it [s]."""
        self.leaves.worth.transfer_s = transfer_s

    def is_restoring(self, tracked: TrackedRequest) -> bool:
        """Its KV is on its way from host memory: it is admitted when that is there."""
        return tracked in self._restoring

    def _restore_ahead(self) -> None:
        """Begin to load what the oldest online requests have in host memory, where an iteration
        would wait for it."""
        core = self.core
        assert isinstance(core, HostedTreeCore)
        before, self._restoring = self._restoring, {}
        for tracked, state in before.items():
            if isinstance(state, _Loading) and core.is_restoring(state.node_id):
                self._restoring[tracked] = state
        if not self.kv_tree.num_on_host or core.is_off:
            return
        oldest = list(itertools.islice(self._online, _MOST_RESTORING))
        self._with_nothing.intersection_update(oldest)
        for tracked in oldest:
            if tracked not in self._restoring and tracked not in self._with_nothing:
                step = self._restore(tracked, before.get(tracked))
                if step is not None:
                    self._restoring[tracked] = step

    def _restore(
        self, tracked: TrackedRequest, before: _Loading | _MakingWay | None
    ) -> _Loading | _MakingWay | None:
        """One step; None: there is nothing to wait for."""
        core, scheduler = self.core, self._scheduler
        assert isinstance(core, HostedTreeCore)
        found = port.peek(scheduler.tree_cache, tracked.req)
        num_host = self.num_on_host(tracked, found.node, found.num_tokens)
        if num_host * self.leaves.worth.transfer_s < _LEAST_WAIT_S:
            self._with_nothing.add(tracked)
            return None
        need = num_host + len(port.token_ids(tracked.req)) - found.num_tokens
        free = port.kv_free(scheduler)
        room = free + self.kv_tree.num_evictable + core.num_writing
        if need > room - _LEFT_SHARE * port.kv_total(scheduler):
            return None
        num_plans = before.num_plans + 1 if isinstance(before, _MakingWay) else 0
        if num_plans < _MOST_WAITED and not core.make_way(num_host - free):
            return _MakingWay(num_plans)
        node_id = core.restore(tracked.req)
        return None if node_id is None else _Loading(node_id)

    def _write_ahead(self) -> None:
        core = self.core
        assert isinstance(core, HostedTreeCore)
        free = port.kv_free(self._scheduler)
        missing = self._num_ahead - free
        # Looked at again when an eighth of what was looked at is used up.
        used = self.core.evicted["all"] - free
        if missing > 0 and abs(used - self._used_before) >= self._num_ahead // 8:
            self._used_before = used
            core.write_ahead(missing - core.num_writing)

    def checkpoint(self, tracked: TrackedRequest) -> None:
        """A request has given back its memory, and comes again: begin to copy to host memory what
        it has left in the tree."""
        if isinstance(self.core, HostedTreeCore):
            self.core.write(tracked.req.last_node)

    def may_have(self, tracked: TrackedRequest) -> bool:
        """False: nothing in the tree, on the device or on the host, begins like a waiting request.
        O(1), and a fraction of what looking it up takes."""
        page = port.token_ids(tracked.req)[: self._scheduler.page_size]
        return self.core.is_off or self.kv_tree.knows(tracked.prefix_key, pack(page))

    def num_on_host(self, tracked: TrackedRequest, node_id: int, num_device: int) -> int:
        """Tokens of a waiting request that admission loads from host memory, behind those that are
        found on the device, which end with this node. Changes nothing."""
        if self.copies is None or self.core.is_off:
            return 0
        found = self.kv_tree.num_host_behind(
            tracked.prefix_key,
            node_id,
            num_device,
            lambda: pack(port.lookup_key(tracked.req).raw_token_ids()),
        )
        return found if found >= self._scheduler.tree_cache.load_back_threshold else 0

    def _leave(self, tracked: TrackedRequest, now_s: float) -> None:
        num_tokens = tracked.num_prompt_tokens + tracked.num_output_tokens
        kind = self.returns.ended(
            tracked.kv_hashes, turn=tracked.kv_turn, num_tokens=num_tokens, now_s=now_s
        )
        tracked.kv_hashes = ()
        visit = Visit(kind, now_s, num_tokens, tracked.slo.ttft_s or self._ttft_s)
        self.kv_tree.left(tracked.req.last_node, visit)

    def _learn(self, now_s: float) -> None:
        if self._learnt_s > -math.inf:
            rate = (self.core.evicted["all"] - self._evicted_before) / (now_s - self._learnt_s)
            self._evicted_per_s += _TURNOVER_SHARE * (rate - self._evicted_per_s)
            given_up = self.core.evicted["host"] - self._given_up_before
            rate = given_up / (now_s - self._learnt_s)
            self._given_up_per_s += _TURNOVER_SHARE * (rate - self._given_up_per_s)
        self._evicted_before = self.core.evicted["all"]
        self._given_up_before = self.core.evicted["host"]
        self._learnt_s = now_s
        self.demand.sample(self._online_tokens(), now_s)

    @property
    def turnover_s(self) -> float:
        """How long it takes until as much is evicted as can be [s]; inf: nothing is."""
        if self._evicted_per_s <= 0:
            return math.inf
        return max(self.kv_tree.num_evictable / self._evicted_per_s, 1.0)

    @property
    def host_turnover_s(self) -> float:
        """The same of host memory: until as much is given up there as it holds [s]."""
        if self._given_up_per_s <= 0:
            return math.inf
        return max(self.kv_tree.num_on_host / self._given_up_per_s, 1.0)

    def _online_tokens(self) -> int:
        """Held by online requests, and expected to be used again."""
        held = self._own_tokens()[RequestClass.ONLINE] + self.kv_tree.num_held_online
        if self.config.reservation == "echo":
            return held
        expected = self.returns.expected_tokens()
        # What waits in host memory needs a place when it comes back, but not until then: of it only
        # as much counts as loading takes of the time that computing it anew would.
        on_host = 0 if self.core.is_off else min(expected, port.host_total(self._scheduler))
        loading = self.leaves.worth.loading_share
        expected -= on_host * (1.0 - loading)
        return held + round(expected)

    def _own_tokens(self) -> Mapping[RequestClass, int]:
        """What requests under way hold outside the tree."""
        unfinished = self._scheduler.chunked_req
        reqs = dict.fromkeys(port.under_way(self._scheduler))
        if unfinished is not None:
            reqs[unfinished] = None
        return own_tokens([req.cosched for req in reqs])

    def occupancy(self) -> KvOccupancy:
        """Who has the memory now. O(nodes)."""
        own = self._own_tokens()
        return occupancy_of(
            self.kv_tree,
            self.leaves.worth,
            now_s=self.leaves.now_s,
            free=port.kv_free(self._scheduler),
            own=(own[RequestClass.ONLINE], own[RequestClass.OFFLINE]),
            kept=self.kept,
            evicted=self.core.evicted,
            shared_pages=bidirectional.savings(self._scheduler),
            is_watched=not self.core.is_off,
            host=self._host_occupancy(),
        )

    def _host_occupancy(self) -> HostOccupancy | None:
        if not isinstance(self.core, HostedTreeCore):
            return None
        return host_occupancy_of(
            self.kv_tree,
            self.leaves.worth,
            now_s=self.leaves.now_s,
            free=port.host_free(self._scheduler),
            demoted=self.core.evicted["demoted"],
            transferred=self.core.transferred,
        )

    # --- Several ranks ---

    def next_to_go(self, num_tokens: int) -> Sequence[Eviction]:
        """What goes where so many tokens are allocated."""
        return self.leaves.next_to_go(num_tokens - port.kv_free(self._scheduler))

    def give(self, evictions: Sequence[Eviction] | None) -> None:
        """What goes until the next plan; None: the engine's order holds."""
        assert isinstance(self.core, RankedTreeCore), f"{type(self.core)=}"
        self.core.give(evictions)

    # --- What a view asks ---

    def loss_s(self, num_tokens: int) -> float:
        """What evicting so many tokens costs [s]."""
        if num_tokens <= 0 or not self.config.admission:
            return 0.0
        return self.leaves.loss_s(num_tokens)

    @property
    def kept(self) -> int:
        """Tokens that offline requests leave to online ones (`KvState.kept`)."""
        if not self.config.reserve:
            return 0
        if self.config.reservation == "echo":
            return self.demand.threshold
        now = self.demand.now
        left = max(port.kv_total(self._scheduler) - now, 0)
        return min(self.demand.reserve, now + int(_MOST_KEPT * left))
