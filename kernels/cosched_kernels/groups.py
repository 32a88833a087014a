"""Who shares which prefix: the running requests, sorted by their tokens.

Two requests read the same KV slots as far as their tokens agree *and* these lie in the engine's
radix tree, which holds each sequence of tokens once. Both are known on the host, so groups need
neither the device's slot table nor a walk over the engine's tree.

In sorted order all that share a prefix stand next to each other, and what any two of them have in
common is the least of what the neighbours between them have. So a number for each pair of
neighbours tells the groups of any batch, whoever else is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Requests in an order in which every group is a range, and the groups.

    order       [requests] rank -> index in the batch
    begin, end  [groups] ranks [begin, end) of the members, at least two. A group stands before
                those within it
    first, last [groups] positions [first, last) of the KV that they read together; groups of a
                request follow each other without a gap, from position 0
    level       [groups] groups around this one
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
    num_levels: int
    own: IntArray
    depth: IntArray

    @property
    def num_groups(self) -> int:
        return len(self.begin)

    @property
    def saved_tokens(self) -> int:
        """KV tokens that need not be read, because one reading serves all members."""
        return int(((self.end - self.begin - 1) * (self.last - self.first)).sum())


_SLOT_BITS = 20
_SLOTS = (1 << _SLOT_BITS) - 1
"""The lower bits of a member are its row in the forest's table, the others are never used again."""

_DEPTH_BITS = _SLOT_BITS
_DEPTHS = (1 << _DEPTH_BITS) - 1

_NUM_KEPT = 8
"""Answers that a forest keeps: a plan for each class, the batch that runs, and those before."""

_NUMBER_BYTES = 4  # of a token in a key, and of its namespace


class PrefixForest:
    """The requests that run, in the order of their tokens, from one iteration to the next.

    A request is put in once, which compares its tokens with those of a few others. What is asked of
    a batch is answered from numbers, and the answer depends on the requests of that batch only.
    """

    def __init__(self, *, page_size: int = 1) -> None:
        """page_size: requests share whole pages [tokens]; groups are cut at page boundaries."""
        assert page_size >= 1, f"{page_size=}"
        self.page_size = page_size
        self._keys: list[bytes] = []
        """[place] namespace and tokens of each. Heads that are alike are equal bytes: in the order
        of bytes all that begin alike stand together, and C compares them."""
        self._namespaces: list[Hashable] = []
        # [place] tokens in common with the next one, in whole pages, and slot; [slot] member or 0.
        self._common = np.zeros(64, dtype=np.int64)
        self._slot_at = np.zeros(64, dtype=np.int64)
        self._member_of = np.zeros(64, dtype=np.int64)
        self._free_slots = list(range(63, -1, -1))
        self._num_put = 0
        self._spaces: dict[Hashable, list[int]] = {}
        """Namespace -> its number in keys, and how many requests are of it."""
        self._made: OrderedDict[tuple[bytes, int], Groups] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, request: Shared) -> int:
        """Put a request in; returns the member that it is from now on, which no other will ever be.
        One of which more or less is in the radix tree now is another member: remove the old one.
        O(length) and O(requests), both in C."""
        assert request.length % self.page_size == 0, f"{request.length=} {self.page_size=}"
        assert 0 <= request.length <= len(request.tokens), f"{request.length=}"
        if not self._free_slots:
            self._make_room()
        slot = self._free_slots.pop()
        self._num_put += 1
        member = self._num_put << _SLOT_BITS | slot
        space = self._spaces.setdefault(request.namespace, [self._num_put, 0])
        space[1] += 1
        numbers = np.empty(1 + request.length, dtype=np.int32)
        numbers[0] = space[0]
        numbers[1:] = request.tokens[: request.length]
        key = numbers.tobytes()
        keys, common, num = self._keys, self._common, len(self._keys)
        place = bisect_left(keys, key)
        # With one of its neighbours it has as much in common as they with each other.
        known = int(common[place - 1]) if 0 < place < num else 0
        before = self._num_common(keys[place - 1], key, known) if place else 0
        behind = known
        if place < num and (before == known or not place):
            behind = self._num_common(key, keys[place], known)
        keys.insert(place, key)
        self._namespaces.insert(place, request.namespace)
        for by_place, value in ((common, behind), (self._slot_at, slot)):
            by_place[place + 1 : num + 1] = by_place[place:num]
            by_place[place] = value
        if place:
            common[place - 1] = before
        self._member_of[slot] = member
        return member

    def remove(self, member: int) -> None:
        """Forget a request; nothing happens where it is not in."""
        slot = member & _SLOTS
        if slot >= len(self._member_of) or self._member_of[slot] != member:
            return
        self._member_of[slot] = 0
        common, num = self._common, len(self._keys) - 1
        place = int((self._slot_at == slot)[: num + 1].argmax())
        del self._keys[place]
        namespace = self._namespaces.pop(place)
        space = self._spaces[namespace]
        space[1] -= 1
        if not space[1]:
            del self._spaces[namespace]
        if place:
            common[place - 1] = min(common[place - 1], common[place])
        for by_place in (common, self._slot_at):
            by_place[place:num] = by_place[place + 1 : num + 1]
        self._free_slots.append(slot)

    def groups(self, members: Sequence[int], *, min_saved: int = 1) -> Groups:
        """The groups of a batch: O(requests) in C and O(groups), or one of the last answers.

        members    the requests of the batch, all of them in the forest
        min_saved  what some have in common is a group of its own where it saves so many reads of KV
                   tokens: (members - 1) x tokens. Below, its tokens count to the groups within it
        """
        asked = np.array(members, dtype=np.int64)
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
        index_of = np.zeros(len(self._member_of), dtype=np.int64)
        index_of[slots] = np.arange(1, num + 1)
        order = index_of.take(self._slot_at[: len(self)]) - 1
        between = self._common[: max(num - 1, 0)]
        if num < len(self):
            places = (order >= 0).nonzero()[0]
            order = order.take(places)
            between = np.minimum.reduceat(self._common, places)[:-1] if num > 1 else between
        found = _worthy(_intervals(between), min_saved)
        begin, end, first, last, level = np.array(found, dtype=np.int64).reshape(-1, 5).T
        # Both sums at once.
        both = of_all_around(begin, end, (last - first) << _DEPTH_BITS | 1, num)
        return Groups(
            order=order,
            begin=begin,
            end=end,
            first=first,
            last=last,
            level=level,
            num_levels=1 + max(found[4::5], default=-1),
            own=both >> _DEPTH_BITS,
            depth=both & _DEPTHS,
        )

    def _num_common(self, one: bytes, other: bytes, known: int) -> int:
        """Tokens that two keys have in common in whole pages, when these are at least `known`."""
        begin = _NUMBER_BYTES * (1 + known)
        page = begin + _NUMBER_BYTES * self.page_size
        if one[begin:page] != other[begin:page] or one[:_NUMBER_BYTES] != other[:_NUMBER_BYTES]:
            return known
        num = (min(len(one), len(other)) - begin) // _NUMBER_BYTES
        if num:
            a, b = (np.frombuffer(key, np.int32, num, begin) for key in (one, other))
            differs = a != b
            first = int(differs.argmax())
            num = first if differs[first] else num
        return known + num - num % self.page_size

    def _make_room(self) -> None:
        num = len(self._slot_at)
        assert 2 * num <= _SLOTS + 1, f"more than {num} requests"
        more = np.zeros(num, dtype=np.int64)
        self._common = np.concatenate((self._common, more))
        self._slot_at = np.concatenate((self._slot_at, more))
        self._member_of = np.concatenate((self._member_of, more))
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


def _intervals(common: IntArray) -> list[tuple[int, int, int]]:
    """Ranks [begin, -end) of all that have more in common than any that hold them do, and how much;
    outer ones before inner ones, which is why ends are negative.

    common: [requests - 1] tokens that neighbours have in common
    """
    starts = [0, *((common[1:] != common[:-1]).nonzero()[0] + 1).tolist()] if len(common) else []
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []
    top = 0
    for start, length in zip(starts, common.take(starts).tolist(), strict=True):
        begin = start
        while top > length:
            begin, inner = open_.pop()
            found.append((begin, -start - 1, inner))
            top = open_[-1][1] if open_ else 0
        if length > top:
            open_.append((begin, length))
            top = length
    end = -len(common) - 1
    found += [(begin, end, length) for begin, length in open_]
    found.sort()
    return found


def _worthy(intervals: list[tuple[int, int, int]], min_saved: int) -> list[int]:
    """Those that save enough: begin, end, first, last and level of each, one after the other."""
    found: list[int] = []
    around: list[tuple[int, int]] = []
    read = 0
    for begin, negative_end, last in intervals:
        end = -negative_end
        while around and around[-1][0] <= begin:
            around.pop()
            read = around[-1][1] if around else 0
        if (end - begin - 1) * (last - read) >= min_saved:
            found += (begin, end, read, last, len(around))
            around.append((end, last))
            read = last
    return found
