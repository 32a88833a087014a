"""The offline pool in prefix order: HyGen's tree and freshness, Echo's buckets.

What is next, in this order:

1. *Urgent* requests: those for whose deadline the work that is due by then leaves no more than
   `PoolConfig.deadline_margin_s`, earliest first. While the head of the depth-first order is one of
   them and not much later than the earliest, it goes before it: a job whose requests are all urgent
   is still served in prefix order.
2. *Due* requests: the oldest, when `UtilityMix` says that they are due. While the head of the
   depth-first order has much in common with the last admission that a due one has not, the due one
   is put off, but not for long: else a prefix in use would be left, and computed again later.
3. The depth-first order of the bucket that is next in rotation, then that of the other buckets.

The depth-first order continues where the last admission was made: after an admission out of order,
those that share most with it lead the order from then on. So a stale or an urgent request
brings its siblings with it while their common prefix is cached, and a subtree once begun is
finished before another, except where one of these cuts in. What the cache holds from online
requests or earlier jobs comes right behind the prefix in use, before it is evicted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
from sortedcontainers import SortedKeyList

from cosched.core.request import Request, num_tokens_of
from cosched.errors import ConfigError
from cosched.pool.buckets import LengthBuckets
from cosched.pool.freshness import DueRequests, ServedRate, UtilityMix, due_time_s
from cosched.pool.order import PoolOrder
from cosched.pool.pool import PrefixRequest
from cosched.pool.radix import Node, Place, RadixTree, Shared

P = TypeVar("P", bound=PrefixRequest)

_LOOK_S = 1.0
"""Time between two computations of which requests are urgent [s]."""

_DEADLINE_TOLERANCE = 0.1
"""Deadlines this part of the margin apart count as one: prefix order decides between them."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the pool orders what waits.

    utility_ratio      share of picks in prefix order, 0 to 1; the others go to the oldest request
                       (HyGen §4.3). 1: requests that share nothing may starve. 0: first come, first
                       served
    least_shared       tokens in common with what is cached or in use that bring a prefix to the
                       front [tokens]
    num_buckets        length buckets, learned (Echo §6); absent: as many as the policy's own pool
                       has. 1: HyGen's tree
    bucket_boundaries  prompt lengths [tokens] at which buckets begin, instead of learned ones
    tenant_lag_s       device time by which a tenant may be ahead of the others [s]; off: tenants
                       are not told apart
    deadline_margin_s  a request is urgent if less time than this is expected to remain until its
                       deadline [s]
    """

    utility_ratio: float = 0.99
    least_shared: int = 64
    num_buckets: int | None = None
    bucket_boundaries: tuple[int, ...] | None = None
    tenant_lag_s: float | Literal["off"] = 1.0
    deadline_margin_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.utility_ratio <= 1:
            raise ConfigError(f"utility_ratio {self.utility_ratio} is not between 0 and 1")
        for name, least in (("least_shared", 1), ("num_buckets", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} {value} is below {least}")
        if self.tenant_lag_s != "off" and not 0 <= self.tenant_lag_s < math.inf:
            raise ConfigError(f"tenant_lag_s {self.tenant_lag_s} is not 0 or more seconds")
        if self.deadline_margin_s < 0:
            raise ConfigError(f"deadline_margin_s {self.deadline_margin_s} is negative")
        rising = self.bucket_boundaries or ()
        if any(low >= high for low, high in zip((0, *rising), rising, strict=False)):
            raise ConfigError(f"bucket_boundaries {rising} are not positive and rising")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """One length bucket.

    min_prompt_tokens  shortest prompt it takes [tokens]
    num_tokens         prompts and output of its requests [tokens]
    sharing_ratio      part of these that another request of the bucket computes for them, 0 to 1:
                       the hit rate of serving them depth first from an empty cache
    """

    min_prompt_tokens: int
    num_requests: int
    num_tokens: int
    sharing_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """What waits, for ``/get_server_info`` and metrics.

    oldest_age_s        how long ago the oldest arrived [s]; None: nothing waits
    sharing_ratio       as in `BucketStats`, over all buckets
    expected_hit_ratio  hit rate of serving everything in the pool's order when only what goes in
                        prefix order finds its prefix cached
    """

    num_requests: int
    num_tokens: int
    oldest_age_s: float | None
    sharing_ratio: float
    expected_hit_ratio: float
    buckets: tuple[BucketStats, ...]


class PrefixPool(Generic[P]):
    """Implements `cosched.pool.pool.OfflinePool`. See the module's docstring for the order.

    `add`, `remove` and `abort` are O(depth + log n + tokens compared), `get` is O(1). Iterating
    costs O(1) per request, changes nothing, and is a forecast: were each request admitted as it is
    yielded, the next would follow, except that admissions out of order lead the depth-first order
    only once they are made, and a due request that goes in prefix order counts only then. Taking
    some and leaving others is fine: only `remove` counts as a pick.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        num_cached: Callable[[P], int] | None = None,
        num_left: Callable[[P], int] | None = None,
    ) -> None:
        """num_cached: tokens of a new request that are in the cache now, asked once per prefix that
        two requests share; None: the cache is unknown. num_left: tokens that a request with a
        deadline is expected to generate still; None: all that it may."""
        self.config = config
        self._num_cached = num_cached
        self._num_left = num_left or _most_left
        self._rate = ServedRate()
        self.urgent_until_s = config.deadline_margin_s
        self._looked_s = -math.inf
        self.now_s = 0.0
        self.places: dict[str, Place[P]] = {}
        self.by_age: SortedKeyList[Place[P], int] = SortedKeyList(key=_arrival_seq)
        self.deadlines: DueRequests[P] = DueRequests()
        self.mix = UtilityMix(config.utility_ratio)
        self._last: tuple[P, bytes] | None = None  # the last admission and its token ids
        self.buckets: LengthBuckets[P] = LengthBuckets(
            boundaries=config.bucket_boundaries, num_buckets=config.num_buckets or 1
        )
        self._newest_seq = -1

    def advance(self, now_s: float) -> None:
        """Deadlines become urgent by it. Once in `_LOOK_S` O(stretches of time in which any are
        due)."""
        self.now_s = now_s
        self._rate.advance(now_s, waits=bool(self.places))
        spare_s = self.config.deadline_margin_s
        self.urgent_until_s = max(self.urgent_until_s, now_s + spare_s)
        if not 0 <= now_s - self._looked_s < _LOOK_S:
            self._looked_s = now_s
            self.urgent_until_s = self.deadlines.rise_until_s(
                now_s, spare_s=spare_s, rate=self._rate
            )

    def ended(self, num_tokens: int, seconds: float, rid: str = "") -> None:
        """What waits is assumed to be as fast."""
        self._rate.ended(num_tokens, seconds)

    def add(self, request: P) -> None:
        """One that was in the pool before (its `arrival_seq` is not the newest) was preempted: it
        leads the depth-first order, since at least the KV of its prompt was cached then."""
        assert request.rid not in self.places, f"already in the pool: {request.rid=}"
        came_back = request.arrival_seq <= self._newest_seq
        self._newest_seq = max(self._newest_seq, request.arrival_seq)
        place = self.places[request.rid] = Place(request)
        self.by_age.add(place)
        if request.slo.deadline_s is not None:
            self.deadlines.add(request, num_tokens_of(request) + self._num_left(request))
        self.buckets.insert(place, front=came_back)
        if came_back:
            self.buckets.take_turn(request)
        elif self._num_cached is not None:
            self._promote_if_cached(place, self._num_cached)

    def remove(self, rid: str) -> P:
        request = self.places[rid].item
        urgent = self.is_urgent(request)
        due = not urgent and self._is_due(request)
        if not urgent:
            self.mix.count(due=due)
            if not due:
                self.buckets.take_turn(request)
        place = self.places[rid]
        self._last = (request, place.packed())
        self.buckets.tree_of(request).admit(place)
        self._forget(request)
        return request

    def abort(self, rid: str) -> P:
        request = self.places[rid].item
        self.buckets.tree_of(request).remove(self.places[rid])
        self._forget(request)
        return request

    def get(self, rid: str) -> P | None:
        place = self.places.get(rid)
        return None if place is None else place.item

    def __contains__(self, rid: object) -> bool:
        return rid in self.places

    def __len__(self) -> int:
        return len(self.places)

    def order(self) -> PoolOrder[P]:
        return PoolOrder(self)

    __iter__ = order

    def future_references(self, packed: bytes, prefix_key: Hashable) -> list[Shared]:
        """How many waiting requests will read the KV of packed token ids (Echo §4.2: RC), as
        `RadixTree.path` over all buckets. O(buckets x (depth + tokens compared))."""
        counts = Counter[int]()  # by the length where sharing ends
        for tree in self.buckets.trees:
            above = 0
            for shared in tree.path(packed, key=prefix_key):
                counts[shared.prefix_len] += shared.num_requests
                counts[above] -= shared.num_requests
                above = shared.prefix_len
        del counts[0]  # requests that share nothing
        result: list[Shared] = []
        num_requests = 0
        for prefix_len in sorted(counts, reverse=True):
            num_requests += counts[prefix_len]
            result.append(Shared(prefix_len, num_requests))
        return result[::-1]

    def promote(self, request: PrefixRequest) -> None:
        """Those that share `PoolConfig.least_shared` tokens or more with it come next in each
        bucket, behind a prefix that is in use. O(buckets x (depth + tokens compared))."""
        if not self.places:
            return
        least = self.config.least_shared
        token_ids, key = request.token_ids, request.prefix_key
        for tree in self.buckets.trees:
            # Most share nothing: that shows at the first tokens.
            if len(tree) and tree.nearest(token_ids[:least], key=key)[1] == least:
                node, _ = tree.nearest(token_ids, key=key)
                assert node is not None
                self._promote_node(tree, node)

    def stats(self) -> PoolStats:
        """O(buckets)."""
        trees = self.buckets.trees
        num_tokens = sum(tree.num_tokens for tree in trees)
        ratio = _sharing_ratio(num_tokens, sum(tree.num_distinct_tokens for tree in trees))
        return PoolStats(
            num_requests=len(self),
            num_tokens=num_tokens,
            oldest_age_s=self.now_s - self.by_age[0].item.arrival_s if len(self) else None,
            sharing_ratio=ratio,
            expected_hit_ratio=ratio * self.config.utility_ratio,
            buckets=tuple(
                BucketStats(
                    min_prompt_tokens=low,
                    num_requests=len(tree),
                    num_tokens=tree.num_tokens,
                    sharing_ratio=_sharing_ratio(tree.num_tokens, tree.num_distinct_tokens),
                )
                for low, tree in zip((0, *self.buckets.boundaries), trees, strict=True)
            ),
        )

    def _promote_if_cached(self, place: Place[P], num_cached: Callable[[P], int]) -> None:
        """Where a second request shows that a prefix is shared: ask whether the cache has it."""
        least = self.config.least_shared
        node = place.innermost_shared()
        if node.num_requests != 2 or node.num_segment_tokens < least:
            return
        if num_cached(place.item) >= node.prefix_len - node.num_segment_tokens + least:
            self._promote_node(self.buckets.tree_of(place.item), node)

    def _promote_node(self, tree: RadixTree[P], node: Node[P]) -> None:
        assert tree.head is not None
        in_use = self.shared_with_last(tree.head)
        tree.promote(node, behind_head=in_use >= self.config.least_shared)

    def _forget(self, request: P) -> None:
        self.by_age.remove(self.places.pop(request.rid))
        self.deadlines.remove(request)
        if not self.places:
            self.mix.restart()
            self.buckets.restart_sample()

    def is_urgent(self, request: P) -> bool:
        due_s = due_time_s(request)
        return due_s is not None and due_s <= self.urgent_until_s

    def is_as_urgent(self, head: P, urgent: P) -> bool:
        """Whether a request at the head of the order has a deadline as early as an urgent one."""
        head_due_s, due_s = due_time_s(head), due_time_s(urgent)
        if head_due_s is None or not self.is_urgent(head):
            return False
        assert due_s is not None
        return head_due_s <= due_s + _DEADLINE_TOLERANCE * self.config.deadline_margin_s

    def shared_with_last(self, place: Place[P]) -> int:
        """Tokens that it has in common with the last admission, in one bucket."""
        if self._last is None:
            return 0
        last, packed = self._last
        tree = self.buckets.tree_of(last)
        if tree is not self.buckets.tree_of(place.item):
            return 0
        return tree.shared_len(packed, place, key=last.prefix_key)

    def _is_due(self, request: P) -> bool:
        """Whether admitting it pays off debt."""
        num_due = min(self.mix.num_due, len(self))
        return num_due > 0 and request.arrival_seq <= self.by_age[num_due - 1].item.arrival_seq


def _sharing_ratio(num_tokens: int, num_distinct_tokens: int) -> float:
    return 1 - num_distinct_tokens / num_tokens if num_tokens else 0.0


def _most_left(request: Request) -> int:
    return request.max_new_tokens - request.num_output_tokens


def _arrival_seq(place: Place[Any]) -> int:
    seq: int = place.item.arrival_seq
    return seq
