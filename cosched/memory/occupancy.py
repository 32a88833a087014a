"""Use of the KV memory by class and by expected reuse (Echo Fig. 10)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from cosched.memory.node import KvNode, KvNodes
from cosched.memory.value import KvValue

LIKELY = 0.1
"""Chance from which on a context counts as one that will return."""

_NODES = 1024
"""Nodes of one step of a count."""

_PERIOD_S = 1.0
"""Between the ends of two counts."""


class KvUse(NamedTuple):
    """How plots and the page at ``/cosched`` show a use of KV memory: text, colour."""

    text: str
    colour: str


KV_USES: Mapping[str, KvUse] = {
    "running_online": KvUse("running online", "#0072B2"),
    "running_offline": KvUse("running offline", "#E69F00"),
    "returning": KvUse("cached: session likely to return", "#7FB9DD"),
    "referenced": KvUse("cached: waiting offline requests", "#F5D48F"),
    "dead": KvUse("cached: reuse unlikely", "#A8B5BD"),
    "free": KvUse("free", "#DFE3EA"),
}
"""The uses that add up to the capacity (`KvOccupancy`), from the bottom up."""


class HostOccupancy(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of host memory. The first five add up to its capacity.

    free        not used
    doubled     on the device as well
    returning, referenced, dead  of the rest, by what it is good for (`KvOccupancy`)
    demoted     evicted from the device since the start, with a copy left here
    to_host, to_device  copied since the start
    waited      of the first, copies that an eviction had to wait for
    """

    free: int
    doubled: int
    returning: int
    referenced: int
    dead: int
    demoted: int
    to_host: int
    to_device: int
    waited: int


class KvOccupancy(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of KV memory. The first six add up to the capacity.

    free             not allocated
    running_online   held by online requests, in the tree and outside
    running_offline  held by offline requests alone
    returning        cached, of sessions that are likely to continue
    referenced       cached, and waiting offline requests begin with it
    dead             cached, and no request is expected to use it
    kept             what offline requests leave to online ones
    evicted_online, evicted_offline  evicted since the start with no copy left in host memory, or
                     given up there, by the class that had used it
    evicted_referenced  of these, what waiting offline requests still began with
    evicted_returning   of these, what was likely to return
    saved            what requests that share pages would take more with pages of their own
    parted           last pages of requests that were copied to another page since the start
    host             None: there is no host memory
    """

    free: int
    running_online: int
    running_offline: int
    returning: int
    referenced: int
    dead: int
    kept: int
    evicted_online: int
    evicted_offline: int
    evicted_referenced: int
    evicted_returning: int
    saved: int
    parted: int
    host: HostOccupancy | None = None


class UseCount:
    """What KV in the tree that no request uses is good for, counted in steps: a tree with copies in
    host memory may have a hundred thousand nodes.

    on_device, on_host  tokens by use when the latest count ended
    """

    def __init__(self, tree: KvNodes, value: KvValue) -> None:
        self.on_device = Counter[str]()
        self.on_host = Counter[str]()
        self._tree = tree
        self._value = value
        self._under_way: Iterator[None] | None = None
        self._ended_s = -math.inf

    def step(self, now_s: float) -> None:
        """Look at some nodes; called between iterations."""
        if self._under_way is None and now_s - self._ended_s >= _PERIOD_S:
            self._under_way = self._count(now_s)
        if self._under_way is not None and next(self._under_way, self) is self:
            self._under_way = None

    def look(self, now_s: float) -> None:
        """Count now, if that is one step."""
        if len(self._tree.nodes) < _NODES:
            self._under_way, self._ended_s = None, -math.inf
            self.step(now_s)

    def _count(self, now_s: float) -> Iterator[None]:
        on_device, on_host = Counter[str](), Counter[str]()
        for place, node in enumerate([*self._tree.nodes.values()], start=1):  # some go meanwhile
            if node.on_device and not node.num_holds:
                on_device[self._use_of(node, now_s)] += node.num_tokens
            if node.on_host:
                use = "doubled" if node.on_device else self._use_of(node, now_s, on_host=True)
                on_host[use] += node.num_tokens
            if not place % _NODES:
                yield
        self.on_device, self.on_host, self._ended_s = on_device, on_host, now_s

    def _use_of(self, node: KvNode, now_s: float, *, on_host: bool = False) -> str:
        if self._value.chance_of_reuse(node, now_s, on_host=on_host) >= LIKELY:
            return "returning"
        return "referenced" if node.references else "dead"


def dealt(num_tokens: int, counts: Counter[str], *uses: str) -> dict[str, int]:
    """Tokens by use that add up to the current total; the rest is dead."""
    dealt: dict[str, int] = {}
    for use in uses:
        dealt[use] = min(counts[use], num_tokens)
        num_tokens -= dealt[use]
    return {**dealt, "dead": num_tokens}
