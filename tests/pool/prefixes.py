"""Requests with token ids, and what is simple and slow to compare the pool's structures with."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable

from tests.factories import FakeRequest, offline

_seq = itertools.count()


def prefixed(token_ids: Iterable[int], *, rid: str | None = None, **fields) -> FakeRequest:
    """An offline request whose prompt is these tokens, behind all that were made before it."""
    ids = array("q", token_ids)
    fields = {"num_prompt_tokens": len(ids), "max_new_tokens": 1, **fields}
    return offline(rid or f"r{next(_seq)}", token_ids=ids, **fields)


def shared_len(one: FakeRequest, other: FakeRequest) -> int:
    """Tokens of the longest common prefix; -1 for different keys."""
    if one.prefix_key != other.prefix_key:
        return -1
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class NaiveTree:
    """The depth-first order of a radix tree as a flat list: O(n) for everything."""

    def __init__(self) -> None:
        self.order: list[FakeRequest] = []

    def insert(self, request: FakeRequest, *, front: bool = False) -> None:
        shared = [shared_len(request, other) for other in self.order]
        most = max(shared, default=-1)
        end = max((i + 1 for i, n in enumerate(shared) if n == most), default=0)
        self.order.insert(end if most >= 0 else len(self.order), request)
        if front:
            self.lead(request)
            self.order.remove(request)
            self.order.insert(0, request)

    def remove(self, request: FakeRequest) -> None:
        self.order.remove(request)

    def lead(self, request: FakeRequest) -> None:
        """Those that share more come first; otherwise the order stays."""
        self.order.sort(key=lambda other: -shared_len(request, other))

    def lead_behind_head(self, request: FakeRequest) -> None:
        """Those that share more with the request than with the head come right behind the head's
        branch where the two part; in there those first that share more."""
        head = self.order[0]
        parting = shared_len(request, head)
        moved = [other for other in self.order if shared_len(request, other) > parting]
        moved.sort(key=lambda other: -shared_len(request, other))
        rest = [other for other in self.order if other not in moved]
        branch = [other for other in rest if other is head or shared_len(head, other) > parting]
        if moved:
            end = 1 if len(head.token_ids) == parting else len(branch)
            self.order = [*rest[:end], *moved, *rest[end:]]

    def num_distinct_tokens(self) -> int:
        return len(
            {
                (request.prefix_key, tuple(request.token_ids[: n + 1]))
                for request in self.order
                for n in range(len(request.token_ids))
            }
        )

    def sharing(self, request: FakeRequest, num_tokens: int) -> list[FakeRequest]:
        return [other for other in self.order if shared_len(request, other) >= num_tokens]
