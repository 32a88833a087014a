"""One pass over the offline pool in its order (`cosched.pool.prefix_pool`); changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedKeyList

from cosched.pool.buckets import LengthBuckets
from cosched.pool.freshness import DueRequests, UtilityMix
from cosched.pool.pool import PrefixRequest
from cosched.pool.radix import Node, Place

P = TypeVar("P", bound=PrefixRequest)


class Pool(Protocol[P]):
    """What a pass reads of a `cosched.pool.prefix_pool.PrefixPool`, which describes it."""

    mix: UtilityMix
    by_age: SortedKeyList[Place[P], int]
    deadlines: DueRequests[P]
    urgent_until_s: float
    buckets: LengthBuckets[P]
    places: dict[str, Place[P]]

    def is_as_urgent(self, head: P, urgent: P) -> bool: ...


class PoolOrder(Iterator[P]):
    """Implements `cosched.core.view.OfflineOrder`; valid until the pool changes."""

    knows_prefixes = True

    def __init__(self, pool: Pool[P]) -> None:
        self._pool = pool
        self._mix = pool.mix.fork()
        self._oldest = (place.item for place in pool.by_age)
        self._stale: P | None = None
        self._urgent = pool.deadlines.until(pool.urgent_until_s)
        self._most_urgent: P | None = None
        self._trees = pool.buckets.in_turn()
        self._cursor: Place[P] | None = None
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
        return request

    def skip_sharing(self, request: P, num_tokens: int) -> None:
        """Leave out all that share the first `num_tokens` tokens with a request, waiting or not:
        it prefills them now, and the others find them cached later. O(depth) in the bucket of one
        that waits, O(depth + tokens compared) in the others."""
        buckets = self._pool.buckets
        others = buckets.trees
        place = self._pool.places.get(request.rid)
        if place is not None:
            self._skipped.add(place.node_at(num_tokens))
            others = [tree for tree in others if tree is not buckets.tree_of(request)]
        if others:
            token_ids, key = request.token_ids, request.prefix_key
            nodes = [tree.find(token_ids, key=key, num_tokens=num_tokens) for tree in others]
            self._skipped.update(node for node in nodes if node is not None)

    def num_shared(self, request: P) -> int:
        """Tokens at its head with which another one of its bucket begins too. O(depth)."""
        return self._pool.places[request.rid].innermost_shared().prefix_len

    def take(self, request: P) -> None:
        """It is admitted: neither yielded nor a candidate any more."""
        if request is not self._most_urgent:
            self._mix.count(due=request is self._stale)
        self._yielded.add(request.rid)

    def pass_over(self, request: P) -> None:
        self._yielded.add(request.rid)

    @property
    def urgent_until_s(self) -> float:
        return self._pool.urgent_until_s

    def ask_next(self) -> bool:
        return False

    def candidates(self, per_bucket: int) -> list[list[P]]:
        """Of each bucket the first `per_bucket` in its depth-first order that are neither yielded,
        taken nor left out; the bucket next in rotation comes first. One that is urgent or due is
        the only candidate. O(buckets x per_bucket), and O(1) for each that has gone since the last
        call."""
        first = self._urgent_or_due()
        if first is not None:
            return [[first]]
        if self._fronts is None:
            self._fronts = [_Front(tree.head) for tree in self._pool.buckets.in_turn()]
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
        return self._next_due()

    def _is_gone(self, place: Place[P]) -> bool:
        return place.item.rid in self._yielded or self._skipped_node(place) is not None

    def _depth_first(self) -> P | None:
        """Head of the rest of the depth-first order."""
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
        return head if self._pool.is_as_urgent(head, urgent) else urgent

    def _pick_mixed(self, head: P) -> P:
        stale = self._next_due()
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

    def _next_of(self, requests: Iterator[P]) -> P | None:
        return next((request for request in requests if request.rid not in self._yielded), None)

    def _is_skipped(self, request: P) -> bool:
        return self._skipped_node(self._pool.places[request.rid]) is not None

    def _skipped_node(self, place: Place[P]) -> Node[P] | None:
        if not self._skipped:
            return None
        return next((node for node in place.enclosing() if node in self._skipped), None)


class _Front(Generic[P]):
    """The first places of a bucket, and where its depth-first order continues behind them."""

    __slots__ = ("cursor", "places")

    def __init__(self, cursor: Place[P] | None) -> None:
        self.cursor = cursor
        self.places: list[Place[P]] = []
