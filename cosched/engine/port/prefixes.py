"""Which of the requests that run together read the same KV."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cosched.core.batch import BatchShape
from cosched.engine.port import common
from cosched_kernels.groups import Groups, PrefixForest, Shared

__all__ = ["MIN_GROUP_TOKENS", "RunningPrefixes", "with_repeated"]

MIN_GROUP_TOKENS = 512
"""KV tokens that a group must save to be one: its members' pieces cost as much as some hundred."""

_keys = itertools.count()


class RunningPrefixes:
    """What running requests have in common of the radix tree, from one batch to the next. All of it
    is known on the host."""

    def __init__(self, *, page_size: int) -> None:
        self._forest = PrefixForest(page_size=page_size)

    @classmethod
    def of(cls, scheduler: Any) -> RunningPrefixes:
        """For the batches of a scheduler."""
        return cls(page_size=scheduler.page_size)

    def groups(
        self,
        reqs: Sequence[Any],
        *,
        most: Sequence[int] | None = None,
        min_saved: int = MIN_GROUP_TOKENS,
    ) -> Groups:
        """O(requests), and O(prompt) for each that was not in the batch before.

        most       [requests] of the head of each at most so many tokens count; None: all that the
                   tree owns
        min_saved  KV tokens that a group must save
        """
        forest, keys = self._forest, []
        for place, req in enumerate(reqs):
            # Not its id: clients choose that, and may use it again for another prompt.
            key = getattr(req, "cosched_prefix_key", None)
            if key is None:
                key = req.cosched_prefix_key = next(_keys)
            keys.append(key)
            length = int(req.kv.cache_protected_len)
            if most is not None:
                length = min(length, most[place] - most[place] % forest.page_size)
            if not forest.has(key, length):
                tokens = np.array(common.token_ids(req)[:length], dtype=np.int64)
                namespace = common.prefix_key(req)
                forest.put(Shared(rid=key, namespace=namespace, tokens=tokens, length=length))
        if len(forest) > 2 * len(keys) + 64:
            forest.keep_only(keys)  # who has ended, or sits out for long
        return forest.groups(keys, min_saved=min_saved)

    def num_repeated(self, reqs: Sequence[Any]) -> int:
        """KV tokens that their attention reads once instead of once for each that shares them."""
        return self.groups(reqs).saved_tokens if len(reqs) > 1 else 0

    def reads(
        self, reqs: Sequence[Any], contexts: Sequence[int], *, min_saved: int = MIN_GROUP_TOKENS
    ) -> Sequence[int]:
        """[requests] of each context the KV tokens that are not read for a request before it in the
        tree anyway: what all of a group share counts to its first. Their sum is what is read."""
        if len(reqs) < 2:
            return contexts
        groups = self.groups(reqs, min_saved=min_saved)
        if not groups.num_groups:
            return contexts
        shared = groups.own.copy()
        np.subtract.at(shared, groups.begin, groups.last - groups.first)
        reads = np.array(contexts, dtype=np.int64)
        reads[groups.order] -= shared
        return list(map(int, reads))


def with_repeated(shape: BatchShape, batch: Any, prefixes: RunningPrefixes) -> BatchShape:
    """The shape of a batch with what its decodes have in common. Prefills are left out: over a
    long prefix they compute for longer than they read."""
    is_decode = batch.forward_mode.is_decode()
    num_repeated = prefixes.num_repeated(batch.reqs if is_decode else common.decodes_of(batch))
    return replace(shape, num_repeated=num_repeated) if num_repeated else shape
