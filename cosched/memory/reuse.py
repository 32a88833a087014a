"""The chance that an online context is used again, learned while running.

A finished request leaves a context behind. The next turn of its session, if there is one, begins
with it. How long that takes differs by kind of visit: a first message is often the last, the
twentieth turn of an agent is followed by the next within seconds. For each kind a discrete-time
survival estimate is kept (Kaplan and Meier 1958, over age bins that double in width): of those that
reached a bin, what share came back in it. Old observations fade with a half-life.

It learns from arrivals and ends alone, not from what the cache still has, so that evicting a
context does not teach that it is not missed. A continuation is found by hashes of the token blocks
from the start of the prompt.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

BIN_EDGES_S: tuple[float, ...] = (0.0, *[0.5 * 2.0**i for i in range(14)])
"""Ages at which bins begin [s]: 0, 0.5, 1, 2, ... 4096. After the end of the last, 8192 s, no
reuse is expected."""

_END_S = 2 * BIN_EDGES_S[-1]
_WIDTHS_S = tuple(b - a for a, b in zip(BIN_EDGES_S, (*BIN_EDGES_S[1:], _END_S), strict=True))
_NUM_BINS = len(BIN_EDGES_S)

BLOCK = 64
"""Tokens whose hash marks a place in a prompt."""

_MOST_TURNS = 4
_DEPTHS = (2048, 16384)
_NUM_KINDS = _MOST_TURNS * (len(_DEPTHS) + 1)

_PRIOR_HAZARDS = (
    *(0.02, 0.03, 0.06, 0.10, 0.14, 0.15, 0.15, 0.15),
    *(0.12, 0.10, 0.08, 0.06, 0.04, 0.02, 0.02),
)
"""Share of those that reach a bin that come back in it, as long as nothing is known: three of four
continue, half of them within half a minute. Too high costs offline work until it is learned better,
too low costs chat."""
_PRIOR_WEIGHT = 2.0
"""Visits that the prior counts as, in each bin."""

_MOST_DOUBLINGS = 20.0
"""Half-lives after which the weights of observations are counted from a new beginning."""

_MOST_MARKS = 100_000


def block_hashes(token_ids: Sequence[int]) -> list[int]:
    """A hash for each whole block of a prompt, of all tokens up to its end. Equal within a process
    only. `token_ids` is an array, whose bytes are hashed."""
    view = memoryview(token_ids)  # type: ignore[arg-type]
    chain: list[int] = []
    last = 0
    for end in range(BLOCK, len(view) + 1, BLOCK):
        last = hash((last, bytes(view[end - BLOCK : end])))
        chain.append(last)
    return chain


class _Mark(NamedTuple):
    visit_id: int
    kind: int
    turn: int
    end_s: float


class ReuseModel:
    """See the module's docstring."""

    def __init__(self, *, half_life_s: float = 3600.0, horizon_s: float = 120.0) -> None:
        """half_life_s: after which an observation counts half; horizon_s: what "soon" means."""
        self._half_life_s = half_life_s
        self._horizon_s = horizon_s
        self._returned = [[0.0] * _NUM_BINS for _ in range(_NUM_KINDS)]
        self._at_risk = [[0.0] * _NUM_BINS for _ in range(_NUM_KINDS)]
        self._marks: OrderedDict[int, _Mark] = OrderedDict()
        self._open: dict[int, tuple[int, int]] = {}  # visit -> its bin and its tokens
        self._open_tokens = [[0] * _NUM_BINS for _ in range(_NUM_KINDS)]
        self._due: list[tuple[float, int, _Mark]] = []
        self._ids = itertools.count()
        self._scale_s = 0.0
        self._chances = [_chances(_PRIOR_HAZARDS, math.inf) for _ in range(_NUM_KINDS)]
        self._host_chances = list(self._chances)
        self._soon = [_chances(_PRIOR_HAZARDS, horizon_s) for _ in range(_NUM_KINDS)]
        self._next = 0

    # --- Learning ---

    def arrived(self, hashes: Sequence[int], now_s: float) -> int:
        """A request has come; hashes: of its prompt (`block_hashes`). Its turn: 1 for one that
        continues nothing known."""
        for value in reversed(hashes):
            mark = self._marks.get(value)
            if mark is not None:
                self._returned_now(mark, now_s)
                return mark.turn + 1
        return 1

    def ended(
        self,
        hashes: Sequence[int],
        *,
        turn: int,
        num_tokens: int,
        num_needed: int,
        now_s: float,
    ) -> int:
        """A request is over. The kind of this visit.

        hashes      of its prompt
        num_tokens  of its context
        num_needed  of these, what a request that continues it must find to be in time
        """
        kind = _kind(turn, num_tokens)
        if hashes:
            mark = _Mark(next(self._ids), kind, turn, now_s)
            # The last block may end differently in the next turn: templates mark where the reply
            # begins.
            self._set_mark(hashes[-1], mark)
            if len(hashes) > 1:
                self._set_mark(hashes[-2], mark)
            self._open[mark.visit_id] = (0, num_needed)
            self._open_tokens[kind][0] += num_needed
            heapq.heappush(self._due, (now_s + BIN_EDGES_S[1], mark.visit_id, mark))
        return kind

    def advance(self, now_s: float) -> None:
        """Say what time it is: contexts that were not used yet get older. O(log n) per bin."""
        due = self._due
        while due and due[0][0] <= now_s:
            _, visit_id, mark = heapq.heappop(due)
            state = self._open.get(visit_id)
            if state is None:
                continue
            index, num_tokens = state
            self._observe(mark.kind, index, 0.0, now_s)
            tokens = self._open_tokens[mark.kind]
            tokens[index] -= num_tokens
            if index + 1 == _NUM_BINS:
                del self._open[visit_id]
                continue
            self._open[visit_id] = (index + 1, num_tokens)
            tokens[index + 1] += num_tokens
            end_s = BIN_EDGES_S[index + 2] if index + 2 < _NUM_BINS else _END_S
            heapq.heappush(due, (mark.end_s + end_s, visit_id, mark))

    def _set_mark(self, value: int, mark: _Mark) -> None:
        self._marks[value] = mark
        self._marks.move_to_end(value)
        if len(self._marks) > _MOST_MARKS:
            self._marks.popitem(last=False)

    def _returned_now(self, mark: _Mark, now_s: float) -> None:
        self.advance(now_s)
        state = self._open.pop(mark.visit_id, None)
        if state is not None:  # else it has come back before, or after all bins
            index, num_tokens = state
            self._open_tokens[mark.kind][index] -= num_tokens
            self._observe(mark.kind, index, 1.0, now_s)

    def _observe(self, kind: int, index: int, returned: float, at_s: float) -> None:
        # Newer observations weigh more, instead of older ones less: nothing else must be touched.
        doublings = (at_s - self._scale_s) / self._half_life_s
        if doublings > _MOST_DOUBLINGS:
            self._rescale(at_s)
            doublings = 0.0
        weight = 2.0**doublings
        self._at_risk[kind][index] += weight
        self._returned[kind][index] += weight * returned

    def _rescale(self, at_s: float) -> None:
        factor = 2.0 ** ((self._scale_s - at_s) / self._half_life_s)
        for table in (*self._at_risk, *self._returned):
            table[:] = [value * factor for value in table]
        self._scale_s = at_s

    # --- Asking ---

    def refresh(
        self,
        now_s: float,
        *,
        discount_s: float = math.inf,
        host_discount_s: float | None = None,
        num_kinds: int = _NUM_KINDS,
    ) -> None:
        """Take what was learned into the answers: of `num_kinds`, of the others in later calls.
        discount_s: time after which memory is used for others [s]; a return that comes after t
        seconds counts exp(-t / discount_s). host_discount_s: the same of host memory;
        None: there is none."""
        # What one visit seen just now weighs.
        unit = 2.0 ** min((now_s - self._scale_s) / self._half_life_s, _MOST_DOUBLINGS)
        prior = _PRIOR_WEIGHT * unit
        for kind in range(self._next, self._next + num_kinds):
            kind %= _NUM_KINDS
            hazards = self._hazards(kind, prior, 1.0)
            self._chances[kind] = _chances(hazards, discount_s)
            if host_discount_s is not None:
                self._host_chances[kind] = _chances(hazards, host_discount_s)
            # How many come is soon known, when they come is not: what is kept for them while they
            # are away costs offline work, and one that never comes would be waited for at each age.
            share = self._share_of_prior(kind, prior)
            self._soon[kind] = _chances(self._hazards(kind, prior, share), self._horizon_s)
        self._next = (self._next + num_kinds) % _NUM_KINDS

    def _hazards(self, kind: int, prior: float, share: float) -> list[float]:
        """Of those that reach a bin, the share that comes back in it. share: of the belief held as
        long as nothing is known, which weighs as much as `prior` observations."""
        observed = zip(self._returned[kind], self._at_risk[kind], _PRIOR_HAZARDS, strict=True)
        return [(came + prior * share * before) / (seen + prior) for came, seen, before in observed]

    def _share_of_prior(self, kind: int, prior: float) -> float:
        """Returns seen at all ages, of those that were believed in; 1 at most."""
        believed = sum(n * p for n, p in zip(self._at_risk[kind], _PRIOR_HAZARDS, strict=True))
        return min((sum(self._returned[kind]) + prior) / (believed + prior), 1.0)

    @staticmethod
    def next_change_s(age_s: float) -> float:
        """The age at which `chance` changes next [s]; inf: never."""
        if age_s >= _END_S:
            return math.inf
        index = bisect_right(BIN_EDGES_S, age_s)
        return BIN_EDGES_S[index] if index < _NUM_BINS else _END_S

    def chance(self, kind: int, age_s: float, *, on_host: bool = False) -> float:
        """That a visit of this kind and age comes back, discounted by `refresh`: while it
        can stay on the device, or in host memory."""
        if age_s >= _END_S:
            return 0.0
        chances = self._host_chances if on_host else self._chances
        return chances[kind][bisect_right(BIN_EDGES_S, age_s) - 1]

    def expected_tokens(self) -> float:
        """Of the contexts that have not come back yet, what is needed of those that are expected to
        soon [tokens]: a return after t seconds counts exp(-t / horizon_s)."""
        return sum(
            chance * tokens
            for table, counts in zip(self._soon, self._open_tokens, strict=True)
            for chance, tokens in zip(table, counts, strict=True)
            if tokens
        )


def _chances(hazards: Sequence[float], discount_s: float) -> list[float]:
    """The discounted chance of a return for one at the begin of each bin."""
    value = 0.0
    values = []
    for hazard, half in zip(reversed(hazards), _discounts(discount_s), strict=True):
        value = hazard * half + (1 - hazard) * half * half * value
        values.append(value)
    return values[::-1]


def _kind(turn: int, num_tokens: int) -> int:
    return (min(turn, _MOST_TURNS) - 1) * (len(_DEPTHS) + 1) + bisect_right(_DEPTHS, num_tokens)


@lru_cache(maxsize=8)
def _discounts(discount_s: float) -> Sequence[float]:
    """Of half of each bin, the last one first."""
    return [math.exp(-width_s / 2 / discount_s) for width_s in reversed(_WIDTHS_S)]
