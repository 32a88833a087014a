"""Requests with token ids, and what is simple and slow to compare the pool's structures with."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from cosched.core.request import RequestClass, Slo

_seq = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixedRequest:
    """A waiting offline request. The prompt is all of its tokens unless told otherwise."""

    rid: str
    token_ids: array
    prefix_key: Hashable = None
    num_prompt_tokens: int
    num_output_tokens: int = 0
    arrival_seq: int
    arrival_s: float = 0.0
    slo: Slo = field(default_factory=Slo)
    request_class: RequestClass = RequestClass.OFFLINE
    max_new_tokens: int = 1
    num_computed_tokens: int = 0


def prefixed(token_ids: Iterable[int], **fields) -> PrefixedRequest:
    """A request that arrives after all that were made before it."""
    seq = fields.pop("arrival_seq", None)
    seq = next(_seq) if seq is None else seq
    ids = array("q", token_ids)
    fields = {"rid": f"r{seq}", "num_prompt_tokens": len(ids), **fields}
    return PrefixedRequest(token_ids=ids, arrival_seq=seq, **fields)


def shared_len(one: PrefixedRequest, other: PrefixedRequest) -> int:
    """Tokens of the longest common prefix; -1 for different keys."""
    if one.prefix_key != other.prefix_key:
        return -1
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class NaiveTree:
    """The depth-first order of a radix tree as a flat list: O(n) for everything."""

    def __init__(self) -> None:
        self.order: list[PrefixedRequest] = []

    def insert(self, request: PrefixedRequest, *, front: bool = False) -> None:
        shared = [shared_len(request, other) for other in self.order]
        most = max(shared, default=-1)
        end = max((i + 1 for i, n in enumerate(shared) if n == most), default=0)
        self.order.insert(end if most >= 0 else len(self.order), request)
        if front:
            self.lead(request)
            self.order.remove(request)
            self.order.insert(0, request)

    def remove(self, request: PrefixedRequest) -> None:
        self.order.remove(request)

    def lead(self, request: PrefixedRequest) -> None:
        """Those that share more come first; otherwise the order stays."""
        self.order.sort(key=lambda other: -shared_len(request, other))

    def lead_behind_head(self, request: PrefixedRequest) -> None:
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

    def sharing(self, request: PrefixedRequest, num_tokens: int) -> list[PrefixedRequest]:
        return [other for other in self.order if shared_len(request, other) >= num_tokens]
