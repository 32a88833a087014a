"""A node of the engine's radix tree as eviction sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from cosched.pool.radix import Shared


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


class KvNode(ABC):
    """A run of tokens whose KV is evicted as one. The node of an engine's tree derives from it: the
    abstract properties are the engine's, the attributes are known to cosched alone.

    parent      the node above; None: this is the root
    start       tokens above it
    num_tokens  of it
    last_use    number of the latest use, which grows
    is_online   an online request has used it
    keys        API keys that have paid for it (`cosched.predict.cost_account`)
    visit       the latest visit that it was part of; None: none has ended yet
    awaiting    waiting online requests that begin with all tokens from the root to its end
    passing     the same of waiting offline requests
    stops       tokens of it -> waiting offline requests that share exactly these and no more
    rank        where it stands in the order of eviction; None: it cannot be evicted now
    host_rank   the same of its copy in host memory
    """

    parent: KvNode | None
    start: int = 0
    num_tokens: int = 0
    last_use: int = 0
    is_online: bool = False
    keys: frozenset[str] = frozenset()
    visit: Visit | None = None
    awaiting: int = 0
    passing: int = 0
    stops: Mapping[int, int] = {}
    rank: Rank | None = None
    host_rank: Rank | None = None

    @property
    @abstractmethod
    def node_id(self) -> int:
        """Its number, in the order in which nodes were made."""

    @property
    @abstractmethod
    def on_device(self) -> bool:
        """Its KV is on the device."""

    @property
    @abstractmethod
    def on_host(self) -> bool:
        """A copy of it is in host memory."""

    @property
    @abstractmethod
    def num_holds(self) -> int:
        """Locks on it or below it: no part of it can be evicted while there are any."""

    @property
    @abstractmethod
    def num_below(self) -> int:
        """Children that are on the device. O(children)."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def references(self) -> float:
        """Waiting offline requests that will read a token of it, in the mean."""
        if not self.stops:
            return float(self.passing)
        partly = sum([tokens * count for tokens, count in self.stops.items()])
        return self.passing + partly / self.num_tokens

    def refer(self, num_tokens: int, by: int) -> None:
        """More, or fewer, waiting offline requests share so many of its tokens."""
        if num_tokens >= self.num_tokens:
            self.passing += by
            assert self.passing >= 0, f"{self.node_id=} {self.passing=}"
            return
        count = self.stops.get(num_tokens, 0) + by
        assert count >= 0, f"{self.node_id=} {num_tokens=} {count=}"
        others = {tokens: n for tokens, n in self.stops.items() if tokens != num_tokens}
        self.stops = {**others, num_tokens: count} if count else others

    def refer_all(self, readers: Iterable[Shared], *, page_size: int) -> None:
        """Count the waiting offline requests that share a prefix with it. readers: prefixes getting
        longer, each with the number of requests that share it."""
        longer = 0
        for reader in reversed([*readers]):
            count, tokens = reader.num_requests - longer, reader.prefix_len - self.start
            longer = reader.num_requests
            if tokens >= page_size:
                self.refer(min(tokens, self.num_tokens) // page_size * page_size, count)

    def cut_off(self, lower: KvNode) -> None:
        """It is now the first `num_tokens` of a node, which is below it from now on."""
        cut = self.num_tokens
        self.start = lower.start
        lower.start += cut
        lower.num_tokens -= cut
        self.last_use, self.is_online, self.visit = lower.last_use, lower.is_online, lower.visit
        self.awaiting, self.keys = lower.awaiting, lower.keys
        stops = lower.stops
        self.passing = lower.passing + sum(n for tokens, n in stops.items() if tokens >= cut)
        self.stops = {tokens: n for tokens, n in stops.items() if tokens < cut}
        lower.stops = {tokens - cut: n for tokens, n in stops.items() if tokens > cut}

    def upwards(self) -> Iterator[KvNode]:
        """It and all above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class KvNodes(Protocol):
    """A tree of them, by number."""

    @property
    def nodes(self) -> Mapping[int, KvNode]: ...
