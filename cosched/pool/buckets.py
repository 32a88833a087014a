"""The offline pool in buckets of similar length, each with a radix tree of its own (Echo §6).

Echo divides the pool coarsely by the distribution of lengths, so that a batch can be regular
(similar lengths together) and the candidates for it are few: one per bucket. Here a request's
length is its *prompt*'s, so that one that was stopped and comes back with some output is again
beside those it shares with. One bucket is HyGen's single tree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from cosched.pool.pool import PrefixRequest
from cosched.pool.radix import Place, RadixTree

P = TypeVar("P", bound=PrefixRequest)

SAMPLE_SIZE = 256
"""Requests whose lengths decide learned boundaries: few enough to be moved at once (ms)."""


def quantile_boundaries(lengths: Sequence[int], num_buckets: int) -> tuple[int, ...]:
    """Lower ends of all buckets but the first, such that about equally many lengths fall in each.

    Fewer than ``num_buckets - 1`` where many lengths are equal.
    """
    ordered = sorted(lengths)
    cuts = {ordered[i * len(ordered) // num_buckets] for i in range(1, num_buckets)}
    return tuple(sorted(cuts - {ordered[0]}))


class LengthBuckets(Generic[P]):
    """Radix trees by prompt length: bucket i holds ``boundaries[i-1] <= length < boundaries[i]``.

    The order of the whole begins with one bucket (`turn`).

    boundaries   rising prompt lengths [tokens]; None: learned
    num_buckets  how many to learn, as quantiles of the first `SAMPLE_SIZE` requests since the pool
                 was last empty, so that each job that finds it empty gets its own. There is one
                 bucket until the first sample is complete.
    """

    def __init__(self, *, boundaries: Sequence[int] | None, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._learns = boundaries is None and num_buckets > 1
        self._sample: list[int] = []
        self._set_boundaries(tuple(boundaries or ()))

    def index_of(self, request: P) -> int:
        return bisect_right(self.boundaries, request.num_prompt_tokens)

    def tree_of(self, request: P) -> RadixTree[P]:
        return self.trees[self.index_of(request)]

    def insert(self, place: Place[P], *, front: bool) -> None:
        """Put a place into its bucket's tree; with ``front`` it leads there."""
        self._put(place, front=front)
        if self._learns and len(self._sample) < SAMPLE_SIZE:
            self._sample.append(place.item.num_prompt_tokens)
            if len(self._sample) == SAMPLE_SIZE:
                self._learn()

    def restart_sample(self) -> None:
        """Learn from those that come next; the boundaries stay until then."""
        self._sample.clear()

    def take_turn(self, request: P) -> None:
        """The order continues in this request's bucket."""
        self.turn = self.index_of(request)

    def in_turn(self) -> Iterator[RadixTree[P]]:
        """The bucket `turn`, the longer ones, then the shorter ones."""
        yield from self.trees[self.turn :]
        yield from self.trees[: self.turn]

    def _learn(self) -> None:
        places = [place for tree in self.in_turn() for place in tree]
        self._set_boundaries(quantile_boundaries(self._sample, self._num_buckets))
        for place in places:
            self._put(place, front=False)
        if places:
            self.take_turn(places[0].item)

    def _set_boundaries(self, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries
        self.trees: list[RadixTree[P]] = [RadixTree() for _ in range(len(boundaries) + 1)]
        self.turn = 0

    def _put(self, place: Place[P], *, front: bool) -> None:
        request = place.item
        self.tree_of(request).insert(place, request.token_ids, key=request.prefix_key, front=front)
