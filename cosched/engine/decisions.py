"""The decision log: every plan with what it was made from and what came of it.

A recording view stands between the policy and the scheduler's view and notes what the policy looks
at, so the log holds what the decision could depend on and not the 100,000 requests that wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from cosched.core.plan import Plan, SkipReason
from cosched.core.request import PLAIN, Request, RequestClass, Slo
from cosched.core.view import (
    Backlog,
    BatchRules,
    BucketedOrder,
    Decodes,
    KvState,
    Match,
    OfflineLimits,
    SharingOrder,
    View,
)
from cosched.engine.decision_records import (
    BeliefState,
    Decision,
    Header,
    Outcome,
    PlanState,
    RequestFacts,
    RequestRow,
    Result,
    Shapes,
    ViewState,
)
from cosched.engine.observe import StepResult
from cosched.engine.parts import PartWriter, switched_off
from cosched.engine.shape import shape_of
from cosched.engine.tracked import TrackedRequest
from cosched.errors import ConfigError
from cosched.latency.calibration import Belief, Calibrator
from cosched.latency.features import BatchTotals

__all__ = ["DecisionLog", "RecordingView"]

logger = logging.getLogger(__name__)


class _Noted:
    """Requests, given out lazily; remembers how far anyone looked. An order that can be told to
    skip some is looked at once."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self.seen: list[Request] = []
        self.is_all = False
        self.is_sharing = False
        self.skips: list[tuple[int, int, int]] = []
        self.candidates: list[tuple[int, list[list[int]]]] = []
        self.takes: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Request]:
        order = iter(self._requests)
        if isinstance(order, BucketedOrder):
            self.is_sharing = True
            return _NotedBuckets(self, order)
        if isinstance(order, SharingOrder):
            self.is_sharing = True
            return _NotedOrder(self, order)
        return self._note(order)

    def _note(self, order: Iterator[Request]) -> Iterator[Request]:
        for index, request in enumerate(order):
            if index == len(self.seen):
                self.seen.append(request)
            yield request
        self.is_all = True


class _NotedOrder(Iterator[Request]):
    """Implements `SharingOrder` on another one."""

    def __init__(self, noted: _Noted, order: Any) -> None:
        self._noted = noted
        self._order = order

    def __next__(self) -> Request:
        try:
            request: Request = next(self._order)
        except StopIteration:
            self._noted.is_all = True
            raise
        self._noted.seen.append(request)
        return request

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        self._noted.skips.append((len(self._noted.seen), request.arrival_seq, num_tokens))
        self._order.skip_sharing(request, num_tokens)


class _NotedBuckets(_NotedOrder):
    """Implements `BucketedOrder` on another one."""

    def __init__(self, noted: _Noted, order: Any) -> None:
        super().__init__(noted, order)
        self._known: set[int] = set()

    def candidates(self, per_bucket: int) -> Sequence[Sequence[Request]]:
        buckets: Sequence[Sequence[Request]] = self._order.candidates(per_bucket)
        for request in chain.from_iterable(buckets):
            if request.arrival_seq not in self._known:
                self._known.add(request.arrival_seq)
                self._noted.seen.append(request)
        seqs = [[request.arrival_seq for request in bucket] for bucket in buckets]
        self._noted.candidates.append((per_bucket, seqs))
        return buckets

    def take(self, request: Request) -> None:
        self._noted.takes.append((len(self._noted.candidates), request.arrival_seq))
        self._order.take(request)


class RecordingView:
    """Implements `View` on another view and notes what is asked of it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.now_s = view.now_s
        self.start_s = view.start_s
        self.caps = view.caps
        self.online = _Noted(view.online)
        self.offline = _Noted(view.offline)
        self.matches: dict[int, list[int]] = {}
        self.barred: list[int] = []
        self.reserves: dict[int, int] = {}
        self.gains: dict[int, int] = {}

    @property
    def kv(self) -> KvState:
        return self._view.kv

    @property
    def rules(self) -> BatchRules:
        return self._view.rules

    def is_waiting(self, rid: str) -> bool:
        return self._view.is_waiting(rid)

    def is_barred(self, request: Request) -> bool:
        is_barred = self._view.is_barred(request)
        if is_barred:
            self.barred.append(request.arrival_seq)
        return is_barred

    @property
    def num_offline(self) -> int:
        return self._view.num_offline

    @property
    def backlog(self) -> Backlog:
        return self._view.backlog

    @property
    def offline_limits(self) -> OfflineLimits:
        return self._view.offline_limits

    @property
    def free_slots(self) -> int:
        return self._view.free_slots

    @property
    def running(self) -> Sequence[Request]:
        return self._view.running

    def running_of(self, request_class: RequestClass) -> Decodes:
        return self._view.running_of(request_class)

    @property
    def unfinished(self) -> Sequence[Request]:
        return self._view.unfinished

    def match(self, request: Request) -> Match:
        match = self._view.match(request)
        host = [match.host] if match.host else []
        self.matches[request.arrival_seq] = [match.cached, match.evictable, *host]
        return match

    def reserve_of(self, request: Request) -> int:
        reserve = self._view.reserve_of(request)
        self.reserves[request.arrival_seq] = reserve
        return reserve

    def preemption_gain(self, request: Request) -> int:
        gain = self._view.preemption_gain(request)
        self.gains[request.arrival_seq] = gain
        return gain

    def requests(self) -> Iterator[Request]:
        """All that the policy could name."""
        return chain(self.running, self.unfinished, self.online.seen, self.offline.seen)

    def state(self) -> ViewState:
        """What was read. Valid while nothing of the plan has been applied."""
        running, unfinished = _rows(self.running), _rows(self.unfinished)
        limits = self.offline_limits
        return ViewState(
            now_s=self.now_s,
            start_s=self.start_s,
            kv=self.kv,
            free_slots=self.free_slots,
            num_offline=self.num_offline,
            backlog=self.backlog,
            rules=self.rules,
            offline_limits=None if limits == OfflineLimits() else limits,
            running=running,
            unfinished=unfinished,
            online=_rows(self.online.seen),
            online_is_all=self.online.is_all,
            offline=_rows(self.offline.seen),
            offline_is_all=self.offline.is_all,
            offline_is_sharing=self.offline.is_sharing,
            skips=self.offline.skips,
            candidates=self.offline.candidates,
            takes=self.offline.takes,
            prefixes={
                seq: request.num_prefix_tokens
                for request, (seq, num_output_tokens, _) in zip(
                    chain(self.running, self.unfinished), chain(running, unfinished), strict=True
                )
                if not num_output_tokens
            },
            matches=self.matches,
            barred=self.barred,
            reserves=self.reserves,
            gains=self.gains,
        )


@dataclass(slots=True, eq=False)
class _Open:
    """A plan whose record is not written yet.

    rids      of its prefill, in its order
    requests  all that the policy could name, with their first tokens' times as they stood
    is_over   nothing more will be known of it
    """

    decision: Decision
    rids: Collection[str]
    requests: list[tuple[Request, float | None]]
    belief: Belief | None
    is_over: bool = False


class DecisionLog:
    """Follows one scheduler's plans and writes each when its iteration is done, in their order.

    Calls come in this order: `watch` and `planned` around the policy (again, when the plan has to
    be made anew), `launched` when the batch is ready; some time later `measured` and `finished`.
    """

    def __init__(
        self, path: Path, *, header: Header, predictor: Calibrator | None, max_bytes: int
    ) -> None:
        """predictor: the one the policy asks, None when it asks none; max_bytes: of all parts.
        ConfigError when the file cannot be written."""
        self._predictor = predictor
        self._header = header
        self._encode = msgspec.json.Encoder().encode
        self._path = path
        self._parts = PartWriter(path, max_bytes=max_bytes)
        self.is_off = False
        """A line could not be written: nothing more is."""
        self._num_plans = 0
        self._view: RecordingView | None = None
        self._planned: _Open | None = None
        self._open: deque[_Open] = deque()
        self._in_flight: deque[_Open] = deque()
        self._ended: _Open | None = None
        self._finished: set[int] = set()
        self._known: dict[int, float | None] = {}
        """seq -> when its first token came out, of the requests that this part describes."""
        self._belief: Belief | None = None
        """The last one in this part."""
        try:
            number = self._parts.start()
        except OSError as error:
            raise ConfigError(f"cannot write the log {str(path)!r}: {error.strerror}") from None
        try:
            self._begin_part(number)
        except OSError as error:
            self._switch_off(error)

    def watch(self, view: View) -> View:
        """A view for the policy that notes what it reads."""
        if self.is_off:
            return view
        self._view = RecordingView(view)
        return self._view

    def planned(self, plan: Plan, planning_s: float) -> None:
        """The policy has answered; nothing has been applied yet."""
        view, self._view = self._view, None
        if self.is_off:
            return
        assert view is not None, "watch comes first"
        if self._planned is not None:
            self._planned.decision.result.outcome = Outcome.REPLANNED
            self._close(self._planned)
        # Until it is known to have run, nothing has.
        result = Result(outcome=Outcome.NO_BATCH, planning_s=planning_s)
        decision = Decision(
            number=self._num_plans, view=view.state(), plan=_plan_state(plan, view), result=result
        )
        self._num_plans += 1
        belief = None if self._predictor is None else self._predictor.belief()
        requests = [(request, request.first_token_s) for request in view.requests()]
        self._planned = _Open(decision, plan.prefill.keys(), requests, belief)
        self._open.append(self._planned)

    def launched(self, batch: Any | None) -> None:
        """The iteration's batch is ready to run; None when there is nothing to run."""
        planned, self._planned = self._planned, None
        if planned is None:
            return
        result = planned.decision.result
        if planned.rids:
            taken = set() if batch is None else {req.rid for req in batch.reqs}
            seqs = (seq for seq, _ in planned.decision.plan.prefill)
            result.refused = [
                seq for rid, seq in zip(planned.rids, seqs, strict=True) if rid not in taken
            ]
        if batch is None:
            self._close(planned)
            return
        if self.is_off:
            return
        shape = shape_of(batch)
        result.outcome = Outcome.RAN
        result.num_decodes = len(shape.decodes)
        if self._predictor is not None:
            result.predicted_s = self._predictor.predict_s(BatchTotals.of(shape))
        self._in_flight.append(planned)

    def measured(self, step: StepResult) -> None:
        """The oldest iteration under way is over."""
        if not self._in_flight:
            return
        self._ended = self._in_flight.popleft()
        result = self._ended.decision.result
        result.start_s, result.measured_s = step.start_s, step.duration_s

    def finished(self, batch: Any) -> None:
        """The tokens of that iteration are known."""
        done, self._ended = self._ended, None
        if done is None:
            return
        # A request whose end was not known yet is part of the next iteration too.
        before, self._finished = self._finished, set()
        ended = done.decision.result.finished
        for req in batch.reqs:
            if req.finished() and (tracked := TrackedRequest.of(req)) is not None:
                seq = tracked.arrival_seq
                self._finished.add(seq)
                if seq not in before:
                    reason = str(req.finished_reason.to_json()["type"])
                    ended.append((seq, reason, tracked.num_output_tokens))
        self._close(done)

    def _close(self, plan: _Open) -> None:
        plan.is_over = True
        try:
            while self._open and self._open[0].is_over:
                self._write(self._open.popleft())
        except OSError as error:
            self._switch_off(error)

    def _switch_off(self, error: OSError) -> None:
        """A log that cannot be written must not end the server."""
        self.is_off = True
        self._parts.close()
        self._planned = self._ended = None
        for kept in (self._open, self._in_flight, self._finished, self._known):
            kept.clear()
        logger.warning("cosched: %s", switched_off("decision log", self._path, error))

    def _write(self, ended: _Open) -> None:
        if self._parts.is_full:
            self._begin_part(self._parts.start())
        decision = ended.decision
        known = self._known
        for request, first_token_s in ended.requests:
            seq = request.arrival_seq
            if seq not in known:
                known[seq] = None
                decision.requests.append(_facts(request))
            if first_token_s is not None and first_token_s != known[seq]:
                known[seq] = first_token_s
                decision.first_tokens[seq] = first_token_s
        belief = ended.belief
        if belief is not None and belief != self._belief:
            decision.belief = _belief_state(belief)
            if self._belief is None or belief.shapes != self._belief.shapes:
                decision.shapes = _shapes(belief)
            self._belief = belief
        self._parts.write(self._encode(decision))

    def _begin_part(self, number: int) -> None:
        self._header.part = number
        self._parts.write(self._encode(self._header))
        # A part can be read alone.
        self._known.clear()
        self._belief = None


def _rows(requests: Iterable[Request]) -> list[RequestRow]:
    return [(r.arrival_seq, r.num_output_tokens, r.num_computed_tokens) for r in requests]


def _facts(request: Request) -> RequestFacts:
    return RequestFacts(
        seq=request.arrival_seq,
        rid=request.rid,
        request_class=request.request_class,
        arrival_s=request.arrival_s,
        num_prompt_tokens=request.num_prompt_tokens,
        max_new_tokens=request.max_new_tokens,
        slo=None if request.slo == Slo() else request.slo,
        traits=None if request.traits == PLAIN else request.traits,
    )


def _plan_state(plan: Plan, view: RecordingView) -> PlanState:
    state = PlanState(limits=dict(plan.limits))
    if plan.prefill or plan.hold or plan.preempt or plan.skipped:
        seqs = {request.rid: request.arrival_seq for request in view.requests()}
        state.prefill = [(seqs[rid], num_tokens) for rid, num_tokens in plan.prefill.items()]
        state.held = sorted(seqs[rid] for rid in plan.hold)
        state.preempted = [(seqs[p.rid], p.mode) for p in plan.preempt]
        skipped: dict[SkipReason, list[int]] = {}
        for rid, reason in plan.skipped.items():
            skipped.setdefault(reason, []).append(seqs[rid])
        state.skipped = skipped
    return state


def _belief_state(belief: Belief) -> BeliefState:
    return BeliefState(
        scales=belief.scales,
        cold_scale=belief.cold_scale,
        drift=belief.drift,
        margin=belief.margin,
        seen=belief.seen,
        error=belief.error,
    )


def _shapes(belief: Belief) -> Shapes:
    decode, prefill = (None if shape is None else shape.describe() for shape in belief.shapes)
    return decode, prefill
