"""The view and the plan of a recorded decision, as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cosched.core.caps import EngineCaps
from cosched.core.estimates import LengthEstimate, Predictor
from cosched.core.plan import Plan, Preemption, SkipReason
from cosched.core.request import PLAIN, Request, RequestClass, Slo, Traits
from cosched.core.view import (
    BatchRules,
    Decodes,
    Ended,
    KvState,
    Match,
    OfflineLimits,
    OfflineOrder,
)
from cosched.decision_log.read import Entry
from cosched.engine.decision_records import RequestRow, ViewState
from cosched.offline.pool import ArrivalOrder

__all__ = ["NotRecordedError", "RecordedView", "recorded_plan"]


T = TypeVar("T")


class NotRecordedError(Exception):
    """A policy asks for what the recorded one did not look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedRequest:
    """Implements `cosched.core.request.Request`."""

    rid: str
    request_class: RequestClass
    slo: Slo
    traits: Traits
    arrival_s: float
    arrival_seq: int
    first_token_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    num_computed_tokens: int
    num_own_tokens: int
    num_preemptions: int
    last_token_s: float | None
    known_prefix_tokens: int | None

    @property
    def num_prefix_tokens(self) -> int:
        if self.known_prefix_tokens is None:
            raise NotRecordedError(f"the tokens that were cached for {self.rid}")
        return self.known_prefix_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """The requests of a queue that were looked at.

    is_all  there were no others
    on_end  called where there were others, and a policy asks for them
    """

    requests: Sequence[Request]
    is_all: bool
    name: str
    on_end: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Request]:
        yield from self.requests
        if self.is_all:
            return
        if self.on_end is not None:
            self.on_end()
        else:
            raise NotRecordedError(
                f"{self.name} requests behind the first {len(self.requests)} that wait"
            )


class _RecordedOrder(Iterator[Request]):
    """Implements `cosched.core.view.OfflineOrder` for who takes and skips what was."""

    knows_prefixes = True

    def __init__(self, looked_at: _Looked, state: ViewState) -> None:
        self._requests = iter(looked_at)
        self._by_seq = {request.arrival_seq: request for request in looked_at.requests}
        self._skips = deque(state.skips)
        self._candidates = deque(state.candidates)
        self._takes = deque(state.takes)
        self._num_answers = 0
        self._given: set[int] = set()
        self._num_given = 0

    def __next__(self) -> Request:
        if self._skips and self._skips[0][0] == self._num_given:
            raise NotRecordedError("the order of offline requests when fewer are skipped")
        request = next(self._requests)
        self._num_given += 1
        return request

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        skip = (self._num_given, request.arrival_seq, num_tokens)
        if not self._skips or self._skips.popleft() != skip:
            raise NotRecordedError("the order of offline requests when others are skipped")

    def candidates(self, per_bucket: int) -> list[list[Request]]:
        if (self._takes and self._takes[0][0] == self._num_answers) or not self._candidates:
            raise NotRecordedError("the candidates when fewer are taken")
        recorded_per_bucket, buckets = self._candidates.popleft()
        if recorded_per_bucket != per_bucket:
            raise NotRecordedError(f"{per_bucket} candidates per bucket")
        self._num_answers += 1
        self._given.update(seq for bucket in buckets for seq in bucket)
        self._num_given = len(self._given)
        return [[self._by_seq[seq] for seq in bucket] for bucket in buckets]

    def take(self, request: Request) -> None:
        if not self._takes or self._takes.popleft() != (self._num_answers, request.arrival_seq):
            raise NotRecordedError("the candidates when others are taken")


class RecordedView:
    """Implements `cosched.core.view.View`. NotRecordedError names what the log does not hold.

    is_cut  another policy looked further into a queue than the recorded one did, and was told that
            it ends there
    """

    def __init__(
        self,
        entry: Entry,
        *,
        predictor: Predictor,
        by_another: bool = False,
        by_arrival: bool = False,
    ) -> None:
        """predictor   answers as the recorded one would have
        by_another  for another policy than the recorded one: a queue ends where that one
                       stopped to look
        by_arrival  and it takes offline requests in the order of arrival"""
        state = entry.decision.view
        self.is_cut = False
        self._entry = entry
        self._state = state
        self.caps: EngineCaps = entry.header.caps
        self.now_s = state.now_s
        self.start_s = state.start_s
        self.mean_iteration_s = state.mean_iteration_s
        self.ended: Sequence[Ended] = state.ended
        self.predictor = predictor
        self.kv: KvState = state.kv
        self.rules = state.rules or BatchRules(
            mixed=self.caps.mixed_batches, partial=self.caps.partial_decode
        )
        self.free_slots = state.free_slots
        self.recompute_debt_s = state.recompute_debt_s
        self.running: Sequence[Request] = self._requests(state.running)
        self.unfinished: Sequence[Request] = self._requests(state.unfinished)
        self._online = self._requests(state.online)
        self._offline = self._requests(state.offline)
        self._asked = self._requests(state.asked)
        self.online: Iterable[Request] = _Looked(
            requests=self._online,
            is_all=state.online_is_all,
            name="online",
            on_end=self._cut if by_another else None,
        )
        waiting = self._offline
        if by_arrival:
            waiting.sort(key=lambda request: request.arrival_seq)
        looked_at = _Looked(
            requests=waiting,
            is_all=state.offline_is_all,
            name="offline",
            on_end=self._cut if by_another else None,
        )
        self._looked_at = looked_at
        self._knows_prefixes = state.offline_is_sharing and not by_arrival
        self.num_offline = state.num_offline
        self.offline_limits = state.offline_limits or OfflineLimits()

    def _cut(self) -> None:
        self.is_cut = True

    def running_of(self, request_class: RequestClass) -> Decodes:
        return Decodes.of([r for r in self.running if r.request_class is request_class])

    def offline_order(self) -> OfflineOrder:
        if self._knows_prefixes:
            return _RecordedOrder(self._looked_at, self._state)
        return ArrivalOrder(iter(self._looked_at))

    def waiting(self, rid: str) -> Request | None:
        """One that was not looked at counts as gone."""
        waiting = (*self._online, *self._offline, *self._asked)
        return next((r for r in waiting if r.rid == rid), None)

    def can_hold(self, request: Request) -> bool:
        return self.rules.partial and request.arrival_seq not in self._state.unholdable

    def length(self, request: Request) -> LengthEstimate:
        return LengthEstimate(*_answer(self._state.lengths, request, "its length"))

    def promised(self, request: Request) -> int | None:
        return self._state.promises.get(request.arrival_seq)

    def why_barred(self, request: Request) -> SkipReason | None:
        if request.arrival_seq in self._state.restoring:
            return SkipReason.RESTORING
        return SkipReason.ENGINE_REFUSED if request.arrival_seq in self._state.barred else None

    def match(self, request: Request) -> Match:
        cached, evictable, *host = _answer(self._state.matches, request, "what is cached")
        return Match(cached=cached, evictable=evictable, host=host[0] if host else 0)

    def eviction_loss_s(self, num_tokens: int) -> float:
        losses = self._state.losses
        if losses is None or num_tokens <= 0:
            return 0.0
        if num_tokens not in losses:
            raise NotRecordedError(f"what is lost when {num_tokens} tokens are evicted")
        return losses[num_tokens]

    def reserve_of(self, request: Request) -> int:
        return _answer(self._state.reserves, request, "the reserve")

    def preemption_gain(self, request: Request) -> int:
        return _answer(self._state.gains, request, "what a stop would free")

    def _requests(self, rows: Sequence[RequestRow]) -> list[Request]:
        entry = self._entry
        return [_request(row, entry) for row in rows]


def recorded_plan(entry: Entry) -> Plan:
    plan = entry.decision.plan
    facts = entry.facts
    return Plan(
        prefill={facts[seq].rid: num_tokens for seq, num_tokens in plan.prefill},
        hold=frozenset(facts[seq].rid for seq in plan.held),
        preempt=tuple(Preemption(rid=facts[seq].rid, mode=mode) for seq, mode in plan.preempted),
        skipped={facts[seq].rid: reason for reason, seqs in plan.skipped.items() for seq in seqs},
        decodes=plan.decodes,
        limits=plan.limits,
    )


def _request(row: RequestRow, entry: Entry) -> Request:
    seq, num_output_tokens, num_computed_tokens, *own = row
    facts, state = entry.facts[seq], entry.decision.view
    last_token_s = state.last_tokens.get(seq, state.last_token_s)
    return _RecordedRequest(
        rid=facts.rid,
        request_class=facts.request_class,
        slo=facts.slo or Slo(),
        traits=facts.traits or PLAIN,
        arrival_s=facts.arrival_s,
        arrival_seq=seq,
        first_token_s=entry.first_tokens.get(seq),
        last_token_s=last_token_s if num_output_tokens else None,
        num_preemptions=state.preemptions.get(seq, 0),
        num_prompt_tokens=facts.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        max_new_tokens=facts.max_new_tokens,
        known_prefix_tokens=state.prefixes.get(seq),
        num_computed_tokens=num_computed_tokens,
        num_own_tokens=own[0] if own else 0,
    )


def _answer(answers: dict[int, T], request: Request, what: str) -> T:
    try:
        return answers[request.arrival_seq]
    except KeyError:
        raise NotRecordedError(f"{what} of {request.rid}") from None
