"""Which running requests share KV of the radix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cosched.core.batch import BatchShape
from cosched.engine.port.batch import decodes_of
from cosched.engine.port.read_once import Launch, launched
from cosched.engine.port.request import prefix_key, token_ids
from cosched_kernels.groups import Groups, PrefixForest, Shared

MIN_GROUP_TOKENS = 512
"""KV tokens that a group must save: its overhead is that of a few hundred tokens."""

_MIN_SWEEP = 32  # known requests before the first search for those that no longer run


class RunningPrefixes:
    """The KV of the radix tree that running requests share, known on the host. A process has one
    (`of`)."""

    def __init__(self, *, page_size: int) -> None:
        self._forest = PrefixForest(page_size=page_size)
        self._req_of: dict[int, Any] = {}
        self._sweep_at = _MIN_SWEEP
        self._latest: tuple[Launch, int, Groups] | None = None
        """The latest launch and its groups: its time prediction and its attention ask the same."""

    @classmethod
    def of(cls, owner: Any) -> RunningPrefixes:
        """The instance of a scheduler and of its model runner."""
        pool = owner.req_to_token_pool
        found: RunningPrefixes | None = getattr(pool, "cosched_prefixes", None)
        if found is None:
            found = pool.cosched_prefixes = cls(page_size=owner.page_size)
        return found

    def __len__(self) -> int:
        """Known requests."""
        return len(self._req_of)

    def groups(self, reqs: Sequence[Any], *, min_saved: int = MIN_GROUP_TOKENS) -> Groups:
        """Requests that share KV, in groups that save at least `min_saved` KV tokens each.
        O(requests), and O(prompt) for each request whose part in the tree has changed."""
        launch = launched()
        is_all = launch is not None and reqs is launch.batch.reqs
        if is_all and self._latest is not None and self._latest[:2] == (launch, min_saved):
            return self._latest[2]
        groups = self._forest.groups(list(map(self._member, reqs)), min_saved=min_saved)
        self._latest = (launch, min_saved, groups) if launch is not None and is_all else None
        return groups

    def forget(self, req: Any) -> None:
        """A request has ended."""
        for member in vars(req).pop("cosched_members", {}).values():
            self._forest.remove(member)
            del self._req_of[member]

    def _member(self, req: Any) -> int:
        # Not by its id: clients choose ids, and may use them again for another prompt.
        length = int(req.kv.cache_protected_len)
        member: int | None = getattr(req, "cosched_members", {}).get(length)
        if member is None:
            self.forget(req)
            if len(self._req_of) >= self._sweep_at:
                self._sweep()
            tokens = np.asarray(token_ids(req))
            namespace = prefix_key(req)
            member = self._forest.put(Shared(namespace=namespace, tokens=tokens, length=length))
            req.cosched_members = {length: member}
            self._req_of[member] = req
        return member

    def _sweep(self) -> None:
        """Forget requests whose part in the tree has changed: they have ended, or wait."""
        for req in list(self._req_of.values()):
            if req.kv.cache_protected_len not in req.cosched_members:
                self.forget(req)
        self._sweep_at = max(2 * len(self._req_of), _MIN_SWEEP)

    def num_repeated(self, reqs: Sequence[Any]) -> int:
        """KV tokens that attention need not read because requests share them."""
        return self.groups(reqs).saved_tokens if len(reqs) > 1 else 0

    def reads(
        self, reqs: Sequence[Any], contexts: Sequence[int], *, min_saved: int = MIN_GROUP_TOKENS
    ) -> Sequence[int]:
        """[requests] KV tokens that attention reads for each context. What a group shares counts
        for its first request."""
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
    """The shape of a batch with the shared KV of its decodes. Prefills are left out: over a long
    prefix, computing takes longer than reading."""
    is_decode = batch.forward_mode.is_decode()
    num_repeated = prefixes.num_repeated(batch.reqs if is_decode else decodes_of(batch))
    return replace(shape, num_repeated=num_repeated) if num_repeated else shape
