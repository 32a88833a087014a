"""The pool's order, computed from scratch over plain lists."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

from cosched.pool.prefix_pool import PoolConfig
from tests.factories import FakeRequest
from tests.pool.prefixes import NaiveTree, prefixed, shared_len


class NaivePool:
    """Fixed boundaries only."""

    def __init__(self, config: PoolConfig, *, num_cached=None) -> None:
        self.num_cached = num_cached
        self.margin_s = config.deadline_margin_s
        self.boundaries = config.bucket_boundaries or ()
        self.trees = [NaiveTree() for _ in range(len(self.boundaries) + 1)]
        self.turn = 0
        self.share = 1 - Fraction(str(config.utility_ratio))
        self.debt = self.share
        self.least_shared = config.least_shared
        self.last: FakeRequest | None = None
        self.waiting: list[FakeRequest] = []
        self.seen: set[str] = set()
        self.now_s = 0.0

    def bucket_of(self, request):
        return bisect_right(self.boundaries, request.num_prompt_tokens)

    def due_s(self, request):
        deadline_s = request.slo.deadline_s
        return float("inf") if deadline_s is None else request.arrival_s + deadline_s

    def is_urgent(self, request):
        return self.due_s(request) <= self.now_s + self.margin_s

    def oldest(self):
        return sorted(self.waiting, key=lambda request: request.arrival_seq)

    def add(self, request):
        came_back = request.rid in self.seen
        self.seen.add(request.rid)
        self.waiting.append(request)
        self.trees[self.bucket_of(request)].insert(request, front=came_back)
        if came_back:
            self.turn = self.bucket_of(request)
        elif self.num_cached is not None:
            self.promote_if_cached(request)

    def promote_if_cached(self, request):
        """Two share a prefix that they share with nobody else, and it is in the cache."""
        tree = self.trees[self.bucket_of(request)]
        others = [other for other in tree.order if other is not request]
        most = max((shared_len(request, other) for other in others), default=0)
        if most <= 0 or len(tree.sharing(request, most)) != 2:
            return
        above = max((n for other in others if (n := shared_len(request, other)) < most), default=0)
        end = max(above, 0) + self.least_shared
        if most >= end and self.num_cached(request) >= end:
            head = prefixed(request.token_ids[:most], prefix_key=request.prefix_key)
            self.promote_in(tree, head)

    def promote(self, probe):
        for tree in self.trees:
            if tree.sharing(probe, self.least_shared):
                self.promote_in(tree, probe)

    def promote_in(self, tree, probe):
        if self.shared(self.last, tree.order[0]) >= self.least_shared:
            tree.lead_behind_head(probe)
        else:
            tree.lead(probe)

    def remove(self, request, *, admitted):
        bucket = self.bucket_of(request)
        if admitted:
            self.last = request
        if admitted and not self.is_urgent(request):
            due = request in self.oldest()[: int(self.debt)]
            self.debt += self.share - due
            if not due:
                self.turn = bucket
        self.waiting.remove(request)
        self.trees[bucket].remove(request)
        if admitted:
            self.trees[bucket].lead(request)
        if not self.waiting:
            self.debt = self.share

    def shared(self, one, two):
        if one is None or self.bucket_of(one) != self.bucket_of(two):
            return 0
        return max(shared_len(one, two), 0)

    def order(self):
        trees = self.trees[self.turn :] + self.trees[: self.turn]
        left = [request for tree in trees for request in tree.order]
        debt = self.debt
        while left:
            pick = head = left[0]
            oldest = min(left, key=lambda request: request.arrival_seq)
            urgent = [request for request in left if self.is_urgent(request)]
            if urgent:
                first = min(urgent, key=lambda r: (self.due_s(r), r.arrival_seq))
                latest_s = self.due_s(first) + 0.1 * self.margin_s
                if not self.is_urgent(head) or self.due_s(head) > latest_s:
                    pick = first
            elif debt >= 1:
                pick = oldest
                debt += self.share - 1
            else:
                debt += self.share
            left.remove(pick)
            yield pick
