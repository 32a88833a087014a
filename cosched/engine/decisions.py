"""The decision log: every plan with what it was made from and what came of it.

A recording view stands between the policy and the scheduler's view and notes what the policy looks
at, so the log holds what the decision could depend on and not the 100,000 requests that wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec

from cosched.core.plan import Plan
from cosched.core.request import LateReason, Request
from cosched.core.view import OfflineOrder, Outlook, Progress, View
from cosched.engine.decision_records import (
    QUESTIONS,
    Decision,
    Header,
    OrderStep,
    Outcome,
    PlanState,
    RequestFacts,
    RequestRow,
    Result,
    Shapes,
    ViewState,
    without_defaults,
)
from cosched.engine.observe import Iteration
from cosched.engine.parts import PartWriter, switched_off
from cosched.engine.tracked import TrackedRequest
from cosched.errors import ConfigError
from cosched.latency.calibration import COLD, Calibrator, CalibratorState

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
    """Implements `OfflineOrder` on another one, and notes questions and answers in their order."""

    def __init__(self, order: OfflineOrder) -> None:
        self._order = order
        self.knows_prefixes = order.knows_prefixes
        self.seen: dict[int, Request] = {}
        self.steps: list[OrderStep] = []

    def __next__(self) -> Request:
        request = next(self._order, None)
        if request is None:
            self.steps.append(None)
            raise StopIteration
        self.steps.append(request.arrival_seq)
        self.seen[request.arrival_seq] = request
        return request

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        self.steps.append(("skip_sharing", [request.arrival_seq, num_tokens], None))
        self._order.skip_sharing(request, num_tokens)

    def candidates(self, per_bucket: int) -> Sequence[Sequence[Request]]:
        buckets = self._order.candidates(per_bucket)
        self.seen |= {request.arrival_seq: request for bucket in buckets for request in bucket}
        seqs = [[request.arrival_seq for request in bucket] for bucket in buckets]
        self.steps.append(("candidates", [per_bucket], seqs))
        return buckets

    def num_shared(self, request: Request) -> int:
        num_tokens = self._order.num_shared(request)
        self.steps.append(("num_shared", [request.arrival_seq], num_tokens))
        return num_tokens

    def take(self, request: Request) -> None:
        self.steps.append(("take", [request.arrival_seq], None))
        self._order.take(request)


class RecordingView:
    """Hands what a policy asks on to a `View`, and notes the answers.

    All members of a `View` are here: what is not defined below is asked of the view once, since
    looking changes nothing, and answers to `QUESTIONS` are noted by what was asked about.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.online = _Noted(view.online)
        self._answers: dict[str, dict[int, Any]] = {}
        self._asked: dict[int, Request] = {}
        self._order: _NotedOrder | None = None

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._view, name)
        if name in QUESTIONS:
            usual = self.rules.partial if name == "can_hold" else QUESTIONS[name]
            member = _noting(member, self._answers.setdefault(name, {}), usual)
        setattr(self, name, member)
        return member

    def offline_order(self) -> OfflineOrder:
        """The log holds one pass."""
        order = self._view.offline_order()
        if self._order is None:
            order = self._order = _NotedOrder(order)
        return order

    def outlook(self) -> Outlook:
        """By what the log holds of each."""
        return Outlook.of(self)

    def progress(self) -> Progress:
        return Progress.of(self)

    def waiting(self, rid: str) -> Request | None:
        request = self._view.waiting(rid)
        if request is not None:
            self._asked[request.arrival_seq] = request
        return request

    def requests(self) -> dict[int, Request]:
        """All that the policy could name, by seq."""
        offline = {} if self._order is None else self._order.seen
        looked_at = (*self.running, *self.unfinished, *self.online.seen)
        return {request.arrival_seq: request for request in looked_at} | offline | self._asked

    def state(self) -> ViewState:
        """What was read. Valid while nothing of the plan has been applied."""
        state = without_defaults(ViewState, {name: getattr(self, name) for name in _VALUES})
        state.running, state.unfinished = _rows(self.running), _rows(self.unfinished)
        state.online, state.online_is_all = _rows(self.online.seen), self.online.is_all
        for name, answers in self._answers.items():
            setattr(state, name, answers)
        times = [(r.arrival_seq, r.last_token_s) for r in (*self.running, *self.unfinished)]
        state.last_token_s = max((at_s for _, at_s in times if at_s is not None), default=0.0)
        state.last_tokens = {
            seq: at_s for seq, at_s in times if at_s is not None and at_s != state.last_token_s
        }
        order = self._order
        if order is not None:
            state.offline, state.order = _rows(order.seen.values()), order.steps
            state.knows_prefixes = order.knows_prefixes
        seen = {row[0] for row in (*state.online, *state.offline)}
        state.asked = _rows(r for seq, r in self._asked.items() if seq not in seen)
        return state


_VALUES = (
    *("now_s", "start_s", "kv", "free_slots", "num_offline", "mean_iteration_s"),
    *("recompute_debt_s", "room", "rules", "offline_limits", "ended"),
)
"""Attributes of a view that are recorded whether they were read or not."""


def _noting(ask: Callable[[Any], Any], answers: dict[int, Any], usual: Any) -> Callable[[Any], Any]:
    def asked(about: Request | int) -> Any:
        answer = ask(about)
        if answer is not usual:
            answers[about if isinstance(about, int) else about.arrival_seq] = answer
        return answer

    return asked


_Changing: TypeAlias = tuple[float | None, int, int, LateReason | None]
"""first_token_s, num_preemptions, num_prefix_tokens, late"""


@dataclass(slots=True, eq=False)
class _Open:
    """A plan whose record is not written yet.

    rids      of its prefill, in its order
    requests  all that the policy could name, by seq, with what may have changed of their facts
    is_over   nothing more will be known of it
    """

    decision: Decision
    rids: Collection[str]
    requests: dict[int, tuple[Request, _Changing]]
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
        self._known: dict[int, _Changing] = {}
        """By seq, of the requests that this part describes."""
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
        return cast("View", self._view)

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
        named = view.requests()
        decision = Decision(
            number=self._num_plans,
            view=view.state(),
            carry=carry,
            plan=_plan_state(plan, named.values()),
            result=result,
        )
        self._num_plans += 1
        state = None if self._predictor is None else self._predictor.state()
        requests = {
            seq: (r, (r.first_token_s, r.num_preemptions, r.num_prefix_tokens, r.late))
            for seq, r in named.items()
        }
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
        for seq, (request, changing) in ended.requests.items():
            if known.get(seq) != changing:
                known[seq] = changing
                decision.requests.append(_facts(request, *changing))
        state = ended.state
        if state is not None and state != self._state:
            decision.calibrator = msgspec.structs.replace(state, shapes=COLD)
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


def _facts(
    request: Request,
    first_token_s: float | None,
    num_preemptions: int,
    num_prefix_tokens: int,
    late: LateReason | None,
) -> RequestFacts:
    facts = {name: getattr(request, name) for name in RequestFacts.__struct_fields__}
    facts |= {"first_token_s": first_token_s, "num_preemptions": num_preemptions}
    facts |= {"num_prefix_tokens": num_prefix_tokens, "late": late}
    return without_defaults(RequestFacts, facts)


def _plan_state(plan: Plan, named: Iterable[Request]) -> PlanState:
    state = PlanState(limits=dict(plan.limits), decodes=plan.decodes)
    names = (plan.prefill, plan.hold, plan.preempt, plan.promise, plan.hosts, plan.late)
    if plan.skipped or any(names):
        seqs = {request.rid: request.arrival_seq for request in named}
        state.prefill = [(seqs[rid], num_tokens) for rid, num_tokens in plan.prefill.items()]
        state.held = sorted(seqs[rid] for rid in plan.hold)
        state.promised = [(seqs[rid], num_tokens) for rid, num_tokens in plan.promise.items()]
        state.hosted = [(seqs[rid], seqs[h.host], h.offset) for rid, h in plan.hosts.items()]
        state.preempted = [(seqs[p.rid], p.mode) for p in plan.preempt]
        for rid, why in plan.late.items():
            state.late.setdefault(why, []).append(seqs[rid])
        for rid, reason in plan.skipped.items():
            state.skipped.setdefault(reason, []).append(seqs[rid])
    return state


def _shapes(state: CalibratorState) -> Shapes:
    decode, prefill = (None if shape is None else shape.describe() for shape in state.shapes)
    return decode, prefill
