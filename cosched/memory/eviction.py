"""Which KV goes first: the order of the evictable leaves, and what is lost by each.

Two questions are kept apart. The *order* says who goes first; each published order is one. The
*worth* says what that costs, in seconds of the device: what is lost when a node goes is what has to
be computed anew times the chance that somebody comes for it. The order ``value`` evicts what is
worth least per token.

Where a copy is left in host memory only the way back is lost. The copies have an order of their
own: what is lost with a copy is what computing anew costs more than loading.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

from sortedcontainers import SortedList

from cosched.core.batch import BatchTotals
from cosched.core.estimates import Predictor
from cosched.memory.returns import ReturnModel
from cosched.memory.tree import KvNode, Rank

_CERTAIN = 1000.0
"""More than what any node's loss makes late and computes again costs, by the price of a token with
none before it."""

_BESIDE = 0.1
"""What a second of copying counts that nobody waits for."""


class Prices:
    """What computing prompt tokens costs at each depth [s], from the predictor of iterations."""

    _STEP = 1024
    _NUM_STEPS = 128

    def __init__(self) -> None:
        self._per_token = [0.0] * self._NUM_STEPS
        self._sums = [0.0] * (self._NUM_STEPS + 1)
        self._next = 0

    def refresh(self, predictor: Predictor, num_steps: int = _NUM_STEPS) -> None:
        """Ask the predictor anew, which learns: at so many depths, at the others in turn later."""
        for step in range(self._next, self._next + num_steps):
            step %= self._NUM_STEPS
            totals = BatchTotals()
            totals.add_prefill(self._STEP, step * self._STEP)
            self._per_token[step] = predictor.predict_s(totals) / self._STEP
        self._next = (self._next + num_steps) % self._NUM_STEPS
        self._sums = [0.0, *itertools.accumulate(n * self._STEP for n in self._per_token)]

    def per_token(self, depth: int) -> float:
        """Seconds for one token with `depth` tokens before it."""
        return self._per_token[min(depth // self._STEP, self._NUM_STEPS - 1)]

    @property
    def unit_s(self) -> float:
        """Seconds for one token with none before it."""
        return self._per_token[0]

    def to_units(self, seconds: float) -> float:
        """Seconds in prices of a token with none before it; 0.0 where that is not known."""
        unit_s = self._per_token[0]
        return seconds / unit_s if unit_s else 0.0

    def relative(self, depth: int) -> float:
        """`per_token` by `unit_s`: learning how fast the device is hardly changes it."""
        unit_s = self._per_token[0]
        return self.per_token(depth) / unit_s if unit_s else 1.0

    def seconds(self, start: int, end: int) -> float:
        """For the tokens from `start` to `end`."""
        return self._until(end) - self._until(start)

    def _until(self, depth: int) -> float:
        step, rest = divmod(depth, self._STEP)
        if step >= self._NUM_STEPS:
            beyond = depth - self._NUM_STEPS * self._STEP
            return self._sums[-1] + beyond * self._per_token[-1]
        return self._sums[step] + rest * self._per_token[step]


class Worth:
    """What a node is worth: what is expected to be lost per token if it goes, in prices of a token
    with none before it (`Prices.unit_s`).

    *Offline*: those who wait for it are known. Requests that begin alike run one after the other,
    so what is evicted is computed once more and no more often; each more that waits makes it surer
    that one comes before memory is short again.

    *Waiting online requests*, new or preempted: it is certain that they resume, and a user waits.
    What they will use is worth more than all else, `_CERTAIN` times its price, and is evicted last.

    *Online*: the chance that the session goes on (`ReturnModel`), times what is recomputed then. A
    second of recomputation that makes a chat user wait weighs more than one of throughput, by
    `late_weight`: each beyond `free_share` of the target for the first token, which goes unnoticed
    (the idea of tail-optimized LRU, Zhang et al. 2025), up to the target. What is lost beyond it
    makes nobody late who was not: so one context goes rather than the ends of many.

    *Host memory*: what has a copy there costs `transfer_s` per token, if that is less.
    """

    def __init__(
        self,
        returns: ReturnModel,
        prices: Prices,
        *,
        late_weight: float = 4.0,
        free_share: float = 0.1,
    ) -> None:
        self.returns = returns
        self.prices = prices
        self._late_weight = late_weight
        self._free_share = free_share
        self.transfer_s = math.inf
        """A token from or to host memory [s]; inf: there is none."""

    def __call__(self, node: KvNode, now_s: float) -> float:
        """Per token, of its place on the device."""
        return self._lost(node, now_s, is_loaded=node.on_host)

    def of_copy(self, node: KvNode, now_s: float) -> float:
        """Per token, of its copy in host memory, or of one if there were one, where it is on the
        device no longer: what computing it anew costs more than loading it."""
        if not self.has_host:
            return 0.0
        computed = self._lost(node, now_s, is_loaded=False, on_host=True)
        return max(computed - self._lost(node, now_s, is_loaded=True, on_host=True), 0.0)

    @property
    def has_host(self) -> bool:
        """There is host memory to copy to."""
        return self.transfer_s < math.inf

    @property
    def loading_share(self) -> float:
        """What loading a token takes of what computing it anew would, 0 to 1; 1: there is no host
        memory."""
        if not self.has_host:
            return 1.0
        return min(self.prices.to_units(self.transfer_s), 1.0)

    def gain_of_copying(self, node: KvNode, now_s: float, *, is_ahead: bool = True) -> float:
        """Per token, of copying it to host memory before it is evicted: `of_copy` less the way
        there. Above 0: it is worth it.

        is_ahead: iterations go on meanwhile, so that the way costs little
        """
        if not self.has_host:
            return 0.0
        cost = self.prices.to_units(self.transfer_s) * (_BESIDE if is_ahead else 1.0)
        return self.of_copy(node, now_s) - cost

    def _lost(self, node: KvNode, now_s: float, *, is_loaded: bool, on_host: bool = False) -> float:
        """on_host: as long as it can stay in host memory, and not on the device."""
        if node.awaiting:
            return _CERTAIN * self._price(node, is_loaded=is_loaded)
        chance = 0.0
        references = node.references
        if references:
            chance = 1.0 - 0.5**references
        visit = node.visit
        if visit is not None:
            returns = self.chance_of_return(node, now_s, on_host=on_host)
            if visit.ttft_s:
                returns *= 1.0 + self._late_weight * self._late_share(
                    node, max(visit.num_tokens, node.end), visit.ttft_s, is_loaded=is_loaded
                )
            chance = max(chance, returns)
        return chance * self._price(node, is_loaded=is_loaded)

    def _price(self, node: KvNode, *, is_loaded: bool) -> float:
        """Of a token of it that is computed or loaded again."""
        price = self.prices.relative(node.start)
        return min(price, self.prices.to_units(self.transfer_s)) if is_loaded else price

    def _late_share(self, node: KvNode, end: int, ttft_s: float, *, is_loaded: bool) -> float:
        """Of the time that computing a node's tokens anew takes, the share that brings a first
        token nearer to being late; what is behind the node, up to `end`, is lost already."""
        behind_s = self._seconds(node.end, end, is_loaded=is_loaded)
        lost_s = self._seconds(node.start, end, is_loaded=is_loaded)
        if lost_s <= behind_s:
            return 0.0
        late = self._late(lost_s / ttft_s) - self._late(behind_s / ttft_s)
        return late * ttft_s / (lost_s - behind_s)

    def _late(self, share: float) -> float:
        """How near to being late, 0 to 1; share: of the target for the first token that goes into
        computing anew."""
        return min(max((share - self._free_share) / (1.0 - self._free_share), 0.0), 1.0)

    def _seconds(self, start: int, end: int, *, is_loaded: bool) -> float:
        seconds = self.prices.seconds(start, end)
        return min(seconds, (end - start) * self.transfer_s) if is_loaded else seconds

    def chance_of_return(self, node: KvNode, now_s: float, *, on_host: bool = False) -> float:
        """That the session of an online context goes on while it can be kept on the device, or in
        host memory; 1 where its request waits already."""
        if node.awaiting:
            return 1.0
        visit = node.visit
        if visit is None:
            return 0.0
        return self.returns.chance(visit.kind, now_s - visit.end_s, on_host=on_host)

    def next_change_s(self, node: KvNode, now_s: float) -> float:
        """When it changes by time alone [s]; inf: it does not."""
        if node.visit is None:
            return math.inf
        return node.visit.end_s + self.returns.next_change_s(now_s - node.visit.end_s)


class EvictionOrder(Protocol):
    is_worth: bool
    """Its numbers are those of `Worth`."""

    def __call__(self, node: KvNode, now_s: float) -> float:
        """Nodes of smaller numbers go first; of equal ones the least recently used."""
        ...

    def next_change_s(self, node: KvNode, now_s: float) -> float: ...


class EchoOrder:
    """Echo §4.2: offline KV with future references, by their number, above finished online KV
    (0.5), above offline KV without (0). Running requests hold theirs."""

    is_worth = False

    def __init__(self, worth: Worth) -> None:
        pass

    def __call__(self, node: KvNode, now_s: float) -> float:
        references = node.passing + sum(node.stops.values())
        return float(references) if references else 0.5 * node.is_online

    def next_change_s(self, node: KvNode, now_s: float) -> float:
        return math.inf


class ValueOrder:
    """What is worth least per token goes first."""

    is_worth = True

    def __init__(self, worth: Worth) -> None:
        self._worth = worth
        self.next_change_s = worth.next_change_s

    def __call__(self, node: KvNode, now_s: float) -> float:
        return self._worth(node, now_s)


class CopyOrder:
    """Copies in host memory: of what is expected to be lost with them, the least goes first. What
    stays on the device has no need of one."""

    is_worth = False

    def __init__(self, worth: Worth) -> None:
        self._worth = worth
        self.next_change_s = worth.next_change_s

    def __call__(self, node: KvNode, now_s: float) -> float:
        if node.on_device and node.rank is None:
            return 0.0
        return self._worth.of_copy(node, now_s)


ORDERS: Mapping[str, type[ValueOrder] | type[EchoOrder]] = {
    "value": ValueOrder,
    "echo": EchoOrder,
}


_KEPT_S, _PARTS = 2.0, 64
"""How long the rank of a node stands whose turn comes after those below it [s]: prices and chances
are learned anew all the time. Up to twice that, in so many parts, or all would be looked at again
in the same plan."""

_REFRESHED = 4
"""Leaves that are valued anew with each plan, whether or not anything is known to have changed."""


class Eviction(NamedTuple):
    """A node that goes. keeps_head: somebody may come for it, so only its tail goes where that is
    enough."""

    node_id: int
    keeps_head: bool


class Leaves:
    """What can be evicted of a `KvTree`, in the order of eviction. Every change is O(log n).

    Its nodes on the device (`KvNode.rank`), or their copies in host memory (`KvNode.host_rank`).
    """

    def __init__(
        self, order: EvictionOrder, worth: Worth, *, slot: Literal["rank", "host_rank"] = "rank"
    ) -> None:
        self.now_s = 0.0
        self._slot = slot
        self._order = order
        self.worth = worth
        self._nodes: OrderedDict[int, KvNode] = OrderedDict()
        self._sorted: SortedList[Rank] = SortedList()
        self._timers: list[tuple[float, int]] = []
        self._wakes_s: dict[int, float] = {}
        """Of each leaf, its one timer that counts."""
        self.curve: LossCurve | None = None
        """Of the leaves as they are; made anew when they change."""

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, node: KvNode) -> None:
        self.curve = None
        rank = self._rank(node)
        setattr(node, self._slot, rank)
        self._nodes[node.node_id] = node
        self._sorted.add(rank)
        self._set_timer(node)

    def discard(self, node: KvNode) -> None:
        self.curve = None
        self._sorted.remove(getattr(node, self._slot))
        del self._nodes[node.node_id]
        self._wakes_s.pop(node.node_id, None)
        setattr(node, self._slot, None)

    def changed(self, node: KvNode) -> None:
        rank = self._rank(node)
        before = getattr(node, self._slot)
        if rank != before:
            self.curve = None
            self._sorted.remove(before)
            self._sorted.add(rank)
            setattr(node, self._slot, rank)
            self._set_timer(node)

    def advance(self, now_s: float) -> None:
        """Say what time it is."""
        self.now_s = now_s
        timers = self._timers
        while timers and timers[0][0] <= now_s:
            at_s, node_id = heapq.heappop(timers)
            if self._wakes_s.get(node_id) == at_s:
                node = self._nodes[node_id]
                self.changed(node)
                self._set_timer(node)
        # Prices and chances are learned anew all the time: everyone has a turn.
        for _ in range(min(_REFRESHED, len(self._nodes))):
            node_id, node = self._nodes.popitem(last=False)
            self._nodes[node_id] = node
            self.changed(node)

    def first(self) -> KvNode | None:
        """The one to evict next. O(1)."""
        return self._sorted[0][4] if self._sorted else None

    def sorted_nodes(self) -> Iterator[KvNode]:
        """As they are, in the order of eviction. Valid until a change."""
        for rank in self._sorted:
            yield rank[4]

    def next_to_go(self, num_tokens: int) -> list[Eviction]:
        """What goes for so many tokens."""
        evictions: list[Eviction] = []
        for node in self.in_order() if num_tokens > 0 else ():
            evictions.append(Eviction(node.node_id, self._order(node, self.now_s) > 0))
            num_tokens -= node.num_tokens
            if num_tokens <= 0:
                break
        return evictions

    def in_order(self) -> Iterator[KvNode]:
        """Leaves and what becomes a leaf when they go, in the order of eviction. Valid until a
        change."""
        return (rank[4] for rank in self.ranks())

    def ranks(self) -> Iterator[Rank]:
        """Of the same."""
        left: dict[int, int] = {}
        freed: list[Rank] = []
        for rank in self._sorted:
            while freed and freed[0] < rank:
                yield self._evict_freed(left, freed)
            yield rank
            # Most of what goes is below what is held, or below a root: nothing else is looked at.
            parent = rank[5]
            if parent is not None and not parent.num_holds:
                self._free(parent, left, freed)
        while freed:
            yield self._evict_freed(left, freed)

    def _evict_freed(self, left: dict[int, int], freed: list[Rank]) -> Rank:
        rank = heapq.heappop(freed)
        parent = rank[5]
        if parent is not None and not parent.num_holds:
            self._free(parent, left, freed)
        return rank

    def _free(self, parent: KvNode, left: dict[int, int], freed: list[Rank]) -> None:
        """One below it goes."""
        num_left = left.get(parent.node_id, parent.num_below) - 1
        left[parent.node_id] = num_left
        if not num_left:
            heapq.heappush(freed, self._freed_rank(parent))

    def _freed_rank(self, node: KvNode) -> Rank:
        """Kept for a while, as the ranks of leaves are: of many leaves the prompt hangs above."""
        if node.freed is None or node.freed[1] <= self.now_s:
            most_s = self.now_s + _KEPT_S * (1 + node.node_id % _PARTS / _PARTS)
            until_s = min(self._order.next_change_s(node, self.now_s), most_s)
            node.freed = self._rank(node), until_s
        return node.freed[0]

    def loss_s(self, num_tokens: int) -> float:
        """What evicting so many tokens costs, by `Worth` [s]; of all there are where
        there are fewer."""
        if self.curve is None:
            self.curve = LossCurve(self)
        return self.curve.seconds(num_tokens)

    def price_of(self, rank: Rank) -> float:
        """What is expected to be lost with each of its tokens [s]."""
        worth = self.worth
        if self._order.is_worth and not worth.has_host:
            return rank[0] * worth.prices.unit_s
        node = rank[4]
        price = rank[0] if self._order.is_worth else worth(node, self.now_s)
        if not node.on_host:
            # It is copied first where that costs less.
            price -= max(worth.gain_of_copying(node, self.now_s), 0.0)
        return price * worth.prices.unit_s

    def _rank(self, node: KvNode) -> Rank:
        parent = node.parent
        assert parent is not None
        return (
            self._order(node, self.now_s),
            node.last_use,
            node.node_id,
            node.num_tokens,
            node,
            None if parent.parent is None else parent,
        )

    def _set_timer(self, node: KvNode) -> None:
        at_s = self._order.next_change_s(node, self.now_s)
        if at_s < math.inf and self._wakes_s.get(node.node_id) != at_s:
            self._wakes_s[node.node_id] = at_s
            heapq.heappush(self._timers, (at_s, node.node_id))


class LossCurve:
    """Tokens evicted -> seconds lost, worked out as far as somebody asks."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._order = leaves.ranks()
        self._tokens = [0]
        self._seconds = [0.0]

    def seconds(self, num_tokens: int) -> float:
        tokens, seconds, price_of = self._tokens, self._seconds, self._leaves.price_of
        while tokens[-1] < num_tokens:
            found = next(self._order, None)
            if found is None:
                return seconds[-1]
            num_more = found[3]
            tokens.append(tokens[-1] + num_more)
            seconds.append(seconds[-1] + num_more * price_of(found))
        # The part of the last node is lost as a part: what is cut is its tail.
        index = bisect_left(tokens, num_tokens)
        if index == 0:
            return 0.0
        share = (num_tokens - tokens[index - 1]) / (tokens[index] - tokens[index - 1])
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])
