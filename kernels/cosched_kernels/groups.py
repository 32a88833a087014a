"""Which running requests share which prefix: sorted by their tokens.

Two requests read the same KV slots as far as their tokens agree *and* these lie in the engine's
radix tree, which holds each sequence of tokens once. Both are known on the host, so groups need
neither the device's slot table nor a walk over the engine's tree.

In sorted order all that share a prefix stand next to each other, and what any two of them have in
common is the least of what the neighbours between them have. So a number for each pair of
neighbours gives the groups of any batch, whatever other requests are known.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cosched_kernels.host import compiled_host

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

_NUM_COLUMNS = 6  # of a group: begin, end, first, last, level, saved

_NUM_KEPT = 8
"""Answers that a forest keeps: a plan for each class, the batch that runs, and those before."""

_TOKEN_BYTES = 8


class _Node:
    """Tokens that all below it have in common.

    key       under which its parent has it: the first page of its tokens, or a namespace
    tokens    as bytes, from where its parent ends to its own end
    end       position of its end
    members   that end here, the newest last
    children  by their keys
    keys      of the children, ascending
    """

    __slots__ = ("children", "end", "key", "keys", "members", "parent", "tokens")

    def __init__(self, parent: _Node | None, key: Any, tokens: bytes, end: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.end = end
        self.members: list[int] = []
        self.children: dict[Any, _Node] = {}
        self.keys: list[Any] = []
        if parent is not None:
            parent.children[key] = self

    def first(self) -> int:
        """The slot that comes first of those below it."""
        node = self
        while not node.members:
            node = node.children[node.keys[0]]
        return node.members[-1] & _SLOTS

    def last(self) -> int:
        """The slot that comes last."""
        node = self
        while node.keys:
            node = node.children[node.keys[-1]]
        return node.members[0] & _SLOTS


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
        self._spaces: dict[Hashable, _Node] = {}
        # [place] slot, and tokens in common with the next place, in whole pages. A node's members
        # come first, the newest before the others, and then its children.
        self._slot_at = array("q")
        self._common = array("q")
        # [slot] member or 0, and the node in which it ends.
        self._member_of = np.zeros(64, dtype=np.int64)
        self._node_of = [self._root] * 64
        self._free_slots = list(range(63, -1, -1))
        self._num_put = 0
        self._made: OrderedDict[tuple[bytes, int], Groups] = OrderedDict()
        self._host = compiled_host()

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
        node, key = self._spaces.get(request.namespace), b""
        has_place = node is None
        if node is None:
            # By how they are written, as namespaces need have no order.
            space = repr(request.namespace), self._num_put, request.namespace
            self._make_place(self._root, space, slot)
            node = self._spaces[request.namespace] = _Node(self._root, space, b"", 0)
        while node.end < length:
            key = tokens[node.end : node.end + page].tobytes()
            below = node.children.get(key)
            if below is None:
                break
            node = self._as_far_as(below, tokens[node.end : length])
        if node.end < length:
            if has_place:
                node.keys.append(key)
            else:
                self._make_place(node, key, slot)
            node = _Node(node, key, tokens[node.end : length].tobytes(), length)
        elif not has_place:
            self._insert(self._slot_at.index(node.first()), 0, slot, length)
        node.members.append(member)
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
        node.members.remove(member)
        while not node.members and not node.keys and node.parent is not None:
            if node.parent is self._root:
                del self._spaces[node.key[-1]]
            del node.parent.children[node.key]
            del node.parent.keys[bisect_left(node.parent.keys, node.key)]
            node = node.parent
        if len(node.keys) == 1 and not node.members and node.tokens:
            assert node.parent is not None, "only the root and namespaces have no tokens"
            (below,) = node.children.values()
            below.tokens = node.tokens + below.tokens
            below.parent, below.key = node.parent, node.key
            node.parent.children[node.key] = below

    def _make_place(self, node: _Node, key: Any, slot: int) -> None:
        """For the first below a child that a node is about to have."""
        index = bisect_left(node.keys, key)
        if index < len(node.keys):
            place, behind = self._slot_at.index(node.children[node.keys[index]].first()), 0
        elif index or node.members:
            place, behind = self._slot_at.index(node.last()), 1
        else:
            place = behind = 0  # the forest is empty
        node.keys.insert(index, key)
        self._insert(place, behind, slot, node.end)

    def _insert(self, place: int, behind: int, slot: int, num_common: int) -> None:
        """Before or behind the one at a place, with this number of tokens in common."""
        self._slot_at.insert(place + behind, slot)
        self._common.insert(place, num_common)

    def groups(self, members: Sequence[int], *, min_saved: int = 1) -> Groups:
        """The groups of a batch: O(requests) in C and O(groups), or one of the last answers.

        members    the requests of the batch, all of them in the forest
        min_saved  what some have in common is a group of its own where it saves this number of
                   reads of KV tokens: (members - 1) x tokens. Below, its tokens count to the groups
                   within it
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
        if self._host is None:
            return self._groups_by_arrays(members, min_saved)
        order, columns, num_levels, own, depth = self._host.groups(
            self._slot_at, self._common, self._member_of, members, _SLOTS, min_saved
        )
        order, own, depth = (np.frombuffer(ranks, np.int64) for ranks in (order, own, depth))
        columns = np.frombuffer(columns, np.int64).reshape(_NUM_COLUMNS, -1)
        return Groups._make((order, *columns, num_levels, own, depth))

    def _groups_by_arrays(self, members: IntArray, min_saved: int) -> Groups:
        num, slots = len(members), members & _SLOTS
        known = self._member_of.take(slots, mode="clip")
        assert known.tobytes() == members.tobytes(), "a request was not put in"
        index_of = np.zeros(len(self._member_of), dtype=np.int64)
        index_of[slots] = np.arange(1, num + 1)
        order = index_of.take(np.array(self._slot_at, dtype=np.int64))
        places = order.nonzero()[0]
        common = np.array(self._common, dtype=np.int64)
        between = np.minimum.reduceat(common, places)[:-1] if num else common[:0]
        found = _worthy(_intervals(between), min_saved)
        columns = np.ascontiguousarray(np.array(found, dtype=np.int64).reshape(-1, _NUM_COLUMNS).T)
        begin, end, first, last, level, _ = columns
        # Both sums at once.
        both = of_all_around(begin, end, (last - first) << _DEPTH_BITS | 1, num)
        num_levels = 1 + int(level.max(initial=-1))
        order = order.take(places) - 1
        own, depth = both >> _DEPTH_BITS, both & _DEPTHS
        return Groups._make((order, *columns, num_levels, own, depth))

    def _as_far_as(self, node: _Node, tokens: memoryview) -> _Node:
        """The node up to which these tokens are those of this one: itself, or one that is its upper
        part from now on. They have a page in common at least."""
        num = min(len(node.tokens) // _TOKEN_BYTES, len(tokens))
        if not node.tokens.startswith(tokens[:num]):
            differs = np.frombuffer(node.tokens, np.int64, num) != np.asarray(tokens[:num])
            num = int(differs.argmax())
            num -= num % self.page_size
        at = num * _TOKEN_BYTES
        if at == len(node.tokens):
            return node
        begin = node.end - len(node.tokens) // _TOKEN_BYTES
        upper = _Node(node.parent, node.key, node.tokens[:at], begin + num)
        node.tokens = node.tokens[at:]
        node.parent, node.key = upper, node.tokens[: self.page_size * _TOKEN_BYTES]
        upper.children[node.key] = node
        upper.keys.append(node.key)
        return upper

    def _make_room(self) -> None:
        num = len(self._member_of)
        assert 2 * num <= _SLOTS + 1, f"more than {num} requests"
        self._member_of = np.concatenate((self._member_of, np.zeros(num, dtype=np.int64)))
        self._node_of += [self._root] * num
        self._free_slots.extend(range(2 * num - 1, num - 1, -1))


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
