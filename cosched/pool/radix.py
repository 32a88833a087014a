"""A compressed radix tree over the token ids of waiting requests, kept in depth-first order.

HyGen (§4.3, App. A.2) orders offline requests by a depth-first walk of their prefix tree, so that
the KV of a shared prefix is computed once and used while it is cached. Here that order is a linked
list through the requests, kept while the tree changes: every subtree is one unbroken run of it, and
a node knows the first and the last of its run. The head of the order and the next request are one
step away; nothing is ever sorted.

Costs: *depth* is the number of nodes from the root to a request; token ids are compared and copied
at the speed of ``memcmp``. All that changes the tree is O(depth + tokens compared).
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

TOKEN_BYTES = 4
_FEW = 4
"""Children kept in a tuple: most inner nodes have two, and a dict is 180 bytes more."""

_unpack_token = struct.Struct("=i").unpack_from


class Place(Generic[T]):
    """Where a waiting item stands. In at most one tree at a time.

    num_tokens  length of its token ids [tokens]; set by `RadixTree.insert`
    """

    __slots__ = ("_next", "_node", "_prev", "item", "num_tokens")

    _node: Node[T]
    _prev: Place[T] | None
    _next: Place[T] | None

    def __init__(self, item: T) -> None:
        self.item = item
        self.num_tokens = 0

    @property
    def next(self) -> Place[T] | None:
        """The one after it in depth-first order. O(1)."""
        return self._next

    def enclosing(self) -> Iterator[Node[T]]:
        """The nodes it is under, innermost first."""
        node: Node[T] | None = self._node
        while node is not None:
            yield node
            node = node.parent

    def node_at(self, num_tokens: int) -> Node[T]:
        """The node of all that share its first `num_tokens` tokens. O(depth)."""
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens=} {self.num_tokens=}"
        node, end = self._node, self.num_tokens
        while node.parent is not None and end - node.num_segment_tokens >= num_tokens:
            end -= node.num_segment_tokens
            node = node.parent
        return node

    def packed(self) -> bytes:
        """Its token ids, 4 bytes each."""
        return b"".join(reversed([node.segment for node in self.enclosing()]))

    def innermost_shared(self) -> Node[T]:
        """The innermost node that it is under and another is too; the top when it is alone there.
        O(depth)."""
        node = self._node
        while node.num_requests == 1 and node.parent is not None:
            node = node.parent
        return node


class Node(Generic[T]):
    """All waiting items that begin with the segments from the root to here. Read-only outside.

    key           what its parent knows it by: the first token of its segment, or, below the
                  top, a prefix key
    segment       token ids, 4 bytes each; empty at the top and at the root of each prefix key
    num_requests  items in it
    num_tokens    sum of their whole lengths [tokens]
    prefix_len    tokens from the root to here, O(depth)
    first, last   ends of its run of the depth-first order; None only at the top of an empty tree
    """

    __slots__ = (
        "_children",
        "first",
        "key",
        "last",
        "num_requests",
        "num_tokens",
        "parent",
        "segment",
    )

    def __init__(self, key: Hashable, segment: bytes) -> None:
        self.key = key
        self.segment = segment
        self.parent: Node[T] | None = None
        self._children: tuple[Node[T], ...] | dict[Hashable, Node[T]] = ()
        self.num_requests = 0
        self.num_tokens = 0
        self.first: Place[T] | None = None
        self.last: Place[T] | None = None

    @property
    def children(self) -> Iterable[Node[T]]:
        """In no particular order: the order is that of the places."""
        children = self._children
        return children.values() if isinstance(children, dict) else children

    @property
    def num_children(self) -> int:
        return len(self._children)

    @property
    def num_segment_tokens(self) -> int:
        return len(self.segment) // TOKEN_BYTES

    @property
    def prefix_len(self) -> int:
        above = 0 if self.parent is None else self.parent.prefix_len
        return above + self.num_segment_tokens

    def child(self, key: Hashable) -> Node[T] | None:
        children = self._children
        if isinstance(children, dict):
            return children.get(key)
        for child in children:
            if child.key == key:
                return child
        return None

    def _adopt(self, child: Node[T]) -> None:
        """Make a node a child, in the place of another of that key if there is one."""
        child.parent = self
        if isinstance(self._children, dict):
            self._children[child.key] = child
            return
        others = [other for other in self._children if other.key != child.key]
        if len(others) < _FEW:
            self._children = (*others, child)
        else:
            self._children = {node.key: node for node in (*others, child)}

    def _disown(self, child: Node[T]) -> None:
        if isinstance(self._children, dict):
            del self._children[child.key]
            if not self._children:
                self._children = ()
        else:
            self._children = tuple(other for other in self._children if other is not child)


class Shared(NamedTuple):
    """Waiting requests that share a prefix of `prefix_len` tokens."""

    prefix_len: int
    num_requests: int


class RadixTree(Generic[T]):
    """Waiting items in depth-first order of their token ids.

    Under a node, children and items that end there stand in the order in which they came, except
    where one was led to the front (`insert` with ``front``, `admit`, `promote`). Items of different
    prefix keys share nothing. Segments hold each distinct token once, as 4 bytes: ids outside 32
    bits are taken modulo 2**32.
    """

    def __init__(self) -> None:
        self.num_distinct_tokens = 0
        """What serving everything from an empty cache computes at least [tokens]."""
        self._top: Node[T] = Node(None, b"")

    @property
    def num_tokens(self) -> int:
        """Sum of the lengths of all items [tokens]."""
        return self._top.num_tokens

    @property
    def head(self) -> Place[T] | None:
        """First in depth-first order. O(1)."""
        return self._top.first

    def __len__(self) -> int:
        return self._top.num_requests

    def __iter__(self) -> Iterator[Place[T]]:
        """Depth first; O(1) per item. Valid until the tree changes."""
        place = self._top.first
        while place is not None:
            yield place
            place = place._next

    def insert(
        self, place: Place[T], token_ids: Sequence[int], *, key: Hashable, front: bool = False
    ) -> None:
        """Put a place that is in no tree behind those that share most with it.

        With ``front`` it leads the whole order instead, and those that share most with it come
        next: for a request that was stopped and whose KV is cached.
        """
        data = pack(token_ids)
        place.num_tokens = len(data) // TOKEN_BYTES
        place._node = self._grow(data, key)
        self._link(place)
        if front:
            self._lead(place._node, place, place)

    def remove(self, place: Place[T]) -> None:
        """Take a place out; the order of the others stays."""
        self._detach(place)

    def admit(self, place: Place[T]) -> None:
        """Take a place out and let those that share most with it lead the order, as its KV is about
        to be computed. Nothing moves when it was the head."""
        in_order = place is self._top.first
        node = self._detach(place)
        if not in_order:
            self._lead_node(node)

    def nearest(self, token_ids: Sequence[int], *, key: Hashable) -> tuple[Node[T] | None, int]:
        """The node of those that share most with these tokens, and how many they share; None when
        they share nothing. O(depth + tokens compared). Valid until the tree changes."""
        node, num_bytes = None, 0
        for node, num_bytes in self._walk(pack(token_ids), key):  # noqa: B007
            pass
        return node, num_bytes // TOKEN_BYTES

    def promote(self, node: Node[T], *, behind_head: bool = False) -> None:
        """Let all under a node lead the order.

        With `behind_head` what is begun stays first: where the way to the node parts from the way
        to the head of the order, the node's branch comes right behind the head's. Nothing moves
        when the head is under the node itself. O(depth).
        """
        self._lead_node(node, behind=self._top.first if behind_head else None)

    def path(self, packed: bytes, *, key: Hashable) -> list[Shared]:
        """Requests that share the heads of packed token ids: one entry per node, prefixes getting
        longer. A prefix of n tokens is shared by the requests of the first entry with
        ``prefix_len >= n``, and by none if there is no such entry. O(depth + tokens compared)."""
        return [
            Shared(end // TOKEN_BYTES, node.num_requests) for node, end in self._walk(packed, key)
        ]

    def find(self, token_ids: Sequence[int], *, key: Hashable, num_tokens: int) -> Node[T] | None:
        """The node of all that share the first `num_tokens` of these tokens; None when none
        does. O(depth + tokens compared). Valid until the tree changes."""
        assert 0 < num_tokens <= len(token_ids), f"{num_tokens=} {len(token_ids)=}"
        data = pack(token_ids[:num_tokens])
        return next((node for node, end in self._walk(data, key) if end == len(data)), None)

    def shared_len(self, packed: bytes, place: Place[T], *, key: Hashable) -> int:
        """Tokens of the longest common prefix of a place and packed token ids of this prefix key.
        O(depth + tokens compared)."""
        above = set(place.enclosing())
        num_bytes = 0
        for node, end in self._walk(packed, key):
            if node not in above:
                break
            num_bytes = end
        return num_bytes // TOKEN_BYTES

    def _grow(self, data: bytes, key: Hashable) -> Node[T]:
        """The node whose path is exactly these tokens, made where there is none."""
        node = self._top.child(key)
        if node is None:
            node = Node(key, b"")
            self._top._adopt(node)
        end = 0
        while end < len(data):
            child = node.child(_token_at(data, end))
            if child is None:
                child = Node(_token_at(data, end), data[end:])
                node._adopt(child)
                self.num_distinct_tokens += child.num_segment_tokens
            else:
                num_bytes = common_bytes(child.segment, data, end)
                if num_bytes < len(child.segment):
                    child = self._split(child, num_bytes)
            end += len(child.segment)
            node = child
        return node

    def _split(self, node: Node[T], num_bytes: int) -> Node[T]:
        """Cut a segment in two. The new node is the upper one: places know the lower."""
        assert node.parent is not None
        upper: Node[T] = Node(node.key, node.segment[:num_bytes])
        upper.num_requests, upper.num_tokens = node.num_requests, node.num_tokens
        upper.first, upper.last = node.first, node.last
        node.parent._adopt(upper)  # takes the old node's place: same key
        node.segment = node.segment[num_bytes:]
        node.key = _token_at(node.segment, 0)
        upper._adopt(node)
        return upper

    def _link(self, place: Place[T]) -> None:
        """Enter a place as the last of its node in the order, and in all counts above."""
        before = next((n.last for n in place.enclosing() if n.last is not None), None)
        place._prev = before
        place._next = None if before is None else before._next
        if before is not None:
            before._next = place
        if place._next is not None:
            place._next._prev = place
        for node in place.enclosing():
            node.num_requests += 1
            node.num_tokens += place.num_tokens
            if node.first is None:
                node.first = place
            if node.last is None or node.last is before:
                node.last = place

    def _detach(self, place: Place[T]) -> Node[T]:
        """Undo `_link`, then prune: the innermost node left that the place was under."""
        before, after = place._prev, place._next
        if before is not None:
            before._next = after
        if after is not None:
            after._prev = before
        for node in place.enclosing():
            node.num_requests -= 1
            node.num_tokens -= place.num_tokens
            if node.first is place:
                node.first = after
            if node.last is place:
                node.last = before
        return self._prune(place._node)

    def _prune(self, node: Node[T]) -> Node[T]:
        """Drop empty nodes upwards, and join a node with its only child."""
        while not node.num_requests and node.parent is not None:
            self.num_distinct_tokens -= node.num_segment_tokens
            node.parent._disown(node)
            node = node.parent
        if not node.segment or node.num_children != 1:
            return node
        child = self._child_of_first(node)
        if child is None or child.num_requests != node.num_requests:
            return node  # requests end here
        assert node.parent is not None
        child.segment = node.segment + child.segment
        child.key = node.key
        node.parent._adopt(child)
        return child

    def _child_of_first(self, node: Node[T]) -> Node[T] | None:
        """The child with the first request; None when that ends at the node itself.

        Found from below: stepping into a dict that has shrunk is O(its largest size).
        """
        assert node.first is not None
        child = None
        for above in node.first.enclosing():
            if above is node:
                break
            child = above
        return child

    def _lead_node(self, node: Node[T], *, behind: Place[T] | None = None) -> None:
        if node.parent is not None:
            assert node.first is not None and node.last is not None
            self._lead(node.parent, node.first, node.last, behind=behind)

    def _lead(
        self,
        node: Node[T] | None,
        first: Place[T],
        last: Place[T],
        *,
        behind: Place[T] | None = None,
    ) -> None:
        """Move a run to the front of its node, the node's run to the front of its parent, and so
        on to the top, or to the first node that begins with `behind`: there behind its branch."""
        if self._top.first is first:
            return  # what leads the whole order leads at every level
        known_first, known_last = first, last  # what the levels above still know the run by
        while node is not None:
            node_first, node_last = node.first, node.last
            assert node_first is not None and node_last is not None
            if node_first is behind:
                is_at_end = node_last is known_last
                self._move_behind(node, first, last, is_at_end=is_at_end)
                return
            if node_first is not known_first:
                before = first._prev
                assert before is not None
                _move_run(first, last, node_first)
                last = before if node_last is known_last else node_last
            elif node_last is not known_last:
                last = node_last
            node.first, node.last = first, last
            known_first, known_last = node_first, node_last
            node = node.parent

    def _move_behind(
        self, node: Node[T], first: Place[T], last: Place[T], *, is_at_end: bool
    ) -> None:
        """Move a run of a node to right behind the branch that the node's first place is in.

        is_at_end  whether the run ends the node's, which knows it by another end maybe
        """
        child = self._child_of_first(node)
        branch_end = node.first if child is None else child.last
        assert branch_end is not None
        target = branch_end._next
        assert target is not None
        old_last, new_last = node.last, last
        if target is not first:
            assert first._prev is not None
            new_last = first._prev
            _move_run(first, last, target)
        if not is_at_end:
            return
        above: Node[T] | None = node
        while above is not None and above.last is old_last:
            above.last = new_last
            above = above.parent

    def _walk(self, data: bytes, key: Hashable) -> Iterator[tuple[Node[T], int]]:
        """Down along these tokens: (node, bytes matched so far), the last node maybe in part."""
        node = self._top.child(key)
        end = 0
        while node is not None and end < len(data):
            node = node.child(_token_at(data, end))
            if node is not None:
                num_bytes = common_bytes(node.segment, data, end)
                end += num_bytes
                yield node, end
                if num_bytes < len(node.segment):
                    return


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids, 4 bytes each."""
    return np.asarray(token_ids, dtype=np.int32).tobytes()


def _token_at(data: bytes, start: int) -> int:
    token: int = _unpack_token(data, start)[0]
    return token


def common_bytes(segment: bytes, data: bytes, start: int) -> int:
    """Bytes of the whole tokens in which a segment and `data` from `start` on agree at the head."""
    if data.startswith(segment, start):
        return len(segment)
    # The first difference is at token `same` or later and before token `different`.
    same, different = 0, 1
    while data.startswith(segment[: different * TOKEN_BYTES], start):
        same, different = different, 2 * different
    while different - same > 1:
        middle = (same + different) // 2
        if data.startswith(segment[: middle * TOKEN_BYTES], start):
            same = middle
        else:
            different = middle
    return same * TOKEN_BYTES


def _move_run(first: Place[T], last: Place[T], target: Place[T]) -> None:
    """Move the run from `first` to `last` of a linked list to just before `target`."""
    assert first._prev is not None
    first._prev._next = last._next
    if last._next is not None:
        last._next._prev = first._prev
    first._prev = target._prev
    if target._prev is not None:
        target._prev._next = first
    last._next = target
    target._prev = last
