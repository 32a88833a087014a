"""Who shares which prefix: the running requests, sorted by their tokens.

Two requests read the same KV slots as far as their tokens agree *and* these lie in the engine's
radix tree, which holds each sequence of tokens once. Both are known on the host, so groups need
neither the device's slot table nor a walk over the engine's tree.

In sorted order all that share a prefix stand next to each other, and what any two of them have in
common is the least of what the neighbours between them have. So a number for each pair of
neighbours tells the groups of any batch, whoever else is known.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Groups", "IntArray", "PrefixForest", "Shared", "groups_of", "of_all_around"]

IntArray = npt.NDArray[np.int64]
_Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a request has in the radix tree.

    namespace  requests of different ones share nothing (LoRA adapter, cache salt)
    tokens     its tokens, at least the first `length`
    length     tokens at its head whose KV the radix tree owns, a multiple of the page size
    """

    namespace: Hashable
    tokens: IntArray
    length: int


class Groups(NamedTuple):
    """Requests in an order in which every group is a range, and the groups.

    order       [requests] rank -> index in the batch
    begin, end  [groups] ranks [begin, end) of the members, at least two. A group stands before
                those within it
    first, last [groups] positions [first, last) of the KV that they read together; groups of a
                request follow each other without a gap, from position 0
    level       [groups] groups around this one
    saved       [groups] KV tokens that need not be read, because one reading serves all members
    num_levels  0 without groups
    own, depth  [requests] by rank: the position from which a request reads its KV alone, and groups
                that it is in
    """

    order: IntArray
    begin: IntArray
    end: IntArray
    first: IntArray
    last: IntArray
    level: IntArray
    saved: IntArray
    num_levels: int
    own: IntArray
    depth: IntArray

    @property
    def num_groups(self) -> int:
        return len(self.begin)

    @property
    def saved_tokens(self) -> int:
        """KV tokens that need not be read at all."""
        return int(self.saved.sum())


_SLOT_BITS = 20
_SLOTS = (1 << _SLOT_BITS) - 1
"""The lower bits of a member are its row in the forest's table, the others are never used again."""

_DEPTH_BITS = _SLOT_BITS
_DEPTHS = (1 << _DEPTH_BITS) - 1

_NUM_KEPT = 8
"""Answers that a forest keeps: a plan for each class, the batch that runs, and those before."""

_TOKEN_BYTES = 8


class _Node:
    """Tokens that all below it have in common.

    key       under which its parent has it: a namespace, or the first page of its tokens
    tokens    as bytes, from where its parent ends to its own end
    end       position of its end
    children  nodes by their keys, and the members that end here; the newest last
    """

    __slots__ = ("children", "end", "key", "parent", "tokens")

    def __init__(self, parent: _Node | None, key: Hashable, tokens: bytes, end: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.end = end
        self.children: dict[Hashable, _Node | int] = {}
        if parent is not None:
            parent.children[key] = self  # the place of one with this key, if there is one


class PrefixForest:
    """The requests that run, in a tree of their tokens, from one iteration to the next.

    A request is put in once, which compares each of its tokens with that of one other. What is
    asked of a batch is answered from numbers, one for each pair of neighbours in the tree, and the
    answer depends on the requests of that batch only.
    """

    def __init__(self, *, page_size: int = 1) -> None:
        """page_size: requests share whole pages [tokens]; groups are cut at page boundaries."""
        assert page_size >= 1, f"{page_size=}"
        self.page_size = page_size
        self._root = _Node(None, None, b"", 0)
        # [place] slot, and tokens in common with the next place, in whole pages. All below a node
        # stand together, the newest first.
        self._slot_at = array("q")
        self._common = array("q")
        # [slot] member or 0, and the node in which it ends.
        self._member_of = np.zeros(64, dtype=np.int64)
        self._node_of = [self._root] * 64
        self._free_slots = list(range(63, -1, -1))
        self._num_put = 0
        self._made: OrderedDict[tuple[bytes, int], Groups] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slot_at)

    def put(self, request: Shared) -> int:
        """Put a request in; returns the member that it is from now on, which no other will ever be.
        One of which more or less is in the radix tree now is another member: remove the old one.
        O(length), in C."""
        length, page = request.length, self.page_size
        assert length % page == 0, f"{length=} {page=}"
        assert 0 <= length <= len(request.tokens), f"{length=}"
        if not self._free_slots:
            self._make_room()
        slot = self._free_slots.pop()
        self._num_put += 1
        member = self._num_put << _SLOT_BITS | slot
        tokens = np.ascontiguousarray(request.tokens, dtype=np.int64).data
        below: Any = self._root.children.get(request.namespace)
        node = below or _Node(self._root, request.namespace, b"", 0)
        key = b""
        while node.end < length:
            key = tokens[node.end : node.end + page].tobytes()
            below = node.children.get(key)
            if below is None:
                break
            node = self._as_far_as(below, tokens[node.end : length])
        # It comes before all that have as much in common with it, and those have no more.
        place = self._slot_at.index(_newest(node)) if node.children else 0
        self._slot_at.insert(place, slot)
        self._common.insert(place, node.end)
        if node.end < length:
            node = _Node(node, key, tokens[node.end : length].tobytes(), length)
        node.children[member] = member
        self._node_of[slot] = node
        self._member_of[slot] = member
        return member

    def remove(self, member: int) -> None:
        """Forget a request; nothing happens where it is not in."""
        slot = member & _SLOTS
        if slot >= len(self._member_of) or self._member_of[slot] != member:
            return
        self._member_of[slot] = 0
        self._free_slots.append(slot)
        common = self._common
        place = self._slot_at.index(slot)
        if place:
            common[place - 1] = min(common[place - 1], common[place])
        del self._slot_at[place], common[place]
        node, self._node_of[slot] = self._node_of[slot], self._root
        del node.children[member]
        while not node.children and node.parent is not None:
            del node.parent.children[node.key]
            node = node.parent
        if len(node.children) == 1 and node.tokens:
            (below,) = node.children.values()
            if isinstance(below, _Node):
                below.tokens = node.tokens + below.tokens
                below.parent, below.key = node.parent, node.key
                node.parent.children[node.key] = below

    def groups(self, members: Sequence[int], *, min_saved: int = 1) -> Groups:
        """The groups of a batch: O(requests) in C and O(groups), or one of the last answers.

        members    the requests of the batch, all of them in the forest
        min_saved  what some have in common is a group of its own where it saves so many reads of KV
                   tokens: (members - 1) x tokens. Below, its tokens count to the groups within it
        """
        asked = np.fromiter(members, np.int64, len(members))
        key = asked.tobytes(), min_saved
        groups = self._made.get(key)
        if groups is None:
            groups = self._made[key] = self._make_groups(asked, min_saved)
            if len(self._made) > _NUM_KEPT:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        return groups

    def _make_groups(self, members: IntArray, min_saved: int) -> Groups:
        num, slots = len(members), members & _SLOTS
        known = self._member_of.take(slots, mode="clip")
        assert known.tobytes() == members.tobytes(), "a request was not put in"
        is_all = num == len(self)
        slot_at, common = np.array(self._slot_at), np.array(self._common)
        index_of = (np.empty if is_all else np.zeros)(len(self._member_of), dtype=np.int64)
        index_of[slots] = np.arange(num) if is_all else np.arange(1, num + 1)
        order = index_of.take(slot_at)
        if is_all:
            between = common[:-1]
        else:
            places = order.nonzero()[0]
            order = order.take(places) - 1
            between = np.minimum.reduceat(common, places)[:-1] if num else common[:0]
        found = _worthy(_intervals(between), min_saved)
        columns = np.array(found, dtype=np.int64).reshape(-1, 6).T
        begin, end, first, last, level, _ = columns
        # Both sums at once.
        both = of_all_around(begin, end, (last - first) << _DEPTH_BITS | 1, num)
        num_levels = max(found[4::6], default=-1) + 1
        return Groups(order, *columns, num_levels, both >> _DEPTH_BITS, both & _DEPTHS)

    def _as_far_as(self, node: _Node, tokens: memoryview) -> _Node:
        """The node up to which these tokens are those of this one: itself, or one that is its upper
        part from now on. They have a page in common at least."""
        num = len(node.tokens) // _TOKEN_BYTES
        if node.tokens.startswith(tokens[:num]):
            num = min(num, len(tokens))
        else:
            num = min(num, len(tokens))
            differs = np.frombuffer(node.tokens, np.int64, num) != np.asarray(tokens[:num])
            num = int(differs.argmax())
            num -= num % self.page_size
        at = num * _TOKEN_BYTES
        if at == len(node.tokens):
            return node
        begin = node.end - len(node.tokens) // _TOKEN_BYTES
        upper = _Node(node.parent, node.key, node.tokens[:at], begin + num)
        node.tokens = node.tokens[at:]
        node.key = node.tokens[: self.page_size * _TOKEN_BYTES]
        node.parent = upper
        upper.children[node.key] = node
        return upper

    def _make_room(self) -> None:
        num = len(self._member_of)
        assert 2 * num <= _SLOTS + 1, f"more than {num} requests"
        self._member_of = np.concatenate((self._member_of, np.zeros(num, dtype=np.int64)))
        self._node_of += [self._root] * num
        self._free_slots.extend(range(2 * num - 1, num - 1, -1))


def _newest(node: _Node) -> int:
    """The slot of the first below it."""
    below: Any = node
    while isinstance(below, _Node):
        below = next(reversed(below.children.values()))
    return int(below) & _SLOTS


def of_all_around(begin: IntArray, end: IntArray, numbers: _Ints, num: int) -> IntArray:
    """[num] by rank: the sum of the numbers of all groups [begin, end) that it is in."""
    change = np.zeros(num + 1, dtype=np.int64)
    np.add.at(change, begin, numbers)
    np.subtract.at(change, end, numbers)
    return change[:-1].cumsum()


def groups_of(requests: Sequence[Shared], *, page_size: int = 1, min_saved: int = 1) -> Groups:
    """The groups of a batch that comes but once; see `PrefixForest.groups`."""
    forest = PrefixForest(page_size=page_size)
    return forest.groups([forest.put(request) for request in requests], min_saved=min_saved)


def _intervals(common: IntArray) -> list[list[int]]:
    """Ranks [begin, end) of all that have more in common than any that hold them do, and how much;
    outer ones before inner ones.

    common: [requests - 1] tokens that neighbours have in common
    """
    found: list[list[int]] = []
    open_: list[tuple[int, list[int]]] = []  # and their places among those found
    top = 0
    starts = (common[1:] != common[:-1]).nonzero()[0] + 1
    lengths = common.take(starts).tolist()
    starts = starts.tolist()
    if len(common):
        starts.insert(0, 0)
        lengths.insert(0, int(common[0]))
    for start, length in zip(starts, lengths, strict=True):
        begin, place = start, len(found)
        while top > length:
            place, interval = open_.pop()
            begin, interval[1] = interval[0], start + 1
            top = open_[-1][1][2] if open_ else 0
        if length > top:
            interval = [begin, len(common) + 1, length]
            found.insert(place, interval)
            open_.append((place, interval))
            top = length
    return found


def _worthy(intervals: list[list[int]], min_saved: int) -> list[int]:
    """Those that save enough: begin, end, first, last, level and tokens saved of each, one after
    the other."""
    found: list[int] = []
    around: list[tuple[int, int]] = []
    read = 0
    for begin, end, last in intervals:
        while around and around[-1][0] <= begin:
            around.pop()
            read = around[-1][1] if around else 0
        saved = (end - begin - 1) * (last - read)
        if saved >= min_saved:
            found += (begin, end, read, last, len(around), saved)
            around.append((end, last))
            read = last
    return found
