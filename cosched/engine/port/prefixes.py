"""Which of the requests that run together read the same KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cosched.core.batch import BatchShape
from cosched.engine.port.attention import Launch, launched
from cosched.engine.port.batch import decodes_of
from cosched.engine.port.request import prefix_key, token_ids
from cosched_kernels.groups import Groups, PrefixForest, Shared

MIN_GROUP_TOKENS = 512
"""KV tokens that a group must save to be one: its members' pieces cost as much as some hundred."""

_SWEEP_AT_LEAST = 32
"""Requests that are known before the first look for those that run no more."""


@dataclass(slots=True)
class _Answered:
    """What was answered while a batch is launched: its timing and its attention ask the same, and
    nothing changes between them.

    reqs, members      those asked about last
    groups, min_saved  of the whole batch, and what each had to save
    """

    launch: Launch | None
    reqs: Sequence[Any] = ()
    members: list[int] = field(default_factory=list)
    groups: Groups | None = None
    min_saved: int = 0


class RunningPrefixes:
    """What running requests have in common of the radix tree. All of it is known on the host. What
    is asked of some depends on them alone, so all that ask in a process share one of these (`of`).
    """

    def __init__(self, *, page_size: int) -> None:
        self._forest = PrefixForest(page_size=page_size)
        self._req_of: dict[int, Any] = {}
        self._sweep_at = _SWEEP_AT_LEAST
        self._answered = _Answered(None)

    @classmethod
    def of(cls, owner: Any) -> RunningPrefixes:
        """The one for the requests of a scheduler, which is that of its model runner."""
        pool = owner.req_to_token_pool
        found: RunningPrefixes | None = getattr(pool, "cosched_prefixes", None)
        if found is None:
            found = pool.cosched_prefixes = cls(page_size=owner.page_size)
        return found

    def __len__(self) -> int:
        """Requests that it knows."""
        return len(self._req_of)

    def groups(self, reqs: Sequence[Any], *, min_saved: int = MIN_GROUP_TOKENS) -> Groups:
        """O(requests), and O(prompt) for each that nobody has asked about since more or less of it
        is in the tree. The same object for the same requests, for a while.

        min_saved  KV tokens that a group must save
        """
        launch = launched()
        if self._answered.launch is not launch:
            self._answered = _Answered(launch)
        answered = self._answered
        # All that is launched, and not some of it or a plan of what comes next.
        is_all = launch is not None and reqs is launch.batch.reqs
        if is_all and answered.groups is not None and answered.min_saved == min_saved:
            return answered.groups
        members = self._members(reqs, answered)
        groups = self._forest.groups(members, min_saved=min_saved)
        if launch is not None:
            answered.reqs, answered.members = reqs, members
            if is_all:
                answered.groups, answered.min_saved = groups, min_saved
        return groups

    def _members(self, reqs: Sequence[Any], answered: _Answered) -> list[int]:
        """Each touches memory that nobody has touched for an iteration, so what was found of those
        at the end, a mixed batch's decodes, is taken from there."""
        num_new = len(reqs) - len(answered.reqs)
        if num_new < 0 or reqs[num_new:] != answered.reqs:
            num_new = len(reqs)
        members = []
        for req in reqs[:num_new]:
            try:
                # Not by its id: clients choose that, and may use it again for another prompt.
                member = req.cosched_members[req.kv.cache_protected_len]
            except (AttributeError, KeyError):
                member = self._member(req)
            members.append(member)
        return members if num_new == len(reqs) else members + answered.members

    def forget(self, req: Any) -> None:
        """It has ended. Of one that ends unnoticed no more than its memory stays, and not for
        long."""
        for member in vars(req).pop("cosched_members", {}).values():
            self._forest.remove(member)
            del self._req_of[member]

    def _member(self, req: Any) -> int:
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
        """Forget those whose KV is the tree's no more, or is in part: they have ended, or wait."""
        for req in list(self._req_of.values()):
            if req.kv.cache_protected_len not in req.cosched_members:
                self.forget(req)
        self._sweep_at = max(2 * len(self._req_of), _SWEEP_AT_LEAST)

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
    num_repeated = prefixes.num_repeated(batch.reqs if is_decode else decodes_of(batch))
    return replace(shape, num_repeated=num_repeated) if num_repeated else shape
