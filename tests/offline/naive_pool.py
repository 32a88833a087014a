"""The pool's order, computed from scratch over plain lists."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

from cosched.offline.prefix_pool import PoolConfig
from tests.offline.prefixes import NaiveTree, PrefixedRequest


class NaivePool:
    """Fixed boundaries only."""

    def __init__(self, config: PoolConfig) -> None:
        self.margin_s = config.deadline_margin_s
        self.boundaries = config.bucket_boundaries or ()
        self.trees = [NaiveTree() for _ in range(len(self.boundaries) + 1)]
        self.turn = 0
        self.share = 1 - Fraction(str(config.utility_ratio))
        self.debt = self.share
        self.waiting: list[PrefixedRequest] = []
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

    def remove(self, request, *, admitted):
        bucket = self.bucket_of(request)
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

    def order(self):
        trees = self.trees[self.turn :] + self.trees[: self.turn]
        left = [request for tree in trees for request in tree.order]
        debt = self.debt
        while left:
            pick = head = left[0]
            urgent = [request for request in left if self.is_urgent(request)]
            if urgent:
                first = min(urgent, key=lambda r: (self.due_s(r), r.arrival_seq))
                latest_s = self.due_s(first) + 0.1 * self.margin_s
                if not self.is_urgent(head) or self.due_s(head) > latest_s:
                    pick = first
            elif debt >= 1:
                pick = min(left, key=lambda request: request.arrival_seq)
                debt += self.share - 1
            else:
                debt += self.share
            left.remove(pick)
            yield pick
