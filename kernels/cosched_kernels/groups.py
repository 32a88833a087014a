"""Who shares which prefix: the running requests as a tree of the KV that they have in common.

Two requests read the same KV slots as far as their tokens agree *and* these lie in the engine's
radix tree, which holds each sequence of tokens once. Both are known on the host, so groups need
neither the device's slot table nor a walk over the engine's tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Groups", "IntArray", "PrefixForest", "Shared"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a request has in the radix tree.

    rid        names the request
    namespace  requests of different ones share nothing (LoRA adapter, cache salt)
    tokens     its tokens, at least the first `length`; not written to afterwards
    length     tokens at its head whose KV the radix tree owns, a multiple of the page size
    """

    rid: Hashable
    namespace: Hashable
    tokens: IntArray
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Requests in an order in which every group is a range, and the groups.

    order       [requests] rank -> index in the batch
    begin, end  [groups] ranks [begin, end) of the members; at least two, unless requests of the
                forest are not in this batch
    first, last [groups] positions [first, last) of the KV that they read together; groups of a
                request follow each other without a gap, from position 0
    level       [groups] groups around this one
    own         [requests] by rank: the position from which a request reads its KV alone
    """

    order: IntArray
    begin: IntArray
    end: IntArray
    first: IntArray
    last: IntArray
    level: IntArray
    own: IntArray

    @property
    def num_groups(self) -> int:
        return len(self.begin)

    @property
    def saved_tokens(self) -> int:
        """KV tokens that need not be read, because one reading serves all members."""
        return int(((self.end - self.begin - 1) * (self.last - self.first)).sum())


@dataclass(slots=True, eq=False)
class _Node:
    """KV positions [begin, end) that the same requests have in common; `tokens` from position 0."""

    tokens: IntArray
    begin: int
    end: int
    parent: _Node | None
    children: dict[Hashable, _Node] = field(default_factory=dict)
    members: set[Hashable] = field(default_factory=set)
    """Requests whose part of the radix tree ends here."""
    count: int = 0
    """Requests that end here or below."""


class PrefixForest:
    """The tree of running requests, kept from one iteration to the next.

    A request is put in once, which compares its tokens with those of one branch; after that an
    iteration in which nobody came or went costs one comparison of lists.
    """

    def __init__(self, *, page_size: int = 1) -> None:
        """page_size: requests share whole pages [tokens]; groups are cut at page boundaries."""
        assert page_size >= 1, f"{page_size=}"
        self.page_size = page_size
        self._roots: dict[Hashable, _Node] = {}
        self._ends: dict[Hashable, tuple[_Node, int, Hashable]] = {}
        self._last: tuple[list[Hashable], int] = ([], 0)
        self._groups: Groups | None = None
        self._is_changed = False

    def __len__(self) -> int:
        return len(self._ends)

    def has(self, rid: Hashable, length: int) -> bool:
        """Whether a request is in with so much of it in the radix tree."""
        entry = self._ends.get(rid)
        return entry is not None and entry[1] == length

    def put(self, request: Shared) -> None:
        """Put a request in, or in its new place when more or less of it is in the radix tree now.
        O(length)."""
        assert request.length % self.page_size == 0, f"{request.length=} {self.page_size=}"
        assert 0 <= request.length <= len(request.tokens), f"{request.length=}"
        self.remove(request.rid)
        self._is_changed = True
        node = self._roots.get(request.namespace)
        if node is None:
            node = _Node(request.tokens, 0, 0, None)
            self._roots[request.namespace] = node
        while node.end < request.length:
            key = self._page(request.tokens, node.end)
            child = node.children.get(key)
            if child is None:
                child = _Node(request.tokens, node.end, request.length, node)
                node.children[key] = child
                node = child
                break
            agreed = self._agreement(child, request)
            if agreed < child.end:
                child = self._split(child, agreed)
            node = child
        node.members.add(request.rid)
        _count(node, 1)
        self._ends[request.rid] = (node, request.length, request.namespace)

    def remove(self, rid: Hashable) -> None:
        """Forget a request; nothing happens where it is not in."""
        entry = self._ends.pop(rid, None)
        if entry is None:
            return
        self._is_changed = True
        node, _, namespace = entry
        node.members.discard(rid)
        _count(node, -1)
        while not node.members and not node.children:
            if node.parent is None:
                del self._roots[namespace]
                return
            del node.parent.children[self._page(node.tokens, node.begin)]
            node = node.parent

    def keep_only(self, rids: Iterable[Hashable]) -> None:
        """Forget all others."""
        for rid in self._ends.keys() - set(rids):
            self.remove(rid)

    def groups(self, rids: Sequence[Hashable], *, min_saved: int = 1) -> Groups:
        """The groups of a batch; O(requests) when the batch is a new one, else that of the last
        call.

        rids       the requests of the batch, all of them put in before
        min_saved  a level of the tree is a group of its own where it saves so many reads of KV
                   tokens: (members - 1) x tokens. Below, its tokens count to the levels under it
        """
        called_with = (list(rids), min_saved)
        if self._groups is None or self._is_changed or called_with != self._last:
            self._groups = self._make_groups(rids, min_saved)
            self._last = called_with
            self._is_changed = False
        return self._groups

    def _make_groups(self, rids: Sequence[Hashable], min_saved: int) -> Groups:
        index_of = {rid: index for index, rid in enumerate(rids)}
        order: list[int] = []
        own: list[int] = []
        found: list[list[int]] = []

        def visit(node: _Node, read: int, level: int) -> None:
            """Put the requests of a subtree in order. Their KV up to `read` is read by `level`
            groups around them."""
            group = None
            if node.end > read and _is_worth(node, read, min_saved):
                group = [len(order), 0, read, node.end, level]
                found.append(group)
                read, level = node.end, level + 1
            for rid in node.members:
                index = index_of.get(rid)
                if index is not None:
                    order.append(index)
                    own.append(read)
            for child in node.children.values():
                visit(child, read, level)
            if group is not None:
                group[1] = len(order)

        for root in self._roots.values():
            visit(root, 0, 0)
        assert len(order) == len(rids), "a request was not put in, or is in the batch twice"
        columns = np.array(found, dtype=np.int64).reshape(-1, 5)
        # None of its members may be in this batch, where others of the forest sit out.
        columns = columns[columns[:, 1] > columns[:, 0]].T
        return Groups(
            order=np.array(order, dtype=np.int64),
            begin=columns[0],
            end=columns[1],
            first=columns[2],
            last=columns[3],
            level=columns[4],
            own=np.array(own, dtype=np.int64),
        )

    def _page(self, tokens: IntArray, begin: int) -> Hashable:
        return tokens[begin : begin + self.page_size].tobytes()

    def _agreement(self, node: _Node, request: Shared) -> int:
        """Up to which position a request goes along with a node, in whole pages."""
        end = min(node.end, request.length)
        differs = node.tokens[node.begin : end] != request.tokens[node.begin : end]
        agreed = node.begin + int(differs.argmax()) if differs.any() else end
        return agreed - agreed % self.page_size

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two at a position; the upper part."""
        assert node.parent is not None and node.begin < at < node.end, f"{at=}"
        upper = _Node(node.tokens, node.begin, at, node.parent, count=node.count)
        node.parent.children[self._page(node.tokens, node.begin)] = upper
        upper.children[self._page(node.tokens, at)] = node
        node.parent, node.begin = upper, at
        return upper


def _count(node: _Node | None, change: int) -> None:
    while node is not None:
        node.count += change
        node = node.parent


def _is_worth(node: _Node, read: int, min_saved: int) -> bool:
    """Whether [read, node.end) is a group of its own. Where one child has all of the members it is
    not: the same requests read on, and the child is the group."""
    if node.count < 2 or (node.count - 1) * (node.end - read) < min_saved:
        return False
    return all(child.count < node.count for child in node.children.values())
