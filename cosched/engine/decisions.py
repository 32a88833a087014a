"""The decision log: one line of JSON per plan, with what came of it (docs/operate.md).

Imports nothing of SGLang: a log can be read where SGLang is not installed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from cosched.core.kv_state import KvState
from cosched.core.plan import Plan
from cosched.core.request import Request, RequestClass
from cosched.core.view import View
from cosched.engine.iteration import Iteration
from cosched.engine.parts import PartWriter, switched_off
from cosched.errors import ConfigError

logger = logging.getLogger(__name__)

FORMAT = 5
"""Raised when a reader of the last format could not read the new one."""


class Header(msgspec.Struct, kw_only=True, tag_field="kind", tag="header"):
    """First line of each part. part: its number in this log, from 0."""

    policy: str
    versions: dict[str, str]
    format: int = FORMAT
    part: int = 0


class RequestFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What does not change of a request; fields as in `cosched.core.request.Request`."""

    rid: str
    request_class: RequestClass = msgspec.field(name="class")
    arrival_s: float
    num_prompt_tokens: int
    max_new_tokens: int


PlanT = TypeVar("PlanT", Plan, msgspec.Raw)
"""A plan, or the bytes of one: the log writes those that other ranks get."""


class Decision(
    msgspec.Struct,
    Generic[PlanT],
    kw_only=True,
    omit_defaults=True,
    tag_field="kind",
    tag="decision",
):
    """One plan. Requests are named by rid; times are seconds on the engine's clock. Empty fields
    are left out.

    iteration         number of the plan, from 0
    outcome           ran; no_batch: the plan was applied and there was nothing to run; replanned:
                      it was dropped, because results still on their way had to be known before it
                      could preempt a running request. The next line is the plan that replaced it;
                      failed: the engine failed on it, and the iteration was taken back
    requests          facts of the requests that this part of the log names for the first time

    What the plan was made from:

    now_s             when it was made
    kv, free_slots, num_offline  as in `cosched.core.view.View`
    running           requests past their prefill
    unfinished        requests in the middle of their prefill
    aborted           requests that have left a queue without a result since the last plan

    The plan:

    plan              with the fields of `cosched.core.plan.Plan`

    What came of it:

    refused           requests in `plan.prefill` that the engine did not take
    cached            rid -> tokens of a request in `plan.prefill` whose KV was there already
    num_decodes       requests that decoded a token
    predicted_s       of the batch that ran; None: the policy predicts nothing
    start_s           when it began, as measured
    measured_s        how long it took
    planning_s        host time of view and policy
    finished          rid -> (SGLang's reason, output tokens)
    """

    iteration: int
    outcome: Literal["ran", "no_batch", "replanned", "failed"] = "no_batch"
    requests: list[RequestFacts] = []
    now_s: float
    kv: KvState
    free_slots: int
    num_offline: int
    running: list[str] = []
    unfinished: list[str] = []
    aborted: list[str] = []
    plan: PlanT
    refused: list[str] = []
    cached: dict[str, int] = {}
    num_decodes: int = 0
    predicted_s: float | None = None
    start_s: float | None = None
    measured_s: float | None = None
    planning_s: float
    finished: dict[str, tuple[str, int]] = {}


_Written = Decision[msgspec.Raw]


class _Open(NamedTuple):
    """A decision that is not written yet. named: the requests that it names, by rid."""

    decision: _Written
    named: Mapping[str, Request]


class DecisionLog:
    """Follows one scheduler's plans, and writes each when its iteration is done, in their order.

    Calls come in this order: `planned` (again, if the plan is replaced), `launched` when the batch
    is ready, and some time later `finished`.
    """

    def __init__(
        self, path: Path, *, policy: str, versions: dict[str, str], max_bytes: int
    ) -> None:
        """max_bytes: of all parts. ConfigError when the file cannot be written."""
        self.is_off = False
        """A line could not be written: nothing more is."""
        self._header = Header(policy=policy, versions=versions)
        self._encode = msgspec.json.Encoder().encode
        self._path = path
        self._parts = PartWriter(path, max_bytes=max_bytes)
        self._num_plans = 0
        self._latest: _Written | None = None
        """Planned, and not launched."""
        self._open: deque[_Open] = deque()
        self._in_flight: dict[Iteration, _Written] = {}
        self._aborted: list[str] = []
        self._finished: set[int] = set()
        """In the last iteration that is done."""
        self._described: set[str] = set()
        """Requests that are not over and whose facts are in this part."""
        try:
            number = self._parts.start()
        except OSError as error:
            raise ConfigError(f"cannot write the log {str(path)!r}: {error.strerror}") from None
        try:
            self._begin_part(number)
        except OSError as error:
            self._switch_off(error)

    def planned(self, iteration: Iteration, view: View) -> None:
        """A plan was made from this view; nothing of it has been applied."""
        if self.is_off:
            return
        if self._latest is not None:
            self._latest.outcome = "replanned"
            self._latest = None
        self._latest = decision = Decision(
            iteration=self._num_plans,
            now_s=view.now_s,
            kv=view.kv,
            free_slots=view.free_slots,
            num_offline=view.num_offline,
            running=[request.rid for request in view.running],
            unfinished=[request.rid for request in view.unfinished],
            aborted=self._aborted,
            plan=iteration.plan_json,
            planning_s=iteration.planning_s or 0.0,
        )
        self._num_plans += 1
        self._aborted = []
        named: dict[str, Request] = {r.rid: r for r in (*view.running, *view.unfinished)}
        plan = iteration.plan
        for rid in (*plan.prefill, *plan.late, *plan.skipped):
            if rid not in named and (request := view.waiting(rid)) is not None:
                named[rid] = request
        self._open.append(_Open(decision, named))

    def launched(self, iteration: Iteration, batch: Any | None) -> None:
        """The iteration's batch is ready to run; None: there is nothing to run."""
        decision, self._latest = self._latest, None
        if decision is None:
            return
        reqs = {} if batch is None else {req.rid: req for req in batch.reqs}
        for rid in iteration.plan.prefill:
            if rid not in reqs:
                decision.refused.append(rid)
            elif (request := _request_of(reqs[rid])) is not None:
                decision.cached[rid] = request.num_prefix_tokens
        if batch is not None:
            decision.outcome = "ran"
            self._in_flight[iteration] = decision
        self._write_done()

    def finished(self, iteration: Iteration, batch: Any) -> None:
        """The tokens of an iteration are known."""
        decision = self._in_flight.pop(iteration, None)
        if decision is None:
            return
        decision.num_decodes = len(iteration.shape.decodes)
        decision.predicted_s = iteration.predicted_s
        decision.start_s, decision.measured_s = iteration.start_s, iteration.duration_s
        # A request whose end was not known yet is part of the next iteration too.
        before, self._finished = self._finished, set()
        for req in batch.reqs:
            if req.finished() and (request := _request_of(req)) is not None:
                self._finished.add(request.arrival_seq)
                if request.arrival_seq not in before:
                    reason = str(req.finished_reason.to_json()["type"])
                    decision.finished[req.rid] = (reason, request.num_output_tokens)
        self._write_done()

    def abandoned(self) -> None:
        """The iterations under way were taken back: their results will not come."""
        for decision in (self._latest, *self._in_flight.values()):
            if decision is not None:
                decision.outcome = "failed"
        self._latest = None
        self._in_flight.clear()
        self._write_done()

    def aborted(self, rid: str) -> None:
        """A waiting request has left its queue without a result."""
        if not self.is_off:
            self._aborted.append(rid)

    def _write_done(self) -> None:
        under_way = (self._latest, *self._in_flight.values())
        try:
            while self._open and all(self._open[0].decision is not one for one in under_way):
                self._write(self._open.popleft())
        except OSError as error:
            self._switch_off(error)

    def _write(self, done: _Open) -> None:
        if self._parts.is_full:
            self._begin_part(self._parts.start())
        for rid, request in done.named.items():
            if rid not in self._described:
                self._described.add(rid)
                done.decision.requests.append(_facts(request))
        self._parts.write(self._encode(done.decision))
        # Another request may have the same id later.
        self._described.difference_update(done.decision.finished, done.decision.aborted)

    def _begin_part(self, number: int) -> None:
        self._header.part = number
        self._parts.write(self._encode(self._header))
        # A part can be read alone.
        self._described.clear()

    def _switch_off(self, error: OSError) -> None:
        """A log that cannot be written must not end the server."""
        self.is_off = True
        self._parts.close()
        self._latest = None
        for kept in (self._open, self._in_flight, self._aborted, self._finished, self._described):
            kept.clear()
        logger.warning("cosched: %s", switched_off("decision log", self._path, error))


def _facts(request: Request) -> RequestFacts:
    return RequestFacts(**{name: getattr(request, name) for name in RequestFacts.__struct_fields__})


def _request_of(req: Any) -> Request | None:
    request: Request | None = getattr(req, "cosched", None)
    return request
