"""Memory at the moment of planning, and what of a waiting request is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KvState:
    """KV memory at the moment of planning [tokens]; requests: running and unfinished prefills.

    total      capacity = free + evictable + shared + online + offline
    free       not allocated
    evictable  in the radix tree and used by no request
    shared     in the radix tree and used by one or more, each token once
    shared_offline  the part of it that no online request has ever used
    online     held by online requests outside the tree
    offline    held by offline requests outside the tree
    reserved   set aside by the engine's rule for the output that running requests of both classes
               have still to generate
    promised   the part of it that plans have set aside (`Plan.promise`)
    next_step  taken by the next decode of all running requests: a token each, or a page where a
               request begins one; more with speculative decoding (`EngineCaps.decode_reserve`)
    kept       reserved for online requests by their expected need: offline requests do not hold
               more than the rest (Echo §5.3); 0: no such bound
    """

    total: int
    free: int
    evictable: int
    reserved: int
    shared: int = 0
    online: int = 0
    offline: int = 0
    promised: int = 0
    next_step: int = 0
    shared_offline: int = 0
    kept: int = 0

    @property
    def offline_held(self) -> int:
        """Tokens that offline requests hold, in the tree and outside."""
        return self.offline + self.shared_offline

    @property
    def headroom(self) -> int:
        """Tokens that new requests may take beside what running requests will need."""
        return self.free + self.evictable - self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The head of a waiting request that is in the radix tree now, up to a checkpoint if prefixes
    are found only there (`Memory.has_checkpoints`).

    cached     matched tokens
    evictable  of these, held by no running request: admitting the request takes them out
               of `KvState.evictable`
    to_load    of these, not on the device: admitting it takes as many free tokens
    others     name of another memory -> most tokens of it that admitting the request takes out of
               what is free or evictable there
    """

    cached: int
    evictable: int
    to_load: int = 0
    others: Mapping[str, int] = field(default_factory=dict)
