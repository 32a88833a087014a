"""The predicted time that each phase of an iteration may take, and how many tokens fit into it."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cosched.core.batch import BatchTotals, IntArray
from cosched.core.estimates import Predictor
from cosched.schedule.ledger import Ledger

_MANY = 2048
"""Tokens over which the steps of tiles even out."""

_LEAST_CUT = 64
"""If fewer tokens than this fit below the end of a tile, an online prompt is not cut there: it
would be computed in many short chunks, each at the cost of a mixed batch."""

_TILES = (64, 128, 256)
"""Tokens that GEMM kernels work on at a time."""

_PIECES = (128, 256, 384, 512)
"""Tokens of an iteration with a piece of an online prompt, decodes among them."""


class OfflinePart(NamedTuple):
    """What offline work may take of an iteration.

    seconds      how long it may be [s]
    num_decodes  most offline decodes
    admits       prompts may begin although decodes pause
    """

    seconds: float
    num_decodes: int = sys.maxsize
    admits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Of one iteration [s].

    online_s       with online prefills
    ends_s         in place of `online_s` for an iteration in which an online prompt ends
    offline_s      with offline work
    beside_online  KV tokens read for each of the offline requests that will decode beside online
                   prompts, if they fit: then the prompts may be cut where a tile of tokens ends.
                   None: they may not
    longer_s       time of an iteration without offline work -> most time with it [s]; None: the
                   limit of the phase alone holds
    rides          offline work may be in an iteration with online prefills
    pieces_s       online prompts are cut to the size at which they delay decodes least, or to what
                   fits into this time, which other ranks take anyway; None: they are not cut so
    media_s        with an offline image that does not fit `offline_s` (`cosched.schedule.media`)
    """

    online_s: float
    ends_s: float
    offline_s: float
    beside_online: IntArray | None
    longer_s: Callable[[float], float] | None = None
    rides: bool = True
    pieces_s: float | None = None
    media_s: float = 0.0


class TimeBudget:
    """Implements `cosched.schedule.base.Pace`: the predicted time of what is in a ledger is at most
    a limit per phase [s]."""

    def __init__(self, predictor: Predictor, ledger: Ledger, limits: TimeLimits) -> None:
        self._predictor = predictor
        self._ledger = ledger
        self._limits = limits
        self.online_s = limits.online_s
        self.offline_s = limits.offline_s
        self._media_s = limits.media_s
        self.paced: Callable[[float], OfflinePart] | None = None
        """Most time of an iteration with offline work [s] -> what that may take of it; None: as
        much as it can."""
        self.alone_s = 0.0
        """Of the iteration without offline work, where `longer_s` asks for it [s]."""
        self._most_decodes = sys.maxsize
        self.admits = False
        self._most_online: int | None = None
        self._most_tokens: int | None = None

    def begin_offline(self) -> None:
        if not self._limits.rides and self._ledger.totals.num_new:
            self.offline_s = 0.0
        if self._limits.longer_s is not None:
            self.alone_s = self._ledger.seconds()
            longest_s = self._limits.longer_s(self.alone_s)
            self.offline_s = min(self.offline_s, longest_s)
            self._media_s = min(self._media_s, longest_s)
        if self.paced is not None:
            part = self.paced(self.offline_s)
            self.offline_s, self._most_decodes, self.admits = part

    def limits(self) -> Mapping[str, float]:
        limits = {"online": self.online_s, "offline": self.offline_s}
        return {phase: limit_s for phase, limit_s in limits.items() if limit_s < math.inf}

    def online_tokens(self, num_cached: int, limit: int, *, encoded: int = 0) -> int:
        limit = self.piece(num_cached, limit)
        if limit <= 0:
            return 0
        if encoded:
            return self._beside_media(num_cached, limit, encoded, self.online_s, math.inf)
        most = self._predictor.max_prefill(self._ledger.totals, num_cached, self.online_s, limit)
        if most == 0:
            return 0
        if (
            most < limit
            and self._seconds(self._ledger.totals, limit, num_cached) <= self._limits.ends_s
        ):
            return limit  # the rest would take an iteration of its own
        if self._limits.beside_online is None:
            return most
        totals = self._ledger.totals.copy()
        totals.add_decodes(self._limits.beside_online)
        in_batch = totals.num_new + totals.num_decodes
        tile = _TILES[-1]
        to_full = -(-(in_batch + most) // tile) * tile - in_batch
        if self._seconds(totals, to_full, num_cached) <= self.offline_s:
            return most  # offline work fills the tile
        cut = self._worthwhile(totals, most, num_cached)
        return cut if cut >= min(most, _LEAST_CUT) else most

    def piece(self, num_cached: int, limit: int) -> int:
        """Of `limit` tokens of an online prompt, those that this iteration should compute.

        Decodes wait for memory, so that the first tokens beside them cost half as much time as
        the tokens of a long prompt.
        """
        if self._limits.pieces_s is None:
            return limit
        totals, seconds = self._ledger.totals, self._seconds
        in_batch = totals.num_new + totals.num_decodes
        if self._most_online is None:
            alone_s = self._predictor.predict_s(totals)
            sizes = [size - in_batch for size in _PIECES if size - in_batch >= _LEAST_CUT]
            self._most_online = in_batch + min(
                sizes or [limit], key=lambda n: (seconds(totals, n, num_cached) - alone_s) / n
            )
        free = self._predictor.max_prefill(totals, num_cached, self._limits.pieces_s, limit)
        return min(limit, max(self._most_online - in_batch, free))

    def offline_tokens(
        self, num_cached: int, limit: int, *, encoded: int = 0, is_last: bool = False
    ) -> int:
        totals = self._ledger.totals
        in_batch = totals.num_new + totals.num_decodes
        if self._most_tokens is None:
            most = self._predictor.max_prefill(totals, num_cached, self.offline_s, _MANY)
            if most == _MANY:
                self._most_tokens = sys.maxsize
            else:
                self._most_tokens = in_batch + self._worthwhile(totals, most, num_cached)
        left = self._most_tokens - in_batch
        if left <= 0:
            return 0
        limit = min(limit, left)
        if encoded:
            return self._beside_media(num_cached, limit, encoded, self.offline_s, self._media_s)
        most = self._predictor.max_prefill(totals, num_cached, self.offline_s, limit)
        return self._worthwhile(totals, most, num_cached) if is_last else most

    def _beside_media(
        self, num_cached: int, limit: int, encoded: int, limit_s: float, most_s: float
    ) -> int:
        """Tokens of a prompt beside so many of the encoder. The first media of an iteration that
        leave no time for `_LEAST_CUT` tokens make it as long as it takes, up to `most_s`."""
        predictor, totals = self._predictor, self._ledger.totals
        beside = totals.copy()
        beside.add_encoded(encoded)
        if not totals.num_encoded:
            least_s = self._seconds(beside, min(limit, _LEAST_CUT), num_cached)
            limit_s = max(limit_s, min(least_s, most_s))
        return predictor.max_prefill(beside, num_cached, limit_s, limit)

    def has_offline_time(self) -> bool:
        if self._most_tokens is None:
            return self._ledger.seconds_with(1, 0) <= self.offline_s
        return self._ledger.totals.num_new + self._ledger.totals.num_decodes < self._most_tokens

    def _worthwhile(self, totals: BatchTotals, most: int, num_cached: int) -> int:
        """The most efficient size of a prefill up to `most`.

        Kernels work on tiles of tokens, so the first token beyond a full tile may cost as much as a
        whole tile. Efficiency is the mean time of many tokens, times their number, less the time
        that they take here. Unspent time is slack, with which a later iteration fills its tile.
        """
        if most == 0:
            return 0
        in_batch = totals.num_new + totals.num_decodes
        alone_s = self._predictor.predict_s(totals)
        token_s = (self._seconds(totals, _MANY, num_cached) - alone_s) / _MANY
        sizes = {most} | {(in_batch + most) // tile * tile - in_batch for tile in _TILES}
        fitting = [n for n in sizes if n > 0]
        return max(fitting, key=lambda n: n * token_s - self._seconds(totals, n, num_cached))

    def _seconds(self, totals: BatchTotals, num_tokens: int, num_cached: int) -> float:
        trial = totals.copy()
        trial.add_prefill(num_tokens, num_cached)
        return self._predictor.predict_s(trial)

    def decodes_fit(self, contexts: IntArray) -> bool:
        if len(contexts) > self._most_decodes:
            return False
        return self._ledger.seconds_with_decodes(contexts) <= self.offline_s

    def offline_decodes(self, contexts: IntArray) -> int:
        contexts = contexts[: self._most_decodes]
        if self.decodes_fit(contexts):
            return len(contexts)
        totals, trial = self._ledger.totals, self._ledger.totals.copy()
        sums, longest = contexts.cumsum(), np.maximum.accumulate(contexts)

        def seconds(num: int) -> float:
            """With the first of them."""
            trial.num_decodes = totals.num_decodes + num
            trial.decode_context = totals.decode_context + int(sums[num - 1])
            trial.max_decode_context = max(totals.max_decode_context, int(longest[num - 1]))
            return self._predictor.predict_s(trial)

        return bisect_right(range(1, len(contexts)), self.offline_s, key=seconds)
