"""The offline pool in prefix order: HyGen's tree and freshness, Echo's buckets.

What is next, in this order:

1. *Urgent* requests: those for whose deadline the work that is due by then leaves no more than
   `PoolConfig.deadline_margin_s`, earliest first. While the head of the depth-first order is one of
   them and not much later than the earliest, it goes before it: a job whose requests are all urgent
   is still served in prefix order.
2. *Due* requests: the oldest, when `UtilityMix` says that it is their turn. While the head of the
   depth-first order has much in common with the last admission that a due one has not, the due one
   is put off, but not for long: else a prefix in use would be left, and computed again later.
3. The depth-first order of the bucket that has the turn, then that of the other buckets.

The depth-first order goes on where the last admission was made: when a request was admitted out of
order, those that share most with it lead the order from then on. So a stale or an urgent request
brings its siblings with it while their common prefix is cached, and a subtree once begun is
finished before another, except where one of these cuts in. What the cache holds from online
requests or earlier jobs comes right behind the prefix in use, before it is evicted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from sortedcontainers import SortedKeyList

from cosched.core.request import Request, num_tokens_of
from cosched.errors import ConfigError
from cosched.pool.buckets import LengthBuckets
from cosched.pool.freshness import Deadlines, ServedRate, UtilityMix, due_time_s
from cosched.pool.pool import PrefixRequest
from cosched.pool.radix import Node, Place, RadixTree, Shared

P = TypeVar("P", bound=PrefixRequest)

_LOOK_S = 1.0
"""How often it is worked out what must go first to be done in time [s]."""

_DEADLINE_TOLERANCE = 0.1
"""Deadlines this part of the margin apart count as one: prefix order decides between them."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the pool orders what waits.

    utility_ratio      part of the picks that follow prefix order, 0 to 1; the others go to the
                       oldest request (HyGen §4.3, App. A.2; the paper names no value). 1: requests
                       that share nothing may starve. 0: first come, first served. To the millionth.
    patience           admissions in a row that may put a due request off, so that a shared prefix
                       that is in use is not left (own addition). 0: HyGen's rule
    least_shared       tokens in common that are worth putting a due request off [tokens]
    num_buckets        length buckets, learned (Echo §6; the paper names no value). 1: HyGen's tree.
    bucket_boundaries  prompt lengths [tokens] at which buckets begin, instead of learned ones
    deadline_margin_s  a request is urgent where less time than this would be left until its
                       deadline after all the work that is due before it, at the rate of late (own
                       addition) [s]
    """

    utility_ratio: float = 0.99
    patience: int = 256
    least_shared: int = 64
    num_buckets: int = 1
    bucket_boundaries: tuple[int, ...] | None = None
    deadline_margin_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.utility_ratio <= 1:
            raise ConfigError(f"utility_ratio {self.utility_ratio} is not between 0 and 1")
        for name, least in (("patience", 0), ("least_shared", 1), ("num_buckets", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} {value} is below {least}")
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
        self._urgent_until_s = config.deadline_margin_s
        self._looked_s = -math.inf
        self.now_s = 0.0
        self._places: dict[str, Place[P]] = {}
        self._by_age: SortedKeyList[Place[P], int] = SortedKeyList(key=_arrival_seq)
        self._deadlines: Deadlines[P] = Deadlines()
        self._mix = UtilityMix(config.utility_ratio, patience=config.patience)
        self._last: tuple[P, bytes] | None = None  # the last admission and its token ids
        self._buckets: LengthBuckets[P] = LengthBuckets(
            boundaries=config.bucket_boundaries, num_buckets=config.num_buckets
        )
        self._newest_seq = -1

    def advance(self, now_s: float) -> None:
        """Say what time it is, before planning: deadlines become urgent by it. Once in `_LOOK_S`
        O(stretches of time in which any are due)."""
        self.now_s = now_s
        self._rate.advance(now_s, waits=bool(self._places))
        spare_s = self.config.deadline_margin_s
        self._urgent_until_s = max(self._urgent_until_s, now_s + spare_s)
        if not 0 <= now_s - self._looked_s < _LOOK_S:
            self._looked_s = now_s
            self._urgent_until_s = self._deadlines.rise_until_s(
                now_s, spare_s=spare_s, rate=self._rate
            )

    def ended(self, num_tokens: int, seconds: float) -> None:
        """An admitted request has ended with so many tokens, its prompt's among them, so long after
        its first token [s]: what waits is as fast."""
        self._rate.ended(num_tokens, seconds)

    def add(self, request: P) -> None:
        """Put a request in. One that was in the pool before (its `arrival_seq` is not the newest)
        was stopped: it leads the depth-first order, since of its KV at least the prompt's was
        cached when it was stopped (all of it, unless the engine itself retracted it)."""
        assert request.rid not in self._places, f"already in the pool: {request.rid=}"
        came_back = request.arrival_seq <= self._newest_seq
        self._newest_seq = max(self._newest_seq, request.arrival_seq)
        place = self._places[request.rid] = Place(request)
        self._by_age.add(place)
        if request.slo.deadline_s is not None:
            self._deadlines.add(request, num_tokens_of(request) + self._num_left(request))
        self._buckets.insert(place, front=came_back)
        if came_back:
            self._buckets.take_turn(request)
        elif self._num_cached is not None:
            self._promote_if_cached(place, self._num_cached)

    def remove(self, rid: str) -> P:
        """Take out a request that was admitted. KeyError when it is not in the pool."""
        request = self._places[rid].item
        urgent = self._is_urgent(request)
        due = not urgent and self._is_due(request)
        if not urgent and not due and self._puts_off(request):
            self._mix.put_off()
        elif not urgent:
            self._mix.count(due=due)
        if not urgent and not due:
            self._buckets.take_turn(request)
        place = self._places[rid]
        self._last = (request, place.packed())
        self._buckets.tree_of(request).admit(place)
        self._forget(request)
        return request

    def abort(self, rid: str) -> P:
        """Take out a request that will not run: no pick. KeyError when it is not in the pool."""
        request = self._places[rid].item
        self._buckets.tree_of(request).remove(self._places[rid])
        self._forget(request)
        return request

    def get(self, rid: str) -> P | None:
        place = self._places.get(rid)
        return None if place is None else place.item

    def __contains__(self, rid: object) -> bool:
        return rid in self._places

    def __len__(self) -> int:
        return len(self._places)

    def order(self) -> PoolOrder[P]:
        return PoolOrder(self)

    __iter__ = order

    def in_bucket(self, index: int) -> Iterator[P]:
        """Depth-first order of one bucket, lazily. Valid until a change."""
        return (place.item for place in self._buckets.trees[index])

    def future_references(self, packed: bytes, prefix_key: Hashable) -> list[Shared]:
        """How many waiting requests will read the KV of packed token ids (Echo §4.2: RC).

        One entry per length at which the number changes, prefixes getting longer: a prefix of n
        tokens will be read by the requests of the first entry with ``prefix_len >= n``, and by none
        if there is no such entry. O(buckets x (depth + tokens compared)).
        """
        requests, tokens = Counter[int](), Counter[int]()  # by the length where sharing ends
        for tree in self._buckets.trees:
            above = 0
            for shared in tree.path(packed, key=prefix_key):
                requests[shared.prefix_len] += shared.num_requests
                tokens[shared.prefix_len] += shared.num_tokens
                requests[above] -= shared.num_requests
                tokens[above] -= shared.num_tokens
                above = shared.prefix_len
        del requests[0]  # who shares nothing
        result: list[Shared] = []
        num_requests = num_tokens = 0
        for prefix_len in sorted(requests, reverse=True):
            num_requests += requests[prefix_len]
            num_tokens += tokens[prefix_len]
            result.append(
                Shared(prefix_len=prefix_len, num_requests=num_requests, num_tokens=num_tokens)
            )
        return result[::-1]

    def promote(self, request: PrefixRequest) -> None:
        """Say that the KV of a request that is not in the pool is, or will soon be, in the cache:
        those that share `PoolConfig.least_shared` tokens or more with it come next in each bucket,
        behind a prefix that is in use. O(buckets x (depth + tokens compared)).
        """
        if not self._places:
            return
        least = self.config.least_shared
        token_ids, key = request.token_ids, request.prefix_key
        for tree in self._buckets.trees:
            # Most share nothing: that shows at the first tokens.
            if len(tree) and tree.nearest(token_ids[:least], key=key)[1] == least:
                node, _ = tree.nearest(token_ids, key=key)
                assert node is not None
                self._promote_node(tree, node)

    def max_passed_over(self, num_older: int) -> int | None:
        """The fairness bound, see `UtilityMix.max_passed_over`: urgent requests come on top."""
        return self._mix.max_passed_over(num_older)

    def stats(self) -> PoolStats:
        """O(buckets)."""
        trees = self._buckets.trees
        num_tokens = sum(tree.num_tokens for tree in trees)
        ratio = _sharing_ratio(num_tokens, sum(tree.num_distinct_tokens for tree in trees))
        return PoolStats(
            num_requests=len(self),
            num_tokens=num_tokens,
            oldest_age_s=self.now_s - self._by_age[0].item.arrival_s if len(self) else None,
            sharing_ratio=ratio,
            expected_hit_ratio=ratio * self.config.utility_ratio,
            buckets=tuple(
                BucketStats(
                    min_prompt_tokens=low,
                    num_requests=len(tree),
                    num_tokens=tree.num_tokens,
                    sharing_ratio=_sharing_ratio(tree.num_tokens, tree.num_distinct_tokens),
                )
                for low, tree in zip((0, *self._buckets.boundaries), trees, strict=True)
            ),
        )

    def check_integrity(self) -> None:
        """Assert that trees, ages and deadlines hold the same requests: for tests."""
        for tree in self._buckets.trees:
            tree.check_integrity()
            assert all(self._buckets.tree_of(place.item) is tree for place in tree)
        in_trees = {place for tree in self._buckets.trees for place in tree}
        assert in_trees == set(self._places.values())
        assert {place.item.rid for place in in_trees} == self._places.keys()
        assert [*self._by_age] == sorted(in_trees, key=_arrival_seq)
        assert [*self._deadlines.until(float("inf"))] == sorted(
            (place.item for place in in_trees if due_time_s(place.item) is not None),
            key=lambda request: (due_time_s(request), request.arrival_seq),
        )

    def _promote_if_cached(self, place: Place[P], num_cached: Callable[[P], int]) -> None:
        """Where a second request shows that a prefix is shared: ask whether the cache has it."""
        least = self.config.least_shared
        node = place.innermost_shared()
        if node.num_requests != 2 or node.num_segment_tokens < least:
            return
        if num_cached(place.item) >= node.prefix_len - node.num_segment_tokens + least:
            self._promote_node(self._buckets.tree_of(place.item), node)

    def _promote_node(self, tree: RadixTree[P], node: Node[P]) -> None:
        assert tree.head is not None
        in_use = self._shared_with_last(tree.head)
        tree.promote(node, behind_head=in_use >= self.config.least_shared)

    def _forget(self, request: P) -> None:
        self._by_age.remove(self._places.pop(request.rid))
        self._deadlines.remove(request)
        if not self._places:
            self._mix.restart()
            self._buckets.restart_sample()

    def _is_urgent(self, request: P) -> bool:
        due_s = due_time_s(request)
        return due_s is not None and due_s <= self._urgent_until_s

    def _shared_with_last(self, place: Place[P]) -> int:
        """Tokens that it has in common with the last admission, in one bucket."""
        if self._last is None:
            return 0
        last, packed = self._last
        tree = self._buckets.tree_of(last)
        if tree is not self._buckets.tree_of(place.item):
            return 0
        return tree.shared_len(packed, place, key=last.prefix_key)

    def _is_due(self, request: P) -> bool:
        """Whether admitting it pays off debt. While due requests can be put off, that is only so
        for the oldest of all: others that are due happen to be in prefix order."""
        num_paying = self._mix.num_due
        if self._mix.is_patient:
            num_paying = min(num_paying, 1)
        num_paying = min(num_paying, len(self))
        return (
            num_paying > 0 and request.arrival_seq <= self._by_age[num_paying - 1].item.arrival_seq
        )

    def _puts_off(self, request: P) -> bool:
        if not self._mix.num_due or not self._mix.is_patient:
            return False
        oldest = self._by_age[0]
        in_use = self._shared_with_last(self._places[request.rid])
        return self._leaves(in_use, oldest, self._shared_with_last)

    def _leaves(
        self, in_use: int, stale: Place[P], shared_with_last: Callable[[Place[P]], int]
    ) -> bool:
        """Whether a stale request next leaves a prefix of which `in_use` tokens are used."""
        least = self.config.least_shared
        return in_use >= least and in_use - shared_with_last(stale) >= least


class PoolOrder(Iterator[P]):
    """Implements `cosched.core.view.OfflineOrder`; valid until the pool changes."""

    knows_prefixes = True

    def __init__(self, pool: PrefixPool[P]) -> None:
        self._pool = pool
        self._mix = pool._mix.fork()
        self._oldest = (place.item for place in pool._by_age)
        self._stale: P | None = None
        self._urgent = pool._deadlines.until(pool._urgent_until_s)
        self._most_urgent: P | None = None
        self._trees = pool._buckets.in_turn()
        self._cursor: Place[P] | None = None
        self._last: Place[P] | None = None
        self._yielded: set[str] = set()
        self._skipped: set[Node[P]] = set()
        self._fronts: list[_Front[P]] | None = None

    def __next__(self) -> P:
        head = self._depth_first()
        if head is None:
            raise StopIteration
        request = self._pick_urgent(head)
        if request is None:
            request = self._pick_mixed(head)
        self._yielded.add(request.rid)
        self._last = self._pool._places[request.rid]
        return request

    def skip_sharing(self, request: P, num_tokens: int) -> None:
        """Leave out all that share the first `num_tokens` tokens with a request, waiting or not:
        it prefills them now, and the others shall find them cached later.

        O(depth) in the bucket of one that waits, O(depth + tokens compared) in the others; passing
        over them is O(1) for the depth-first order, and costs at most one look per request yielded
        for the others.
        """
        buckets = self._pool._buckets
        others = buckets.trees
        place = self._pool._places.get(request.rid)
        if place is not None:
            self._skipped.add(place.node_at(num_tokens))
            others = [tree for tree in others if tree is not buckets.tree_of(request)]
        if others:
            token_ids, key = request.token_ids, request.prefix_key
            nodes = [tree.find(token_ids, key=key, num_tokens=num_tokens) for tree in others]
            self._skipped.update(node for node in nodes if node is not None)

    def num_shared(self, request: P) -> int:
        """Tokens at its head with which another one of its bucket begins too. O(depth)."""
        return self._pool._places[request.rid].innermost_shared().prefix_len

    def take(self, request: P) -> None:
        """It is admitted: neither yielded nor a candidate any more."""
        if request is not self._most_urgent:
            self._mix.count(due=request is self._stale)
        self._yielded.add(request.rid)
        self._last = self._pool._places[request.rid]

    def candidates(self, per_bucket: int) -> list[list[P]]:
        """Of each bucket the first `per_bucket` in its depth-first order that are neither yielded,
        taken nor left out; the bucket that has the turn comes first. One that is urgent or due is
        the only candidate.

        O(buckets x per_bucket), and O(1) for each that has gone since the last call.
        """
        first = self._urgent_or_due()
        if first is not None:
            return [[first]]
        if self._fronts is None:
            self._fronts = [_Front(tree.head) for tree in self._pool._buckets.in_turn()]
        for front in self._fronts:
            front.places = [place for place in front.places if not self._is_gone(place)]
            while len(front.places) < per_bucket and (place := front.cursor) is not None:
                node = self._skipped_node(place)
                if node is not None:
                    assert node.last is not None
                    front.cursor = node.last.next
                    continue
                front.cursor = place.next
                if place.item.rid not in self._yielded:
                    front.places.append(place)
        return [[place.item for place in front.places[:per_bucket]] for front in self._fronts]

    def _urgent_or_due(self) -> P | None:
        head = self._depth_first()
        if head is None:
            return None
        urgent = self._pick_urgent(head)
        if urgent is not None:
            return urgent
        stale = self._next_due()
        return None if stale is None or self._is_put_off(stale, head) else stale

    def _is_gone(self, place: Place[P]) -> bool:
        return place.item.rid in self._yielded or self._skipped_node(place) is not None

    def _depth_first(self) -> P | None:
        """Head of what is left of the depth-first order."""
        while True:
            place = self._cursor
            if place is None:
                tree = next(self._trees, None)
                if tree is None:
                    return None
                self._cursor = tree.head
            elif place.item.rid in self._yielded:
                self._cursor = place.next
            elif (node := self._skipped_node(place)) is not None:
                assert node.last is not None
                self._cursor = node.last.next
            else:
                return place.item

    def _pick_urgent(self, head: P) -> P | None:
        if self._most_urgent is None or self._most_urgent.rid in self._yielded:
            self._most_urgent = self._next_of(self._urgent)
        urgent = self._most_urgent
        if urgent is None:
            return None
        if self._is_skipped(urgent):
            self._most_urgent = None
            return None
        return head if self._is_as_urgent(head, urgent) else urgent

    def _pick_mixed(self, head: P) -> P:
        stale = self._next_due()
        if stale is not None and self._is_put_off(stale, head):
            self._mix.put_off()
            return head
        self._mix.count(due=stale is not None)
        return head if stale is None else stale

    def _next_due(self) -> P | None:
        if not self._mix.num_due:
            return None
        if self._stale is None or self._stale.rid in self._yielded:
            self._stale = self._next_of(self._oldest)
        if self._stale is not None and self._is_skipped(self._stale):
            self._stale = None
        return self._stale

    def _is_put_off(self, stale: P, head: P) -> bool:
        if not self._mix.is_patient:
            return False
        pool = self._pool
        in_use = self._shared_with_last(pool._places[head.rid])
        return pool._leaves(in_use, pool._places[stale.rid], self._shared_with_last)

    def _shared_with_last(self, place: Place[P]) -> int:
        last = self._last
        if last is None:
            return self._pool._shared_with_last(place)
        in_one_bucket = self._pool._buckets.index_of(last.item) == self._pool._buckets.index_of(
            place.item
        )
        return last.shared_len(place) if in_one_bucket else 0

    def _is_as_urgent(self, head: P, urgent: P) -> bool:
        head_due_s, due_s = due_time_s(head), due_time_s(urgent)
        if head_due_s is None or not self._pool._is_urgent(head):
            return False
        assert due_s is not None
        return head_due_s <= due_s + _DEADLINE_TOLERANCE * self._pool.config.deadline_margin_s

    def _next_of(self, requests: Iterator[P]) -> P | None:
        return next((request for request in requests if request.rid not in self._yielded), None)

    def _is_skipped(self, request: P) -> bool:
        return self._skipped_node(self._pool._places[request.rid]) is not None

    def _skipped_node(self, place: Place[P]) -> Node[P] | None:
        if not self._skipped:
            return None
        return next((node for node in place.enclosing() if node in self._skipped), None)


class _Front(Generic[P]):
    """The first places of a bucket, and where its depth-first order goes on behind them."""

    __slots__ = ("cursor", "places")

    def __init__(self, cursor: Place[P] | None) -> None:
        self.cursor = cursor
        self.places: list[Place[P]] = []


def _sharing_ratio(num_tokens: int, num_distinct_tokens: int) -> float:
    return 1 - num_distinct_tokens / num_tokens if num_tokens else 0.0


def _most_left(request: Request) -> int:
    return request.max_new_tokens - request.num_output_tokens


def _arrival_seq(place: Place[Any]) -> int:
    seq: int = place.item.arrival_seq
    return seq
