"""The shape of one iteration: what its time depends on, and the sums that predict it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["QUERY_TILE", "BatchShape", "BatchTotals", "IntArray", "Prefill"]

IntArray = npt.NDArray[np.int64]

QUERY_TILE = 64
"""Queries that attention kernels work on at a time: a chunk with fewer takes about as long as one
with as many. Where a tile half filled ends and a full one begins, the cost of a chunk over a long
prefix turns from one per key into one per pair."""


class Prefill(NamedTuple):
    """One request's prefill in an iteration [tokens].

    num_new     prompt tokens computed now
    num_cached  tokens before them whose KV is there already (cached prefix, earlier chunks)
    """

    num_new: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """One forward pass.

    prefills    the prefill part, one entry per request
    decodes     context length of each decoding request: tokens attended to, its new one included
    num_drafts  tokens verified for each decode beside its own (speculative decoding)
    num_loaded  tokens whose KV is loaded from host memory during it, layer by layer
    num_repeated KV tokens of the decodes that others of them read as well, on the same slots: of a
                prefix that k share, k - 1 times its tokens. 0 where this was not looked up, as
                where the engine reads every context separately
    encoded     for each of the prefills, the tokens of images, video and sound that the model's
                encoder computes in it; empty: none
    """

    prefills: Sequence[Prefill] = ()
    decodes: Sequence[int] = ()
    num_drafts: int = 0
    num_loaded: int = 0
    num_repeated: int = 0
    encoded: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens through the model's layers: new prompt tokens, one per decode and per draft."""
        num_decoded = len(self.decodes) * (1 + self.num_drafts)
        return sum(p.num_new for p in self.prefills) + num_decoded


class BatchTotals:
    """Sums over an iteration that a planner grows request by request. Every update is O(1).

    num_prefills         requests with prompt tokens in the iteration
    num_new              their prompt tokens computed now (HyGen's S_p)
    num_cached           tokens before those whose KV is there already
    double_pairs         twice the (query, key) pairs of prefill attention: sum of n * (2c + n) for
                         n new tokens over c cached; whole numbers, so no rounding
    double_tail_pairs    the same for the queries beyond the first `QUERY_TILE` of each prefill
    max_prefill_context  longest n + c [tokens]
    num_decodes          decoding requests, one token each
    decode_context       KV tokens that are read for them: the sum of those they attend to, their
                         new ones included; what an engine reads once for several of them
                         (`EngineCaps.shared_prefix`) counts once
    max_decode_context   the largest of these [tokens]
    num_loaded           tokens whose KV comes back from host memory while the iteration runs
    num_encoded          tokens of images, video and sound that the model's encoder computes
    num_encodings        requests whose images, video or sound these are: an encoder that fills up a
                         sound with silence takes as long for a short one
    """

    __slots__ = (
        "decode_context",
        "double_pairs",
        "double_tail_pairs",
        "max_decode_context",
        "max_prefill_context",
        "num_cached",
        "num_decodes",
        "num_encoded",
        "num_encodings",
        "num_loaded",
        "num_new",
        "num_prefills",
    )

    def __init__(self) -> None:
        self.num_prefills = 0
        self.num_new = 0
        self.num_cached = 0
        self.double_pairs = 0
        self.double_tail_pairs = 0
        self.max_prefill_context = 0
        self.num_decodes = 0
        self.decode_context = 0
        self.max_decode_context = 0
        self.num_loaded = 0
        self.num_encoded = 0
        self.num_encodings = 0

    @classmethod
    def of(cls, batch: BatchShape) -> BatchTotals:
        """The totals of a whole batch; O(requests)."""
        totals = cls()
        for num_new, num_cached in batch.prefills:
            totals.add_prefill(num_new, num_cached)
        totals.add_decodes(batch.decodes)
        totals.decode_context -= batch.num_repeated
        totals.num_loaded = batch.num_loaded
        for num_encoded in batch.encoded:
            totals.add_encoded(num_encoded)
        return totals

    def add_prefill(self, num_new: int, num_cached: int) -> None:
        """A request with `num_new` (at least 1) prompt tokens over `num_cached` cached ones."""
        self.num_prefills += 1
        self.num_new += num_new
        self.num_cached += num_cached
        self.double_pairs += num_new * (2 * num_cached + num_new)
        tail = num_new - QUERY_TILE
        if tail > 0:
            self.double_tail_pairs += tail * (2 * (num_cached + QUERY_TILE) + tail)
        context = num_new + num_cached
        if context > self.max_prefill_context:
            self.max_prefill_context = context

    def add_prefills(self, num: int, num_new: int, num_cached: int) -> None:
        """As many requests that are all like this one. O(1)."""
        if not num:
            return
        self.num_prefills += num
        self.num_new += num * num_new
        self.num_cached += num * num_cached
        self.double_pairs += num * num_new * (2 * num_cached + num_new)
        tail = num_new - QUERY_TILE
        if tail > 0:
            self.double_tail_pairs += num * tail * (2 * (num_cached + QUERY_TILE) + tail)
        self.max_prefill_context = max(self.max_prefill_context, num_new + num_cached)

    def add_decode(self, context: int) -> None:
        """A decode that attends to `context` tokens, its new one included."""
        self.num_decodes += 1
        self.decode_context += context
        if context > self.max_decode_context:
            self.max_decode_context = context

    def add_decodes(self, contexts: Sequence[int] | IntArray) -> None:
        """Many decodes; O(len(contexts)), in C."""
        if not len(contexts):
            return
        if isinstance(contexts, np.ndarray):
            total, longest = int(np.add.reduce(contexts)), int(np.maximum.reduce(contexts))
        else:
            total, longest = sum(contexts), max(contexts)
        self.num_decodes += len(contexts)
        self.decode_context += total
        if longest > self.max_decode_context:
            self.max_decode_context = longest

    def add_equal_decodes(self, num: int, context: int) -> None:
        """As many decodes that all attend to `context` tokens. O(1)."""
        if num:
            self.num_decodes += num
            self.decode_context += num * context
            self.max_decode_context = max(self.max_decode_context, context)

    def add_load(self, num_tokens: int) -> None:
        """A request whose `num_tokens` tokens of KV are loaded from host memory."""
        self.num_loaded += num_tokens

    def add_encoded(self, num_tokens: int) -> None:
        """A request of whose images, video and sound `num_tokens` tokens are encoded; 0: none."""
        if num_tokens:
            self.num_encoded += num_tokens
            self.num_encodings += 1

    def copy(self) -> BatchTotals:
        other = BatchTotals.__new__(BatchTotals)
        other.num_prefills = self.num_prefills
        other.num_new = self.num_new
        other.num_cached = self.num_cached
        other.double_pairs = self.double_pairs
        other.double_tail_pairs = self.double_tail_pairs
        other.max_prefill_context = self.max_prefill_context
        other.num_decodes = self.num_decodes
        other.decode_context = self.decode_context
        other.max_decode_context = self.max_decode_context
        other.num_loaded = self.num_loaded
        other.num_encoded = self.num_encoded
        other.num_encodings = self.num_encodings
        return other

    def decodes_only(self) -> BatchTotals:
        """The totals of its decodes alone."""
        other = BatchTotals()
        other.num_decodes = self.num_decodes
        other.decode_context = self.decode_context
        other.max_decode_context = self.max_decode_context
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchTotals) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        known = ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"BatchTotals({known})"
