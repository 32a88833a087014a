"""Use of the KV memory by class and by expected reuse (Echo Fig. 10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cosched.memory.tree import KvTree
from cosched.memory.value import KvValue

LIKELY = 0.1
"""Chance from which on a context counts as one that will return."""


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
    waited      those of the first that an eviction had to wait for
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
    is_watched       the order is cosched's; False: the engine's own has taken over
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
    is_watched: bool
    host: HostOccupancy | None = None


def occupancy_of(
    tree: KvTree,
    value: KvValue,
    *,
    now_s: float,
    free: int,
    own: tuple[int, int],
    kept: int,
    evicted: Counter[str],
    shared_pages: tuple[int, int],
    is_watched: bool,
    host: HostOccupancy | None = None,
) -> KvOccupancy:
    """own: tokens that running online and offline requests hold outside the tree;
    shared_pages: the fields `saved` and `parted`. O(nodes)."""
    returning = referenced = 0
    for node in tree.nodes.values():
        if node.num_holds or not node.on_device:
            continue
        if value.chance_of_reuse(node, now_s) >= LIKELY:
            returning += node.num_tokens
        elif node.references:
            referenced += node.num_tokens
    return KvOccupancy(
        free=free,
        running_online=tree.num_held_online + own[0],
        running_offline=tree.num_held_offline + own[1],
        returning=returning,
        referenced=referenced,
        dead=tree.num_evictable - returning - referenced,
        kept=kept,
        evicted_online=evicted["online"],
        evicted_offline=evicted["offline"],
        evicted_referenced=evicted["referenced"],
        evicted_returning=evicted["returning"],
        saved=shared_pages[0],
        parted=shared_pages[1],
        is_watched=is_watched,
        host=host,
    )


def host_occupancy_of(
    tree: KvTree,
    value: KvValue,
    *,
    now_s: float,
    free: int,
    demoted: int,
    transferred: Mapping[str, int],
) -> HostOccupancy:
    """transferred: the last three fields. O(nodes)."""
    counts = Counter[str]()
    for node in tree.nodes.values():
        if not node.on_host:
            continue
        if node.on_device:
            use = "doubled"
        elif value.chance_of_reuse(node, now_s, on_host=True) >= LIKELY:
            use = "returning"
        else:
            use = "referenced" if node.references else "dead"
        counts[use] += node.num_tokens
    return HostOccupancy(
        free=free,
        doubled=counts["doubled"],
        returning=counts["returning"],
        referenced=counts["referenced"],
        dead=counts["dead"],
        demoted=demoted,
        to_host=transferred["to_host"],
        to_device=transferred["to_device"],
        waited=transferred["waited"],
    )
