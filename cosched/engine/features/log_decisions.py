"""Writes the decision log of a scheduler that plans (docs/operate.md)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cosched.core.request import Request
from cosched.core.view import View
from cosched.engine import port
from cosched.engine.feature import Feature
from cosched.engine.iteration import Iteration
from cosched.engine.log.decisions import Decision, Header, RequestFacts
from cosched.engine.log.parts import PartWriter, switched_off
from cosched.errors import ConfigError

logger = logging.getLogger(__name__)

_Written = Decision[msgspec.Raw]


class _Open(NamedTuple):
    """A decision that is not written yet. named: the requests that it names, by rid."""

    decision: _Written
    named: Mapping[str, Request]


class LogDecisions(Feature):
    """Follows one scheduler's plans, and writes each when its iteration is done, in their order.

    It ends where it fails: no line may be missing. With data parallelism the replica's number is
    appended to the file's name.
    """

    place = "decision_log"
    ends = True

    @classmethod
    def of(cls, controller: Any) -> LogDecisions | None:
        config = controller.config
        if config.decision_log is None or not port.parallel().plans:
            return None
        dp_rank = port.parallel().dp_rank
        path = config.decision_log if dp_rank is None else f"{config.decision_log}.{dp_rank}"
        return cls(
            Path(path),
            policy=config.policy,
            versions={name: version(name) for name in ("cosched", "sglang")},
            max_bytes=int(config.decision_log_mb * 1e6),
        )

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

    def on_plan(self, iteration: Iteration, view: View) -> None:
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

    def on_launched(self, iteration: Iteration, batch: Any | None) -> None:
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

    def on_result(self, iteration: Iteration, batch: Any) -> None:
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

    def on_abandoned(self) -> None:
        for decision in (self._latest, *self._in_flight.values()):
            if decision is not None:
                decision.outcome = "failed"
        self._latest = None
        self._in_flight.clear()
        self._write_done()

    def on_aborted(self, request: Any) -> None:
        if not self.is_off:
            self._aborted.append(request.rid)

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
