"""The view and the plan of a recorded decision, as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from cosched.core.estimates import Predictor
from cosched.core.plan import Hosting, Plan, Preemption
from cosched.core.request import Request, RequestClass
from cosched.core.view import Decodes, OfflineOrder, Outlook, Progress
from cosched.decision_log.read import Entry
from cosched.engine.decision_records import QUESTIONS, RecordedRequest, RequestRow, ViewState
from cosched.offline.pool import ArrivalOrder

__all__ = ["NotRecordedError", "RecordedView", "recorded_plan"]


class NotRecordedError(Exception):
    """A policy asks for what the recorded one did not look at."""


class _RecordedOrder(Iterator[Request]):
    """Implements `cosched.core.view.OfflineOrder`: answers the questions that were asked, in the
    order in which they were."""

    def __init__(
        self, state: ViewState, requests: list[RecordedRequest], on_end: Callable[[], None]
    ) -> None:
        """on_end: called when more requests are asked for, and it is not known that there are
        none."""
        self.knows_prefixes = state.knows_prefixes
        self._steps = deque(state.order)
        self._requests = {request.arrival_seq: request for request in requests}
        self._is_all = None in state.order
        self._on_end = on_end

    def __next__(self) -> Request:
        if not self._steps:
            if not self._is_all:
                self._on_end()
            raise StopIteration
        step = self._steps.popleft()
        if isinstance(step, tuple):
            raise NotRecordedError(f"the next offline request before {_call(*step[:2])}")
        if step is None:
            raise StopIteration
        return self._requests[step]

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        self._ask("skip_sharing", request.arrival_seq, num_tokens)

    def candidates(self, per_bucket: int) -> list[list[Request]]:
        buckets: list[list[int]] = self._ask("candidates", per_bucket)
        return [[self._requests[seq] for seq in bucket] for bucket in buckets]

    def num_shared(self, request: Request) -> int:
        num_tokens: int = self._ask("num_shared", request.arrival_seq)
        return num_tokens

    def take(self, request: Request) -> None:
        self._ask("take", request.arrival_seq)

    def _ask(self, method: str, *arguments: int) -> Any:
        step = self._steps.popleft() if self._steps else None
        if not isinstance(step, tuple) or step[:2] != (method, list(arguments)):
            raise NotRecordedError(f"{_call(method, arguments)} of the order of offline requests")
        return step[2]


def _call(method: str, arguments: Iterable[int]) -> str:
    return f"{method}({', '.join(map(str, arguments))})"


class RecordedView:
    """All members of `cosched.core.view.View`, from what was recorded of one. NotRecordedError
    names what the log does not hold.

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
        state = self._state = entry.decision.view
        self.is_cut = False
        self._entry = entry
        self._by_another = by_another
        self._by_arrival = by_another and (by_arrival or not state.knows_prefixes)
        self.caps = entry.header.settings.caps
        self.predictor = predictor
        self.running = self._requests(state.running)
        self.unfinished = self._requests(state.unfinished)
        self._online = self._requests(state.online)
        self._offline = self._requests(state.offline)
        self._asked = self._requests(state.asked)

    def __getattr__(self, name: str) -> Any:
        """Of the members that the log has under their names."""
        return partial(self._told, name) if name in QUESTIONS else getattr(self._state, name)

    def _told(self, question: str, about: Request | int) -> Any:
        usual = self.rules.partial if question == "can_hold" else QUESTIONS[question]
        of = about if isinstance(about, int) else about.arrival_seq
        answer = getattr(self._state, question).get(of, usual)
        if answer is ...:
            named = about if isinstance(about, int) else about.rid
            raise NotRecordedError(f"`{question}` of {named}")
        return answer

    def eviction_loss_s(self, num_tokens: int) -> float:
        loss_s: float = self._told("eviction_loss_s", num_tokens) if num_tokens > 0 else 0.0
        return loss_s

    @property
    def online(self) -> Iterator[Request]:
        return self._looked_at("online", self._online, is_all=self._state.online_is_all)

    def offline_order(self) -> OfflineOrder:
        waiting, state = self._offline, self._state
        if self._by_arrival:
            waiting = sorted(waiting, key=lambda request: request.arrival_seq)
            return ArrivalOrder(self._looked_at("offline", waiting, is_all=None in state.order))
        return _RecordedOrder(state, waiting, lambda: self._end("offline", waiting))

    def running_of(self, request_class: RequestClass) -> Decodes:
        return Decodes.of([r for r in self.running if r.request_class is request_class])

    def outlook(self) -> Outlook:
        return Outlook.of(self)

    def progress(self) -> Progress:
        return Progress.of(self)

    def waiting(self, rid: str) -> Request | None:
        """One that was not looked at counts as gone."""
        waiting = (*self._online, *self._offline, *self._asked)
        return next((r for r in waiting if r.rid == rid), None)

    def _looked_at(
        self, name: str, requests: list[RecordedRequest], *, is_all: bool
    ) -> Iterator[Request]:
        yield from requests
        if not is_all:
            self._end(name, requests)

    def _end(self, name: str, requests: list[RecordedRequest]) -> None:
        if not self._by_another:
            raise NotRecordedError(f"{name} requests behind the first {len(requests)} that wait")
        self.is_cut = True

    def _requests(self, rows: list[RequestRow]) -> list[RecordedRequest]:
        return [_request(row, self._entry) for row in rows]


def recorded_plan(entry: Entry) -> Plan:
    plan = entry.decision.plan
    facts = entry.facts
    return Plan(
        prefill={facts[seq].rid: num_tokens for seq, num_tokens in plan.prefill},
        hold=frozenset(facts[seq].rid for seq in plan.held),
        preempt=tuple(Preemption(rid=facts[seq].rid, mode=mode) for seq, mode in plan.preempted),
        promise={facts[seq].rid: num_tokens for seq, num_tokens in plan.promised},
        hosts={
            facts[guest].rid: Hosting(host=facts[host].rid, offset=offset)
            for guest, host, offset in plan.hosted
        },
        late={facts[seq].rid: why for why, seqs in plan.late.items() for seq in seqs},
        skipped={facts[seq].rid: reason for reason, seqs in plan.skipped.items() for seq in seqs},
        decodes=plan.decodes,
        limits=plan.limits,
    )


def _request(row: RequestRow, entry: Entry) -> RecordedRequest:
    seq, num_output_tokens, num_computed_tokens, *own = row
    state = entry.decision.view
    last_token_s = state.last_tokens.get(seq, state.last_token_s)
    return RecordedRequest(
        **msgspec.structs.asdict(entry.facts[seq]),
        num_output_tokens=num_output_tokens,
        num_computed_tokens=num_computed_tokens,
        num_own_tokens=own[0] if own else 0,
        last_token_s=last_token_s if num_output_tokens else None,
    )
