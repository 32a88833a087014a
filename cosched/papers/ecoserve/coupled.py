"""The coupled schedulers that EcoServe is compared with (EcoServe §2.1, §2.2, Fig. 1).

Idea         a request gets compute and KV memory at once: it is admitted where there is memory for
             what it may generate, and from then on it decodes until it ends. The schedulers differ
             in how much KV they set aside (`Allocation`), in the order of admission (`Order`), in
             how many requests run at once, and in how large an iteration is.
Assumptions  KV can be promised to a request (`EngineCaps.promises`). `EXACT`, `SHORTEST` and
             `GROUPS` rely on `View.length`.
Good         simple; what is set aside in advance is there when it is needed (`MAX`, and `EXACT`
             where the length is known).
Bad          KV that is set aside and not used yet keeps others out (`MAX`, `EXACT`), or memory runs
             out in the middle of a response (`BLOCK`). No target and no time is considered.
Parameters   `CoupledOptions`; the target forward size follows from the predictor
             (`cosched.papers.ecoserve.forward_size`).

Deviations: docs/policies.md.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from math import hypot
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import msgspec

from cosched.core.plan import Plan, PreemptMode, SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.core.view import View
from cosched.papers.ecoserve.forward_size import TILE, target_forward_size
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import (
    Steps,
    make_room_for_decodes,
    must_decode,
    must_wait,
    offline_admissions_left,
    owes_recomputing,
    preempt_beyond_limit,
)
from cosched.schedule.preemption import can_copy

BLOCK = 32
"""KV tokens of a block (§2.1)."""

WINDOW = 256
"""Waiting requests of a class that are compared with each other (own)."""


_NUM_LEVELS = 5
"""Of `Order.LEVELS`; a request leaves the first after one iteration, each other one after twice as
many as the level above."""


class Allocation(Enum):
    """How many output tokens KV is set aside for when a request is admitted (§1)."""

    MAX = "all that it may generate"
    EXACT = "what it is expected to generate at the most, in whole blocks"
    BLOCK = "a block, and another one when that is used up"


class Order(Enum):
    """Order of admission in each class; of equals the first that came."""

    ARRIVAL = "first come, first served"
    SHORTEST = "expected to end first; it preempts those that are to end later"
    LEVELS = "multi-level feedback queue: least iterations so far, by levels; preempts lower levels"
    DISTANCE = "demand on compute and KV closest to the free part of both"
    GROUPS = "those of equal expected length together; others when a group has ended"

    @property
    def preempts(self) -> bool:
        return self in (Order.SHORTEST, Order.LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledOptions:
    """In what the schedulers differ.

    most_requests  at once; None: as many as there is memory for
    fills_forward  an iteration has at most the target forward size of tokens, prompts are cut for
                   it; False: prompts whole
    prefill_first  prompts come before decodes where the two do not share an iteration
    stop           how requests are preempted; CHECKPOINT is RECOMPUTE without host memory
    """

    allocation: Allocation
    order: Order = Order.ARRIVAL
    most_requests: int | None = None
    fills_forward: bool = False
    prefill_first: bool = False
    stop: PreemptMode = PreemptMode.KEEP_KV


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """The state between two plans.

    chosen   rids of the requests of each group that has not ended
    is_open  more groups may be chosen: one has ended, or memory was not used up
    """

    chosen: tuple[tuple[str, ...], ...] = ()
    is_open: bool = True


_Rank: TypeAlias = tuple[bool, int]
"""Offline or not; then smaller is earlier."""


class CoupledPolicy:
    """See the module's docstring."""

    def __init__(self, settings: PolicySettings, options: CoupledOptions) -> None:
        self.options = options
        self.initial = Groups() if options.order is Order.GROUPS else None

    def plan(self, view: View, state: Groups | None) -> tuple[Plan, Groups | None]:
        packing = _Packing(view, self.options)
        packing.make_room()
        if state is not None:
            state = packing.without_ended(state)
        if packing.continue_prefill() and not packing.builder.num_preempted:
            if state is not None:
                state = packing.admit_groups(state)
            elif self.options.order is Order.DISTANCE:
                packing.admit_closest()
            elif self.options.order.preempts:
                packing.admit_ranked()
            else:
                packing.admit_in_order(packing.waiting())
        return packing.builder.build(), state


class _Demand(NamedTuple):
    """What a waiting request takes: prompt tokens to compute, and KV tokens."""

    compute: int
    memory: int
    request: Request


class _Packing:
    """One plan under construction."""

    def __init__(self, view: View, options: CoupledOptions) -> None:
        stop = options.stop
        if stop is PreemptMode.CHECKPOINT and not can_copy(view):
            stop = PreemptMode.RECOMPUTE
        self.builder = PlanBuilder(view, stop=stop)
        self._view = view
        self._options = options
        self._block = max(view.caps.page_size, BLOCK)
        self._forward_size = sys.maxsize
        if options.fills_forward:
            self._forward_size = target_forward_size(view.predictor)

    # Memory

    def make_room(self) -> None:
        """Preempt the last in the order until what runs can write its next tokens."""
        preempt_beyond_limit(self.builder, Steps())
        make_room_for_decodes(self.builder, Steps(victims=self._last_first))
        caps = self._view.caps
        if (
            self._options.allocation is Allocation.BLOCK
            and caps.promises
            and caps.page_size < BLOCK
        ):
            self._renew_blocks()

    def _last_first(self, builder: PlanBuilder) -> list[Request]:
        """Requests to preempt, in this order. The first of the order is never one."""
        under_way = [r for r in self._view.running if not builder.is_preempted(r)]
        under_way += builder.unfinished()
        under_way.sort(key=self._place, reverse=True)
        return [request for request in under_way[:-1] if request.traits.can_preempt]

    def _renew_blocks(self) -> None:
        """A block more for those that have used theirs up, in the order; the last are preempted
        for it."""
        builder = self.builder
        used_up = [
            request
            for request in self._view.running
            if (self._view.promised(request) or 0) <= request.num_output_tokens
            and request.num_output_tokens < request.max_new_tokens
        ]
        if not used_up:
            return
        victims = iter(self._last_first(builder))
        for request in sorted(used_up, key=self._place):
            need = BLOCK * request.traits.num_rows
            while not builder.is_preempted(request) and builder.ledger.kv.headroom < need:
                victim = next(victims, None)
                if victim is None:
                    return
                builder.preempt(victim)
            if not builder.is_preempted(request):
                self._promise(request)

    def _allocation(self, request: Request) -> int:
        """Output tokens, generated ones included, to set KV aside for."""
        if self._options.allocation is Allocation.MAX:
            num_tokens = request.max_new_tokens
        elif self._options.allocation is Allocation.EXACT:
            num_tokens = self._num_blocks(request) * self._block
        else:
            num_tokens = request.num_output_tokens + self._block
        # One that needs all the memory there is would never be admitted for the rounding.
        most = self._view.kv.total - request.num_prompt_tokens - 3 * self._view.caps.page_size
        return max(min(num_tokens, request.max_new_tokens, most), 0)

    def _num_blocks(self, request: Request) -> int:
        """Of the output that it is expected to generate in all, at the most."""
        num_tokens = request.num_output_tokens + self._view.length(request).upper
        return max(-(-num_tokens // self._block), 1)

    def _promise(self, request: Request) -> None:
        num_tokens = self._allocation(request)
        if self._view.caps.promises and num_tokens != self._view.promised(request):
            self.builder.promise(request, num_tokens)

    def _need(self, request: Request) -> int:
        """KV tokens that it takes in all, nothing of it being cached."""
        num_new = num_tokens_of(request) + 2 * self._view.caps.page_size
        return num_new + max(self._allocation(request) - request.num_output_tokens, 0)

    # The order

    def _rank(self, request: Request) -> _Rank:
        is_offline = request.request_class is RequestClass.OFFLINE
        if self._options.order is Order.SHORTEST:
            return is_offline, self._view.length(request).median
        if self._options.order is Order.LEVELS:
            return is_offline, self._level(request)
        return is_offline, 0

    def _place(self, request: Request) -> tuple[_Rank, int]:
        return self._rank(request), request.arrival_seq

    def _level(self, request: Request) -> int:
        """Skip-join MLFQ: a request joins the first level whose quantum its prompt fits, and goes
        down by one whenever it has used up a quantum."""
        last = _NUM_LEVELS - 1
        first = -(-request.num_prompt_tokens // TILE)
        used = first + request.num_output_tokens - 1 if request.num_output_tokens else 0
        level, quantum = 0, 1
        while level < last and quantum < first:
            level, quantum = level + 1, 2 * quantum
        while level < last and quantum <= used:
            used -= quantum
            level, quantum = level + 1, 2 * quantum
        return level

    def waiting(self) -> Iterator[Request]:
        """Those that may be admitted, by arrival, online ones first."""
        for request in self._view.online:
            if not must_wait(self.builder, request):
                yield request
        yield from self._offline()

    def _offline(self) -> Iterator[Request]:
        for request in self._view.offline_order():
            if must_wait(self.builder, request):
                continue
            if self._is_kept_back(request):
                return
            yield request

    def _windows(self) -> Iterator[list[Request]]:
        """Of each class those that are compared with each other."""
        online = list(islice(self._view.online, WINDOW))
        if self._options.order.preempts and len(online) == WINDOW:
            last = online[-1].arrival_seq
            newest = deque(self._view.online, maxlen=WINDOW)
            online += [r for r in newest if r.arrival_seq > last]
        yield [r for r in online if not must_wait(self.builder, r)]
        yield list(islice(self._offline(), WINDOW))

    # Admission

    def continue_prefill(self) -> bool:
        """Continue the unfinished prefill. False: nothing may be admitted in this iteration."""
        builder = self.builder
        if not self._options.prefill_first and must_decode(builder):
            return False
        # It is not dropped halfway for what it may generate later.
        return all(
            [
                builder.continue_prefill(
                    request, self._at_most(request, request.num_computed_tokens), unreserved=True
                )
                for request in builder.unfinished()
            ]
        )

    def admit_in_order(self, requests: Iterable[Request]) -> Request | None:
        """Until one does not fit, which is returned."""
        return next((request for request in requests if self._keeps_out(request)), None)

    def _keeps_out(self, request: Request) -> bool:
        """Admit it; True: it does not fit, and those behind it wait for it. One that does not fit
        an idle engine never will, and keeps no other out."""
        return not self._admit(request) and self.builder.runs_anything()

    def admit_ranked(self) -> None:
        """In the order, preempting those that come later in it where that makes one fit."""
        running = [(self._place(r), r) for r in self._view.running if r.traits.can_preempt]
        running.sort(key=itemgetter(0), reverse=True)
        for window in self._windows():
            waiting = [(self._place(request), request) for request in window]
            for place, request in sorted(waiting, key=itemgetter(0)):
                later = [victim for (rank, _), victim in running if rank > place[0]]
                if self._keeps_out(request) and not self._displace(request, later):
                    return

    def _displace(self, request: Request, victims: Sequence[Request]) -> bool:
        """Admit it in the place of the fewest of others. False: it does not fit even so."""
        before = self.builder
        self.builder = before.fork()
        for victim in victims:
            if self.builder.is_preempted(victim):
                continue
            self.builder.preempt(victim)
            if self._admit(request):
                return True
        reason = self.builder.skipped.get(request.rid)
        self.builder = before
        if reason is not None:
            before.skip(request, reason)
        return False

    def admit_closest(self) -> None:
        """MultiRes (§2.1): of those that find memory the one whose normalized demand on compute and
        KV is closest to the free part of both, and again. O(window squared)."""
        ledger = self.builder.ledger
        for window in self._windows():
            left = [_Demand(num_tokens_of(r), self._need(r), r) for r in window]
            while left and ledger.slots > 0:
                compute, memory = self._forward_left(), ledger.kv.headroom
                fitting = [demand for demand in left if demand.memory <= memory]
                if compute <= 0 or not fitting:
                    break
                closest = self._closest(fitting, compute, memory)
                if self._keeps_out(closest.request):
                    break
                left.remove(closest)
            if left:
                return

    def _closest(self, demands: Sequence[_Demand], compute: int, memory: int) -> _Demand:
        """Of those that are equally close the first."""
        total = self._view.kv.total
        return min(
            demands,
            key=lambda demand: hypot(
                (demand.compute - compute) / self._forward_size, (demand.memory - memory) / total
            ),
        )

    def _admit(self, request: Request) -> bool:
        """False: it does not fit, and the reason is noted."""
        builder, most = self.builder, self._options.most_requests
        if most is not None and self._num_under_way() >= most:
            builder.skip(request, SkipReason.BATCH_SIZE)
            return False
        if self._is_kept_back(request):
            return False
        match = self._view.match(request)
        self._promise(request)
        return builder.admit(request, match, self._at_most(request, match.cached))

    def _is_kept_back(self, request: Request) -> bool:
        """An offline request that is not admitted whatever the headroom."""
        if request.request_class is RequestClass.ONLINE:
            return False
        builder = self.builder
        most = offline_admissions_left(builder)
        if most is not None and self._num_offline_admitted() >= most:
            builder.skip(request, SkipReason.OPERATOR_LIMIT)
            return True
        if owes_recomputing(builder):
            builder.skip(request, SkipReason.RECOMPUTE_DEBT)
            return True
        return False

    def _at_most(self, request: Request, num_cached: int) -> int:
        """Prompt tokens of a request that the target forward size has left."""
        left = self._forward_left()
        if left <= 0 or self._forward_size == sys.maxsize:
            return left
        remaining = num_tokens_of(request) - num_cached
        if not request.traits.can_cut:
            return remaining
        # Where chunks come in large units only, one too long is better than none.
        return max(left, min(remaining, self._view.caps.chunk_unit))

    def _forward_left(self) -> int:
        num_decodes = self._num_left() - sum(1 for _ in self.builder.unfinished())
        return self._forward_size - num_decodes - self.builder.ledger.totals.num_new

    def _num_left(self) -> int:
        """Requests under way before this plan that it does not stop."""
        view = self._view
        return len(view.running) + len(view.unfinished) - self.builder.num_preempted

    def _num_under_way(self) -> int:
        unfinished = sum(1 for r in self._view.unfinished if r.rid in self.builder.prefill)
        return self._num_left() + len(self.builder.prefill) - unfinished

    def _num_offline_admitted(self) -> int:
        waiting = map(self._view.waiting, self.builder.prefill)
        return sum(
            1
            for request in waiting
            if request is not None and request.request_class is RequestClass.OFFLINE
        )

    # Groups

    def without_ended(self, groups: Groups) -> Groups:
        """The groups with a request that has not ended; open where one has ended, or none runs."""
        view = self._view
        here = {request.rid for request in (*view.running, *view.unfinished)}
        left = [
            tuple(rid for rid in rids if rid in here or view.waiting(rid) is not None)
            for rids in groups.chosen
        ]
        chosen = tuple(rids for rids in left if rids)
        is_open = groups.is_open or len(chosen) < len(groups.chosen) or not here
        return Groups(chosen=chosen, is_open=is_open)

    def admit_groups(self, groups: Groups) -> Groups:
        """Chosen requests that wait; then, where groups may be chosen, more of them."""
        known = {rid for rids in groups.chosen for rid in rids}
        found = [r for rid in known if (r := self._view.waiting(rid)) is not None]
        found.sort(key=self._place)
        refused = self.admit_in_order(
            r for r in found if not must_wait(self.builder, r) and not self._is_kept_back(r)
        )
        is_cut = self.builder.ledger.unfinished < self._view.caps.max_unfinished_prefills
        if not groups.is_open or is_cut:
            return groups  # of one that is cut the rest and its output are not counted yet
        if refused is not None and refused.request_class is RequestClass.ONLINE:
            return groups
        chosen, is_open = self._choose(known, only_online=refused is not None)
        self.admit_in_order(request for group in chosen for request in group)
        rids = tuple(tuple(request.rid for request in group) for group in chosen)
        return Groups(chosen=groups.chosen + rids, is_open=is_open)

    def _choose(self, known: set[str], *, only_online: bool) -> tuple[list[list[Request]], bool]:
        """Groups for which there is memory, those whose first request came first before others, and
        whether all have found some. A group is split where memory ends."""
        ledger = self.builder.ledger
        headroom, slots = ledger.kv.headroom, ledger.slots
        is_idle = not self.builder.runs_anything()
        chosen: list[list[Request]] = []
        for window in islice(self._windows(), 1 if only_online else None):
            by_length: dict[int, list[Request]] = {}
            for request in window:
                if request.rid not in known:
                    by_length.setdefault(self._num_blocks(request), []).append(request)
            for group in by_length.values():
                fitting: list[Request] = []
                for request in group:
                    headroom -= self._need(request)
                    slots -= request.traits.num_rows
                    if (headroom < 0 or slots < 0) and (chosen or fitting or not is_idle):
                        break
                    fitting.append(request)
                if fitting:
                    chosen.append(fitting)
                if len(fitting) < len(group):
                    return chosen, False
        return chosen, True
