"""KV memory of a scheduler: what is evicted first, what its loss costs, what online requests need.

Ties the parts of `cosched.kv` to an engine: the tree that follows SGLang's, the pool that knows who
waits, the returns that are learned from requests that come and go, the prices of the predictor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from cosched.core.estimates import Predictor
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.tracked import TrackedRequest
from cosched.engine.tree_core import WatchedTreeCore
from cosched.kv.config import KvConfig
from cosched.kv.demand import OnlineDemand
from cosched.kv.eviction import ORDERS, Leaves, Prices, Worth
from cosched.kv.occupancy import KvOccupancy, occupancy_of
from cosched.kv.returns import ReturnModel, block_hashes
from cosched.kv.tree import KvTree, Visit
from cosched.offline.pool import OfflinePool
from cosched.offline.prefix_pool import PrefixPool
from cosched.offline.radix import Shared, pack

__all__ = ["KvManager"]

_LEARN_PERIOD_S = 1.0
"""Between two samples of the demand and of the turnover."""
_STEPS_PER_PLAN = 4
"""Depths at which the price of a token is asked anew with each plan."""
_MOST_KEPT = 0.75
"""Share of what the online demand of now leaves of the memory that is kept at most for what more
it may become: offline work goes on."""
_TURNOVER_SHARE = 0.1
"""Of the newest second in the moving average of evicted tokens."""


class KvManager:
    """One per scheduler whose tree can be watched. Makes its tree ask it who is evicted next."""

    def __init__(
        self,
        scheduler: Any,
        config: KvConfig,
        *,
        pool: Callable[[], OfflinePool[TrackedRequest]],
        ttft_s: float | None,
    ) -> None:
        """pool: where offline requests wait now. ttft_s: target of online requests that name
        none."""
        self._scheduler = scheduler
        self._pool = pool
        self._ttft_s = ttft_s
        self.config = config
        self.returns = ReturnModel(half_life_s=config.half_life_s, horizon_s=config.horizon_s)
        self.prices = Prices()
        worth = Worth(self.returns, self.prices, late_weight=config.late_weight)
        self.leaves = Leaves(ORDERS[config.eviction](worth), worth)
        self.kv_tree = KvTree(
            page_size=scheduler.page_size, leaves=self.leaves, future=self._future
        )
        cache = scheduler.tree_cache
        self.core = WatchedTreeCore(cache.tree_core, self.kv_tree, self.leaves)
        self.core.watch(cache)
        self.demand = OnlineDemand(window_s=config.window_s, deviations=config.deviations)
        self._gone: list[TrackedRequest] = []
        self._learnt_s = -math.inf
        self._evicted_before = 0
        self._evicted_per_s = 0.0

    # --- Requests come and go ---

    def arrived(self, tracked: TrackedRequest, now_s: float) -> None:
        """A new request waits."""
        if tracked.request_class is RequestClass.ONLINE:
            tracked.kv_hashes = block_hashes(tracked.req.origin_input_ids)
            tracked.kv_turn = self.returns.arrived(tracked.kv_hashes, now_s)

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
        # A little with each plan: all at once would be felt.
        self.prices.refresh(predictor, num_steps=_STEPS_PER_PLAN)
        self.returns.refresh(now_s, discount_s=self.turnover_s, num_kinds=1)
        if now_s - self._learnt_s >= _LEARN_PERIOD_S:
            self._learn(now_s)
        self.leaves.advance(now_s)

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
        self._evicted_before = self.core.evicted["all"]
        self._learnt_s = now_s
        self.demand.sample(self._online_tokens(), now_s)

    @property
    def turnover_s(self) -> float:
        """How long it takes until as much is evicted as can be [s]; inf: nothing is."""
        if self._evicted_per_s <= 0:
            return math.inf
        return max(self.kv_tree.num_evictable / self._evicted_per_s, 1.0)

    def _online_tokens(self) -> int:
        """Held by online requests, and expected to be used again."""
        expected = round(self.returns.expected_tokens())
        return self._own_tokens()[0] + self.kv_tree.num_held_online + expected

    def _own_tokens(self) -> tuple[int, int]:
        """What requests under way hold outside the tree: online, offline."""
        own = dict.fromkeys(RequestClass, 0)
        for req in port.under_way(self._scheduler):
            tracked = TrackedRequest.of(req)
            if tracked is not None:
                own[tracked.request_class] += port.num_own(req)
        return own[RequestClass.ONLINE], own[RequestClass.OFFLINE]

    def occupancy(self) -> KvOccupancy:
        """Who has the memory now. O(nodes)."""
        return occupancy_of(
            self.kv_tree,
            self.leaves.worth,
            now_s=self.leaves.now_s,
            free=port.kv_free(self._scheduler),
            own=self._own_tokens(),
            kept=self.kept,
            evicted=self.core.evicted,
            is_watched=not self.core.is_off,
        )

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
        now = self.demand.now
        left = max(port.kv_total(self._scheduler) - now, 0)
        return min(self.demand.reserve, now + int(_MOST_KEPT * left))
