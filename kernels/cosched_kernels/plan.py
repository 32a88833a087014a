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

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cosched_kernels.groups import Groups, IntArray, of_all_around
from cosched_kernels.host import compiled_host

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
_FIRST, _NUM, _REQUEST, _BEGIN, _END, _LIMIT, _PIECE = range(7)
_UNLIMITED = 2**30  # every token sees all of a shared prefix
_Ints = npt.NDArray[np.integer[Any]]
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of one layer; the same for all layers of an iteration.

    items        [items, len(ITEM_FIELDS)] int32, in the order of `starts`
    starts       [heights + 1] int32: items [starts[i], starts[i + 1]) are of height `rows[i]`
    token_order  [tokens] int32: rank -> row of the query tensor
    bases        [tokens + 1] int32 by rank: pieces [bases[i], bases[i + 1]) are of token i
    rows         the heights

    `grown` makes the plan of a later iteration from it.
    """

    items: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    token_order: npt.NDArray[np.int32]
    bases: npt.NDArray[np.int32]
    rows: tuple[int, ...]

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
        own, requests, last, requests_of_last = self._growing
        items[own, _LIMIT] = seq_lens.take(requests) - 1
        items[last, _END] = seq_lens.take(requests_of_last)
        return replace(self, items=items)

    @cached_property
    def _growing(self) -> tuple[IntArray, _Ints, IntArray, _Ints]:
        """Items of what a decode has for itself, and those among them that end with it; each with
        their requests."""
        request, end, limit = (self.items[:, field] for field in (_REQUEST, _END, _LIMIT))
        own, last = ((limit != _UNLIMITED).nonzero()[0], (end == limit + 1).nonzero()[0])
        return own, request[own], last, request[last]

    def heights(self) -> IntArray:
        """[items] rows of each tile."""
        return np.array(self.rows).repeat(self.starts[1:] - self.starts[:-1])

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
    host = compiled_host()
    if host is None:
        return plan_by_arrays(
            groups, num_queries=num_queries, seq_lens=seq_lens, heads=heads, tiling=tiling
        )
    items, starts, token_order, bases = host.plan(
        groups.order,
        groups.begin,
        groups.end,
        groups.first,
        groups.last,
        groups.own,
        num_queries,
        seq_lens,
        _capacities(tiling.rows, heads.group),
        heads.num_kv_heads,
        tiling.programs,
        _MIN_SPLIT,
    )
    return Plan(
        items=np.frombuffer(items, np.int32).reshape(-1, len(ITEM_FIELDS)),
        starts=np.frombuffer(starts, np.int32),
        token_order=np.frombuffer(token_order, np.int32),
        bases=np.frombuffer(bases, np.int32),
        rows=tiling.rows,
    )


def plan_by_arrays(
    groups: Groups,
    *,
    num_queries: IntArray,
    seq_lens: IntArray,
    heads: HeadShape,
    tiling: Tiling,
) -> Plan:
    """What `make_plan` does where there is no compiler."""
    order, num_groups = groups.order, groups.num_groups
    lengths = seq_lens.take(order)
    is_decode = np.count_nonzero(num_queries == 1) == len(order)
    if is_decode:
        counts: Any = 1
        first_token, token_order = np.arange(len(order) + 1), order
    else:
        assert num_queries.min() >= 1, "every request has a new token"
        counts = num_queries.take(order)
        first_token = _sums(counts)
        shift = _sums(num_queries).take(order) - first_token[:-1]
        token_order = np.arange(first_token[-1]) + shift.repeat(counts)
    seen = lengths - counts
    assert not np.count_nonzero(seen < groups.own), "a new token in a shared prefix"

    # One stretch per group and per request, each to be cut twice: into tiles, and into splits.
    items = np.zeros((num_groups + len(order), len(ITEM_FIELDS)), dtype=np.int32)
    shared, own = items[:num_groups].T, items[num_groups:].T
    begin = first_token.take(groups.begin)
    shared[_FIRST], own[_FIRST] = begin, first_token[:-1]
    shared[_NUM], own[_NUM] = first_token.take(groups.end) - begin, counts
    shared[_REQUEST], own[_REQUEST] = order.take(groups.begin), order
    shared[_BEGIN], own[_BEGIN] = groups.first, groups.own
    shared[_END], own[_END] = groups.last, lengths
    shared[_LIMIT], own[_LIMIT] = _UNLIMITED, seen

    # Tiles: as many whole tokens as fit into a height.
    capacities = _capacities(tiling.rows, heads.group)
    height = np.zeros(len(items), dtype=np.int64)
    several = slice(num_groups if is_decode else None)  # the others are a token each
    tokens = items[several, _NUM]
    height[several] = capacities[:-1].searchsorted(tokens)
    stretch: IntArray | None = None
    first_tile: Any = slice(num_groups)
    own_tile = slice(num_groups, None)
    if np.count_nonzero(tokens > capacities[-1]):
        num_tiles = -(-items[:, _NUM] // capacities.take(height))
        stretch, tile = _runs(num_tiles)
        items, height = items.take(stretch, axis=0), height.take(stretch)
        first_tile = stretch.searchsorted(np.arange(num_groups))
        own_tile = slice(int(num_tiles[:num_groups].sum()), None)
        capacity = capacities.take(height)
        within = tile * capacity
        items[:, _FIRST] += within
        items[:, _NUM] = np.minimum(capacity, items[:, _NUM] - within)
        # No tile of its own reads what is behind its last token.
        own = items[own_tile].T
        own[_LIMIT] += within[own_tile]
        own[_END] = own[_LIMIT] + own[_NUM]
    spans = items[:, _END] - items[:, _BEGIN]
    is_split, most = _splits(spans, height, heads.num_kv_heads, tiling)
    num_splits: IntArray | None = None
    if len(is_split):
        num_splits, step = np.ones(len(items), dtype=np.int64), spans.copy()
        long = spans.take(is_split)
        num = -(-long // most.take(is_split))
        num_splits[is_split], step[is_split] = num, -(-long // num)

    # Pieces: those of a token's groups first, outermost first, then those of its own part. All
    # members of a group are in the same groups above it, so they agree on the numbers. Splits are
    # alike for all tiles of a group.
    piece = _pieces_before(groups, None if num_splits is None else num_splits[first_tile])
    if stretch is not None:
        piece = piece.take(stretch)
    # A token with a single piece needs no room for it.
    own_piece = piece[own_tile]
    pieces = own_piece + (1 if num_splits is None else num_splits[own_tile])
    is_only = pieces == 1
    pieces -= is_only
    own_piece -= is_only
    items[:, _PIECE] = piece
    bases = _sums(pieces if is_decode else pieces.repeat(items[own_tile, _NUM]))

    sorting = height.argsort(kind="stable")
    if num_splits is not None:
        num_each = num_splits.take(sorting)
        sorting = sorting.repeat(num_each)
        split = np.arange(len(sorting)) - (num_each.cumsum() - num_each).repeat(num_each)
        if stretch is not None:
            # Tiles of one span stand next to each other, so that they run at the same time and all
            # but the first find it in the cache of the device.
            together = np.lexsort((split, stretch.take(sorting), height.take(sorting)))
            sorting, split = sorting.take(together), split.take(together)
    items = items.take(sorting, axis=0)
    if num_splits is not None:
        span, step = spans.take(sorting), step.take(sorting)
        within = split * step
        begins, ends = items[:, _BEGIN], items[:, _END]
        np.add(begins, np.minimum(within + step, span), out=ends, casting="same_kind")
        begins += np.minimum(within, span)
        items[:, _PIECE] += split
    starts = _sums(np.bincount(height, num_splits, len(capacities)))
    return Plan(
        items=items,
        starts=starts.astype(np.int32),
        token_order=token_order.astype(np.int32),
        bases=bases.astype(np.int32),
        rows=tiling.rows,
    )


@cache
def _capacities(rows: tuple[int, ...], group: int) -> IntArray:
    """How many tokens fit into each height."""
    assert rows[0] >= group, f"{group=} rows do not fit into a tile of {rows[0]}"
    return np.array([height // group for height in rows], dtype=np.int64)


def _splits(
    spans: _Ints, height: IntArray, num_kv_heads: int, tiling: Tiling
) -> tuple[IntArray, _Ints]:
    """Tiles whose KV is split, and the longest that each tile may read at once: as even as it takes
    for all programs to have work, each height being a launch of its own."""
    totals = np.bincount(height, spans, len(tiling.rows)).tolist()
    shares = [max(_MIN_SPLIT, math.ceil(n * num_kv_heads / tiling.programs)) for n in totals]
    most = np.array(shares, dtype=np.int32).take(height)
    return (spans > most).nonzero()[0], most


def _pieces_before(groups: Groups, splits: IntArray | None) -> IntArray:
    """[groups + requests] pieces of the groups around a group, and of all groups of a request."""
    if splits is None:
        return np.concatenate((groups.level, groups.depth))
    pieces = np.zeros(groups.num_groups + len(groups.order), dtype=np.int64)
    for level in range(1, groups.num_levels):
        mine, outer = (groups.level == level).nonzero()[0], (groups.level < level).nonzero()[0]
        so_far = of_all_around(
            groups.begin[outer], groups.end[outer], splits[outer], len(groups.order)
        )
        pieces[mine] = so_far[groups.begin[mine]]
    pieces[groups.num_groups :] = of_all_around(groups.begin, groups.end, splits, len(groups.order))
    return pieces


def _sums(numbers: npt.NDArray[Any]) -> IntArray:
    """Of none, of the first, of the first two, ...: [2, 3] -> [0, 2, 5]."""
    sums = np.zeros(len(numbers) + 1, dtype=np.int64)
    sums[1:] = numbers.cumsum()
    return sums


def _runs(lengths: _Ints) -> tuple[IntArray, IntArray]:
    """Runs of such lengths, and places in them: [2, 3] -> [0, 0, 1, 1, 1], [0, 1, 0, 1, 2]."""
    run = np.arange(len(lengths)).repeat(lengths)
    return run, np.arange(len(run)) - _sums(lengths).take(run)


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
    spans = plan.column("kv_end") - plan.column("kv_begin")
    return int((plan.heights() * spans).sum()) * heads.num_kv_heads
