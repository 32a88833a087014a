"""The work of one attention layer, cut into items: which query rows read which KV.

An item is one tile of query rows over one span of KV positions. The heads that share a KV head are
rows of their own (GQA packing), so 16 requests with 4 query heads per KV head fill a tile of 64 and
read their shared prefix once. A prefix level is an item for all of its members, what a request has
for itself is one for it alone; long spans are split so that the device is busy, and the partial
results of a token are its *pieces*, weighed together at the end.

Everything here is host arithmetic with numpy, O(requests + groups + items) and without a look at
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cosched_kernels.groups import Groups, IntArray

__all__ = [
    "ITEM_FIELDS",
    "Bytes",
    "HeadShape",
    "Plan",
    "Tiling",
    "bytes_moved",
    "make_plan",
    "scores_computed",
]

ITEM_FIELDS = (
    "first_token",  # rank of its first query token
    "num_tokens",  # query tokens
    "request",  # index in the batch of the request whose slots it reads
    "kv_begin",  # it reads KV positions [kv_begin, kv_end)
    "kv_end",
    "limit",  # the first token sees positions up to this one, the next one more each
    "piece",  # which of its tokens' pieces it computes; -1: it is the only one, no piece is kept
    "unused",  # so that an item is 32 bytes
)
_UNLIMITED = 2**30  # every token sees all of a shared prefix
_MIN_SPLIT = 256
"""Fewest KV tokens of a split. Below, the pieces cost more than the split gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Attention heads of a layer on one device.

    num_q_heads, num_kv_heads  the former a multiple of the latter
    head_dim                   size of a head, of keys and values alike
    kv_bytes, q_bytes          size of a number in the KV cache, and of queries and outputs
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: int = 2
    q_bytes: int = 2

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.kv_bytes

    @property
    def q_bytes_per_token(self) -> int:
        return self.num_q_heads * self.head_dim * self.q_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How work is cut.

    rows       heights of tiles [query rows], ascending; an item is of the lowest it fits into, and
               each height is a launch of its own
    programs   programs that keep the memory of the device busy: about half its multiprocessors
               saturate it, and each split more writes and reads pieces
    """

    rows: tuple[int, ...] = (16, 64, 128)
    programs: int = 66


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The work of one layer; the same for all layers of an iteration.

    items        [items, len(ITEM_FIELDS)] int32, in the order of `starts`
    starts       [heights + 1] int32: items [starts[i], starts[i + 1]) are of height `rows[i]`
    token_order  [tokens] int32: rank -> row of the query tensor
    bases        [tokens + 1] int32 by rank: pieces [bases[i], bases[i + 1]) are of token i
    rows         the heights
    own, ends    indices of items: those of what a request has for itself, and among these the last
                 span of each tile

    `grown` makes the plan of a later iteration from it.
    """

    items: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    token_order: npt.NDArray[np.int32]
    bases: npt.NDArray[np.int32]
    rows: tuple[int, ...]
    own: IntArray
    ends: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.token_order)

    @property
    def num_pieces(self) -> int:
        return int(self.bases[-1])

    def grown(self, seq_lens: IntArray) -> Plan:
        """The plan of a batch of decodes when each has more tokens: the same items, whose last
        spans are longer.

        seq_lens  [requests] tokens in all
        """
        items = self.items.copy()
        end, limit = ITEM_FIELDS.index("kv_end"), ITEM_FIELDS.index("limit")
        lengths = seq_lens[items[:, ITEM_FIELDS.index("request")]]
        items[self.own, limit] = lengths[self.own] - 1
        items[self.ends, end] = lengths[self.ends]
        return replace(self, items=items)

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """One field of all items."""
        return self.items[:, ITEM_FIELDS.index(name)]


def make_plan(
    groups: Groups,
    *,
    num_queries: IntArray,
    seq_lens: IntArray,
    heads: HeadShape,
    tiling: Tiling,
) -> Plan:
    """The work for a batch.

    groups       of this batch
    num_queries  [requests] new tokens of each, the last of its sequence; at least 1
    seq_lens     [requests] tokens in all, the new ones included

    The new tokens of a request must lie behind all of its groups: what is shared is in the radix
    tree, and what is computed now is not.
    """
    order, num_requests = groups.order, len(groups.order)
    counts, lengths = num_queries[order], seq_lens[order]
    assert num_requests == 0 or (counts >= 1).all(), "every request has a new token"
    assert (lengths - counts >= groups.own).all(), "a new token in a shared prefix"
    first_token = np.zeros(num_requests + 1, dtype=np.int64)
    np.cumsum(counts, out=first_token[1:])
    num_tokens = int(first_token[-1])
    if num_tokens == num_requests:
        token_order = order
    else:
        in_batch = np.zeros(num_requests, dtype=np.int64)
        np.cumsum(num_queries[:-1], out=in_batch[1:])
        token_order = np.arange(num_tokens) + np.repeat(in_batch[order] - first_token[:-1], counts)

    # One stretch per group and per request: tokens [token, token + tokens), span [begin, end).
    token = np.concatenate((first_token[groups.begin], first_token[:-1]))
    tokens = np.concatenate((first_token[groups.end] - first_token[groups.begin], counts))
    request = np.concatenate((order[groups.begin], order))
    begin = np.concatenate((groups.first, groups.own))
    end = np.concatenate((groups.last, lengths))
    limit = np.concatenate((np.full(groups.num_groups, _UNLIMITED), lengths - counts))

    # Tiles: as many whole tokens as fit into a height.
    capacities = np.array([rows // heads.group for rows in tiling.rows])
    assert capacities[0] >= 1, f"{heads.group=} rows do not fit into a tile of {tiling.rows[0]}"
    height = np.minimum(np.searchsorted(capacities, tokens), len(capacities) - 1)
    capacity = capacities[height]
    num_tiles = -(-tokens // capacity)
    stretch = np.repeat(np.arange(len(tokens)), num_tiles)
    within = _positions_in_runs(num_tiles) * capacity[stretch]
    height = height[stretch]
    tile = {
        "first_token": token[stretch] + within,
        "num_tokens": np.minimum(capacity[stretch], tokens[stretch] - within),
        "request": request[stretch],
        "kv_begin": begin[stretch],
        "limit": limit[stretch] + np.where(stretch < groups.num_groups, 0, within),
    }
    last_seen = tile["limit"] + tile["num_tokens"]
    tile_end = np.minimum(end[stretch], last_seen)
    num_splits = _splits(tile_end - tile["kv_begin"], height, heads.num_kv_heads, tiling)

    # Pieces: those of a token's groups first, outermost first, then those of its own part. All
    # members of a group are in the same groups above it, so they agree on the numbers.
    splits_of_stretch = np.zeros(len(tokens), dtype=np.int64)
    splits_of_stretch[stretch] = num_splits  # alike for all tiles of a group
    first_piece = _pieces_before(groups, splits_of_stretch[: groups.num_groups])
    own_tile = stretch >= groups.num_groups
    pieces = np.empty(num_tokens, dtype=np.int64)
    rank_pieces = first_piece[stretch[own_tile]] + num_splits[own_tile]
    pieces[_ranges(tile["first_token"][own_tile], tile["num_tokens"][own_tile])] = np.repeat(
        rank_pieces, tile["num_tokens"][own_tile]
    )

    # Items: a tile per split. Tiles of one span stand next to each other, so that they run at the
    # same time and all but the first find it in the cache of the device.
    which = np.repeat(np.arange(len(stretch)), num_splits)
    split = _positions_in_runs(num_splits)
    length = (tile_end - tile["kv_begin"])[which]
    step = -(-length // num_splits[which])
    item_begin = tile["kv_begin"][which] + np.minimum(split * step, length)
    item_end = tile["kv_begin"][which] + np.minimum((split + 1) * step, length)
    piece = first_piece[stretch[which]] + split
    is_only = pieces[tile["first_token"][which]] == 1
    items = np.zeros((len(which), len(ITEM_FIELDS)), dtype=np.int32)
    fields = (
        tile["first_token"][which],
        tile["num_tokens"][which],
        tile["request"][which],
        item_begin,
        item_end,
        tile["limit"][which],
        np.where(is_only, -1, piece),
    )
    for index, values in enumerate(fields):
        items[:, index] = values
    sorting = np.lexsort((which, split, stretch[which], height[which]))
    starts = np.zeros(len(capacities) + 1, dtype=np.int32)
    np.cumsum(np.bincount(height[which], minlength=len(capacities)), out=starts[1:])
    # A token with a single piece needs no room for it.
    pieces[pieces == 1] = 0
    bases = np.zeros(num_tokens + 1, dtype=np.int32)
    np.cumsum(pieces, out=bases[1:])
    is_own = stretch[which] >= groups.num_groups
    is_end = is_own & (split == num_splits[which] - 1)
    return Plan(
        items=items[sorting],
        starts=starts,
        token_order=token_order.astype(np.int32),
        bases=bases,
        rows=tiling.rows,
        own=np.flatnonzero(is_own[sorting]),
        ends=np.flatnonzero(is_end[sorting]),
    )


def _splits(lengths: IntArray, height: IntArray, num_kv_heads: int, tiling: Tiling) -> IntArray:
    """Into how many spans each tile's KV is split: as even as it takes for all programs to have
    work, each height being a launch of its own."""
    num_splits = np.ones(len(lengths), dtype=np.int64)
    for index in range(len(tiling.rows)):
        mine = height == index
        total = int(lengths[mine].sum()) * num_kv_heads
        share = max(_MIN_SPLIT, -(-total // tiling.programs))
        num_splits[mine] = np.maximum(1, -(-lengths[mine] // share))
    return num_splits


def _pieces_before(groups: Groups, splits: IntArray) -> IntArray:
    """[groups + requests] pieces of the groups around a group, and of all groups of a request."""
    so_far = np.zeros(len(groups.order), dtype=np.int64)
    around = np.zeros(groups.num_groups, dtype=np.int64)
    for level in range(int(groups.level.max()) + 1 if groups.num_groups else 0):
        mine = np.flatnonzero(groups.level == level)
        begin, num = groups.begin[mine], groups.end[mine] - groups.begin[mine]
        around[mine] = so_far[begin]
        so_far[_ranges(begin, num)] += np.repeat(splits[mine], num)
    return np.concatenate((around, so_far))


def _positions_in_runs(lengths: IntArray) -> IntArray:
    """0, 1, ... anew in each run: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _ranges(begins: IntArray, lengths: IntArray) -> IntArray:
    """The numbers of all ranges [begin, begin + length)."""
    return np.repeat(begins, lengths) + _positions_in_runs(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What one layer moves [bytes].

    kv        KV that comes from memory: each span once, as tiles of it run next to each other
    kv_asked  KV that multiprocessors ask for, each tile its own; the difference is the cache's
    pieces    partial results written and read again
    rest      queries, outputs, slots, the plan
    """

    kv: int
    kv_asked: int
    pieces: int
    rest: int

    @property
    def total(self) -> int:
        return self.kv + self.pieces + self.rest


def bytes_moved(plan: Plan, heads: HeadShape) -> Bytes:
    """What a plan makes one layer move, counted from its items."""
    begin, end = plan.column("kv_begin"), plan.column("kv_end")
    spans = np.stack((plan.column("request"), begin, end), axis=1)
    tokens = int((end - begin).sum())
    unique: Any = np.unique(spans, axis=0) if len(spans) else spans
    unique_tokens = int((unique[:, 2] - unique[:, 1]).sum())
    piece = heads.q_bytes_per_token + 4 * heads.num_q_heads
    return Bytes(
        kv=unique_tokens * heads.kv_bytes_per_token,
        kv_asked=tokens * heads.kv_bytes_per_token,
        pieces=2 * plan.num_pieces * piece,
        rest=(
            2 * plan.num_tokens * heads.q_bytes_per_token
            + 4 * unique_tokens
            + plan.items.nbytes
            + plan.bases.nbytes
            + plan.token_order.nbytes
        ),
    )


def scores_computed(plan: Plan, heads: HeadShape) -> int:
    """Pairs of query row and key that tensor cores compute in one layer, for all query heads: the
    empty rows of tiles count too."""
    heights = np.repeat(np.array(plan.rows), np.diff(plan.starts))
    spans = plan.column("kv_end") - plan.column("kv_begin")
    return int((heights * spans).sum()) * heads.num_kv_heads
