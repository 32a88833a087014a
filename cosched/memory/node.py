"""A node of the engine's radix tree as eviction sees it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cosched.pool.radix import TOKEN_BYTES


class PathNode(NamedTuple):
    """A node of the engine's tree on the way from the root. start, end: tokens from the root."""

    node_id: int
    start: int
    end: int


class Visit(NamedTuple):
    """An online request that has used a context and gone, maybe to come back with the next turn.

    kind        of visits that come back alike (`cosched.memory.reuse`)
    end_s       when it ended [s]
    num_tokens  of its context [tokens]
    ttft_s      its target for the first token [s]; None: it had none
    """

    kind: int
    end_s: float
    num_tokens: int
    ttft_s: float | None


Rank: TypeAlias = tuple[float, int, int, "KvNode", "KvNode | None"]
"""Place of a node in an order of eviction: its value there, its last use, its number; then the node
and the one above it (None: a root). Numbers are unique, so these order nothing."""


@dataclass(slots=True, eq=False, repr=False)
class KvNode:
    """A run of tokens whose KV is evicted as one. Read-only outside of this module.

    node_id     the engine's
    segment     its token ids, 4 bytes each
    start       tokens above it
    on_device   its KV is on the device
    on_host     a copy of it is in host memory
    num_below   children that are on the device
    num_holds   locks on it or below it: no part of it can be evicted while there are any
    last_use    number of the latest use (`KvTree.num_uses`)
    is_online   an online request has used it
    keys        API keys that have paid for it (`cosched.predict.account`)
    visit       the latest visit that it was part of; None: none has ended yet
    awaiting    waiting online requests that begin with all tokens from the root to its end
    passing     the same of waiting offline requests
    stops       tokens of it -> waiting offline requests that share exactly these and no more
    namespace   of a root: requests of others share nothing with it
    rank        where it stands in the order of eviction; None: it cannot be evicted now
    host_rank   the same of its copy in host memory
    """

    node_id: int
    parent: KvNode | None
    start: int
    segment: bytes
    children: dict[bytes, KvNode] = field(default_factory=dict)
    num_holds: int = 0
    on_device: bool = True
    on_host: bool = False
    num_below: int = 0
    last_use: int = 0
    is_online: bool = False
    keys: frozenset[str] = frozenset()
    visit: Visit | None = None
    awaiting: int = 0
    passing: int = 0
    stops: dict[int, int] = field(default_factory=dict)
    namespace: Hashable = None
    rank: Rank | None = None
    host_rank: Rank | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.segment) // TOKEN_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self.segment) // TOKEN_BYTES

    @property
    def is_leaf(self) -> bool:
        """It can be evicted from the device now."""
        return (
            self.on_device and not self.num_holds and not self.num_below and self.parent is not None
        )

    @property
    def has_spare_copy(self) -> bool:
        """Its copy in host memory can be given up now: there is another on the device, or nothing
        hangs below it."""
        if not self.on_host:
            return False
        return self.on_device or not (self.children or self.num_holds)

    @property
    def references(self) -> float:
        """Waiting offline requests that will read a token of it, in the mean."""
        if not self.stops:
            return float(self.passing)
        partly = sum([tokens * count for tokens, count in self.stops.items()])
        return self.passing + partly / self.num_tokens

    def head(self, num_tokens: int) -> tuple[Hashable, bytes]:
        """The namespace, and the token ids from the root up to `num_tokens` of the node itself, 4
        bytes each. O(depth + tokens)."""
        segments = [self.segment[: num_tokens * TOKEN_BYTES]]
        node = self.parent
        while node is not None and node.parent is not None:
            segments.append(node.segment)
            node = node.parent
        return node.namespace if node is not None else None, b"".join(reversed(segments))

    def upwards(self) -> Iterator[KvNode]:
        """It and all above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent
