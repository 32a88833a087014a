"""One plan of EcoServe under construction: which generations run, and what is promised to them.

A generation task (GT) is a request past its prefill. It is *active* when KV for its output is
promised to it, or when it is the guest of a host (`cosched.papers.ecoserve.hosting`); all others
wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import msgspec

from cosched.core.batch import BatchTotals
from cosched.core.plan import PreemptMode
from cosched.core.request import Request, RequestClass
from cosched.papers.ecoserve.config import EcoConfig
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.preemption import can_copy

_RANGES_S = (0.2, 0.5, 2.0)
"""Of the time to a deadline (§3.3)."""

_LENGTH_RANGE = 128
"""Tokens of a range of lengths, and of occupied KV (§3.3)."""

Order: TypeAlias = tuple[int, int, int, int, int]
"""Class, range of the deadline, of the KV held and of the length, each with the first as the least;
then arrival (§3.3)."""


class Generations(msgspec.Struct, frozen=True, kw_only=True):
    """The state between two plans.

    groups        rid of an active GT -> number of its group
    guests        of these, hosted ones: rid -> (rid of the host, its output tokens by which
                  the guest must have ended)
    regions       rid of a host -> (its output tokens when it began to lend, tokens promised then)
    is_due        a group has ended, and not all the KV has been given out since
    forward_size  target [tokens]
    num_plans     since it was computed
    """

    groups: Mapping[str, int] = {}
    guests: Mapping[str, tuple[str, int]] = {}
    regions: Mapping[str, tuple[int, int]] = {}
    is_due: bool = True
    forward_size: int = 0
    num_plans: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EcoOptions:
    """In what the ablations differ.

    synced    GTs of one length are a group, and new ones are chosen where one has ended
    ordered   both queues are ordered, and searched for what fits; False: by arrival
    pipeline  GTs run in KV that others were promised and do not need yet
    """

    synced: bool = True
    ordered: bool = True
    pipeline: bool = True


class Work:
    """running: rid -> request past its prefill that is not preempted. groups, guests, regions,
    is_due, forward_size: as in `Generations`. reserve: KV tokens that are kept back."""

    def __init__(
        self,
        builder: PlanBuilder,
        settings: PolicySettings,
        options: EcoOptions,
        state: Generations,
    ) -> None:
        self.builder = builder
        self.view = view = builder.view
        self.config = settings.own if isinstance(settings.own, EcoConfig) else EcoConfig()
        self.options = options
        self.tpot_s = settings.slo.tpot_s
        self.reserve = int(self.config.reserve * view.kv.total)
        self.page = view.caps.page_size
        self.block = view.caps.ceil_to_page(max(self.config.block, self.page))
        rids = [request.rid for request in view.running]
        self.progress = dict(zip(rids, zip(*view.progress(), strict=True), strict=True))
        """Rid of a running request -> output tokens, those for which KV was set aside before."""
        self.running = dict(zip(rids, view.running, strict=True))
        if builder.num_preempted:
            self.running = {k: r for k, r in self.running.items() if not builder.is_preempted(r)}
        self.groups = dict(state.groups)
        self.guests = dict(state.guests)
        self.regions = dict(state.regions)
        self.is_due = state.is_due
        self.forward_size = state.forward_size
        self.waits_for_groups = options.synced and self.config.replan_on == "group"
        self._next_group = max(state.groups.values(), default=0) + 1
        self._lengths: dict[str, int] = {}

    def length(self, request: Request) -> int:
        """Tokens of KV, in whole pages, for the output that it is still to generate."""
        length = self._lengths.get(request.rid)
        if length is None:
            view = self.view
            length = view.caps.ceil_to_page(max(view.length(request).upper, 1))
            self._lengths[request.rid] = length
        return length

    def waiting(self) -> list[Request]:
        """GTs that wait."""
        groups = self.groups
        if len(groups) == len(self.running):
            return []
        return [r for rid, r in self.running.items() if rid not in groups]

    def runs_anything(self) -> bool:
        return bool(self.groups or self.builder.prefill)

    def is_patient(self, request: Request) -> bool:
        """It may be a guest: its SLO is loose (§3.4)."""
        if request.request_class is RequestClass.OFFLINE:
            return True
        return request.slo.deadline_s is not None and self._time_range(request) == len(_RANGES_S)

    def order(self, request: Request, num_held: int, length: int) -> Order:
        """Its place in either queue."""
        is_offline = int(request.request_class is RequestClass.OFFLINE)
        if not self.options.ordered:
            return is_offline, 0, 0, 0, request.arrival_seq
        num_held, length = num_held // _LENGTH_RANGE, length // _LENGTH_RANGE
        return is_offline, self._time_range(request), -num_held, -length, request.arrival_seq

    def _time_range(self, request: Request) -> int:
        """Of the time to its deadline: its own, or what the configuration allows a request of its
        length (§4: SLO scale * (prompt + output tokens at their mean times))."""
        view = self.view
        own_s = request.slo.deadline_s
        if own_s is None:
            scale, token_s = self.config.slo_scale, view.mean_iteration_s
            prompt_s = request.num_prompt_tokens * self._prompt_token_s
            # Looking a length up costs more than this bound, which decides for most.
            most_s = scale * (prompt_s + request.max_new_tokens * token_s)
            if request.arrival_s + most_s - view.now_s <= _RANGES_S[0]:
                return 0
            num_output = request.num_output_tokens + view.length(request).median
            own_s = scale * (prompt_s + num_output * token_s)
        return bisect_left(_RANGES_S, request.arrival_s + own_s - view.now_s)

    @cached_property
    def _prompt_token_s(self) -> float:
        """Mean time of a token of a prompt [s]."""
        totals = BatchTotals()
        totals.add_prefill(self.forward_size, 0)
        return self.view.predictor.predict_s(totals) / self.forward_size

    # Groups, promises, guests

    def start(self, chosen: Iterable[Sequence[Request]]) -> None:
        """Each of these is a group that runs."""
        for members in chosen:
            self.groups.update(dict.fromkeys((r.rid for r in members), self._next_group))
            self._next_group += 1

    def leave(self, rid: str) -> None:
        """It is active no more."""
        group = self.groups.pop(rid)
        self.guests.pop(rid, None)
        self.regions.pop(rid, None)
        if not self.waits_for_groups or group not in self.groups.values():
            self.is_due = True

    def set_aside(self, request: Request, num_tokens: int) -> None:
        """KV for `num_tokens` more of its output, but not beyond its limit."""
        num_now = request.num_output_tokens
        most = max(request.max_new_tokens, num_now)
        self.builder.promise(request, min(num_now + num_tokens, most))

    def promise_more(self, request: Request) -> bool:
        """Set KV aside for what it is now expected to need, or for a block. False: neither fits,
        and nothing is set aside ahead of it."""
        return any(self._promise(request, n) for n in (self.length(request), self.block))

    def _promise(self, request: Request, num_tokens: int) -> bool:
        self.set_aside(request, num_tokens)
        least = self.reserve if num_tokens and self.config.overrun != "reserve" else 0
        if self.builder.ledger.kv.headroom >= least:
            return True
        self.set_aside(request, 0)
        return False

    def settle_guest(self, guest: Request) -> None:
        """Its host needs the KV, or has ended: it is promised some of its own, or waits; it is
        preempted where even what it holds is missing."""
        del self.guests[guest.rid]
        if self.promise_more(guest):
            return
        self.leave(guest.rid)
        if not self._promise(guest, 0):
            self.preempt(guest, self.offload_mode)

    def preempt(self, request: Request, mode: PreemptMode | None = None) -> None:
        """mode: None, the builder's."""
        if request.rid in self.groups:
            self.leave(request.rid)
        self.builder.preempt(request, mode)
        del self.running[request.rid]
        for rid, (host, _) in list(self.guests.items()):
            if host == request.rid:
                self.settle_guest(self.running[rid])

    @property
    def offload_mode(self) -> PreemptMode:
        has_host = can_copy(self.view)
        return PreemptMode.CHECKPOINT if has_host else PreemptMode.KEEP_KV


def is_impatient(request: Request) -> bool:
    """An online request whose targets are tokens in time, not its end."""
    return request.request_class is RequestClass.ONLINE and request.slo.deadline_s is None
