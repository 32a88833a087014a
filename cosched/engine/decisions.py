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

from cosched.core.estimates import LengthEstimate
from cosched.core.plan import Plan, SkipReason
from cosched.core.request import PLAIN, Request, RequestClass, Slo
from cosched.core.view import (
    BatchRules,
    Decodes,
    Ended,
    KvState,
    Match,
    OfflineLimits,
    OfflineOrder,
    View,
)
from cosched.engine.decision_records import (
    CalibratorRecord,
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
from cosched.engine.iteration import Iteration
from cosched.engine.parts import PartWriter, switched_off
from cosched.engine.tracked import TrackedRequest
from cosched.errors import ConfigError
from cosched.latency.calibration import Calibrator, CalibratorState

__all__ = ["DecisionLog", "RecordingView"]

logger = logging.getLogger(__name__)


class _Noted:
    """Requests, given out lazily; remembers how far anyone looked."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self.seen: list[Request] = []
        self.is_all = False

    def __iter__(self) -> Iterator[Request]:
        for index, request in enumerate(self._requests):
            if index == len(self.seen):
                self.seen.append(request)
            yield request
        self.is_all = True


class _NotedOrder(Iterator[Request]):
    """Implements `OfflineOrder` on another one, and notes the calls."""

    def __init__(self, order: OfflineOrder) -> None:
        self._order = order
        self.knows_prefixes = order.knows_prefixes
        self.seen: list[Request] = []
        self.is_all = False
        self.skips: list[tuple[int, int, int]] = []
        self.candidates_given: list[tuple[int, list[list[int]]]] = []
        self.takes: list[tuple[int, int]] = []
        self._known: set[int] = set()

    def __next__(self) -> Request:
        try:
            request: Request = next(self._order)
        except StopIteration:
            self.is_all = True
            raise
        self.seen.append(request)
        return request

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        self.skips.append((len(self.seen), request.arrival_seq, num_tokens))
        self._order.skip_sharing(request, num_tokens)

    def candidates(self, per_bucket: int) -> Sequence[Sequence[Request]]:
        buckets = self._order.candidates(per_bucket)
        for request in chain.from_iterable(buckets):
            if request.arrival_seq not in self._known:
                self._known.add(request.arrival_seq)
                self.seen.append(request)
        seqs = [[request.arrival_seq for request in bucket] for bucket in buckets]
        self.candidates_given.append((per_bucket, seqs))
        return buckets

    def take(self, request: Request) -> None:
        self.takes.append((len(self.candidates_given), request.arrival_seq))
        self._order.take(request)


class RecordingView:
    """Implements `View` on another view and notes what is asked of it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.now_s = view.now_s
        self.start_s = view.start_s
        self.caps = view.caps
        self.predictor = view.predictor
        self.online = _Noted(view.online)
        self.matches: dict[int, list[int]] = {}
        self.barred: dict[SkipReason, list[int]] = {}
        self.losses: dict[int, float] = {}
        self.reserves: dict[int, int] = {}
        self.gains: dict[int, int] = {}
        self.lengths: dict[int, tuple[int, int]] = {}
        self.promises: dict[int, int] = {}
        self.unholdable: list[int] = []
        self._asked: dict[int, Request] = {}
        self._order: _NotedOrder | None = None

    @property
    def mean_iteration_s(self) -> float:
        return self._view.mean_iteration_s

    @property
    def ended(self) -> Sequence[Ended]:
        return self._view.ended

    @property
    def kv(self) -> KvState:
        return self._view.kv

    @property
    def rules(self) -> BatchRules:
        return self._view.rules

    def offline_order(self) -> OfflineOrder:
        """The log holds one pass."""
        if self._order is None:
            self._order = _NotedOrder(self._view.offline_order())
            return self._order
        return self._view.offline_order()

    def waiting(self, rid: str) -> Request | None:
        request = self._view.waiting(rid)
        if request is not None:
            self._asked[request.arrival_seq] = request
        return request

    def can_hold(self, request: Request) -> bool:
        can_hold = self._view.can_hold(request)
        if not can_hold and self.rules.partial:
            self.unholdable.append(request.arrival_seq)
        return can_hold

    def length(self, request: Request) -> LengthEstimate:
        estimate = self._view.length(request)
        self.lengths[request.arrival_seq] = (estimate.median, estimate.upper)
        return estimate

    def promised(self, request: Request) -> int | None:
        promised = self._view.promised(request)
        if promised is not None:
            self.promises[request.arrival_seq] = promised
        return promised

    def why_barred(self, request: Request) -> SkipReason | None:
        reason = self._view.why_barred(request)
        if reason is not None:
            self.barred.setdefault(reason, []).append(request.arrival_seq)
        return reason

    @property
    def num_offline(self) -> int:
        return self._view.num_offline

    @property
    def offline_limits(self) -> OfflineLimits:
        return self._view.offline_limits

    @property
    def recompute_debt_s(self) -> float:
        return self._view.recompute_debt_s

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

    def eviction_loss_s(self, num_tokens: int) -> float:
        loss_s = self.losses[num_tokens] = self._view.eviction_loss_s(num_tokens)
        return loss_s

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
        offline = () if self._order is None else self._order.seen
        looked_at = chain(self.running, self.unfinished, self.online.seen, offline)
        return chain(looked_at, self._asked.values())

    def state(self) -> ViewState:
        """What was read. Valid while nothing of the plan has been applied."""
        under_way = (*self.running, *self.unfinished)
        limits = self.offline_limits
        state = ViewState(
            now_s=self.now_s,
            start_s=self.start_s,
            mean_iteration_s=self.mean_iteration_s,
            kv=self.kv,
            free_slots=self.free_slots,
            recompute_debt_s=self.recompute_debt_s,
            num_offline=self.num_offline,
            rules=self.rules,
            offline_limits=None if limits == OfflineLimits() else limits,
            running=_rows(self.running),
            unfinished=_rows(self.unfinished),
            online=_rows(self.online.seen),
            online_is_all=self.online.is_all,
            last_token_s=max((r.last_token_s or 0.0 for r in under_way), default=0.0),
            ended=list(self.ended),
            matches=self.matches,
            barred=self.barred.get(SkipReason.ENGINE_REFUSED, []),
            restoring=self.barred.get(SkipReason.RESTORING, []),
            unholdable=self.unholdable,
            losses=self.losses,
            reserves=self.reserves,
            gains=self.gains,
            lengths=self.lengths,
            promises=self.promises,
        )
        for request in under_way:
            seq = request.arrival_seq
            if not request.num_output_tokens:
                state.prefixes[seq] = request.num_prefix_tokens
            last_token_s = request.last_token_s
            if last_token_s is not None and last_token_s != state.last_token_s:
                state.last_tokens[seq] = last_token_s
        order = self._order
        if order is not None:
            state.offline = _rows(order.seen)
            state.offline_is_all = order.is_all
            state.offline_is_sharing = order.knows_prefixes
            state.skips, state.takes = order.skips, order.takes
            state.candidates = order.candidates_given
        seen = {row[0] for row in (*state.online, *state.offline)}
        state.asked = _rows(r for seq, r in self._asked.items() if seq not in seen)
        for request in self.requests():
            if request.num_preemptions:
                state.preemptions[request.arrival_seq] = request.num_preemptions
        return state


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
    state: CalibratorState | None
    is_over: bool = False


class DecisionLog:
    """Follows one scheduler's plans and writes each when its iteration is done, in their order.

    Calls come in this order: `watch` and `planned` around the policy (again, when the plan has to
    be made anew), `launched` when the batch is ready; some time later `finished`.
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
        self._in_flight: dict[Iteration, _Open] = {}
        self._finished: set[int] = set()
        self._known: dict[int, float | None] = {}
        """seq -> when its first token came out, of the requests that this part describes."""
        self._state: CalibratorState | None = None
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

    def planned(self, iteration: Iteration, carry: Any) -> None:
        """The policy has answered; nothing has been applied yet. carry: what it was given."""
        view, self._view = self._view, None
        if self.is_off:
            return
        assert view is not None, "watch comes first"
        if self._planned is not None:
            self._planned.decision.result.outcome = Outcome.REPLANNED
            self._close(self._planned)
        # Until it is known to have run, nothing has.
        result = Result(outcome=Outcome.NO_BATCH, planning_s=iteration.planning_s or 0.0)
        plan = iteration.plan
        decision = Decision(
            number=self._num_plans,
            view=view.state(),
            carry=carry,
            plan=_plan_state(plan, view),
            result=result,
        )
        self._num_plans += 1
        state = None if self._predictor is None else self._predictor.state()
        requests = [(request, request.first_token_s) for request in view.requests()]
        self._planned = _Open(decision, plan.prefill.keys(), requests, state)
        self._open.append(self._planned)

    def launched(self, iteration: Iteration, batch: Any | None) -> None:
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
        result.outcome = Outcome.RAN
        self._in_flight[iteration] = planned

    def finished(self, iteration: Iteration, batch: Any) -> None:
        """The tokens of an iteration are known."""
        done = self._in_flight.pop(iteration, None)
        if done is None:
            return
        result = done.decision.result
        result.num_decodes = len(iteration.shape.decodes)
        result.predicted_s = iteration.predicted_s
        result.start_s, result.measured_s = iteration.start_s, iteration.duration_s
        # A request whose end was not known yet is part of the next iteration too.
        before, self._finished = self._finished, set()
        ended = result.finished
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
        self._planned = None
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
        state = ended.state
        if state is not None and state != self._state:
            decision.calibrator = CalibratorRecord.of(state)
            if self._state is None or state.shapes != self._state.shapes:
                decision.shapes = _shapes(state)
            self._state = state
        self._parts.write(self._encode(decision))

    def _begin_part(self, number: int) -> None:
        self._header.part = number
        self._parts.write(self._encode(self._header))
        # A part can be read alone.
        self._known.clear()
        self._state = None


def _rows(requests: Iterable[Request]) -> list[RequestRow]:
    return [_row(request) for request in requests]


def _row(request: Request) -> RequestRow:
    row = (request.arrival_seq, request.num_output_tokens, request.num_computed_tokens)
    own = request.num_own_tokens
    return (*row, own) if own else row


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
    state = PlanState(limits=dict(plan.limits), decodes=plan.decodes)
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


def _shapes(state: CalibratorState) -> Shapes:
    decode, prefill = (None if shape is None else shape.describe() for shape in state.shapes)
    return decode, prefill
