"""An exception that a request causes ends that request, not the server.

Stock SGLang ends the scheduler process on every exception, and with it all requests of all users.
Here a request that fails while it is received gets an error as its answer. If a batch fails while
it is built, run or processed, the iteration is rolled back: all running requests release their
memory and are queued again with their output, and the requests of the failed batch run in groups
that are halved until one request fails alone. That request is aborted with the reason. The others
recompute their KV; their tokens are the same as without the failure.

Memory is checked after each failure. If tokens or rows are missing, the server drains and ends with
`EXIT_CODE`. If memory may be handed out twice, or the device itself failed, the exception is raised
and ends the server as in stock.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any

from cosched.engine import port
from cosched.engine.guard import Guard
from cosched.engine.port import recovery
from cosched.engine.port.penalties import count_resumed
from cosched.engine.port.request import answer_with_error, refuse
from cosched.engine.tracked import TrackedRequest

_log = logging.getLogger("cosched")

DRAIN_SIGNAL = signal.SIGUSR1
"""To the server, from a scheduler whose memory is not consistent: it drains and ends."""

_SPARE_FAILURES = 16
"""Failures, beyond those that halving needs, after which the whole failed batch is aborted."""


class Isolation:
    """Finds the requests that make batches fail, by running them in groups.

    Pure: request ids in, request ids out.
    """

    def __init__(self) -> None:
        self._groups: deque[tuple[str, ...]] = deque()
        self._num_failures = 0
        self._most_failures = 0

    @property
    def is_active(self) -> bool:
        """Only `group` may be admitted."""
        return bool(self._groups)

    @property
    def group(self) -> tuple[str, ...]:
        """The requests that run now; empty when nothing is isolated."""
        return self._groups[0] if self._groups else ()

    def failed(
        self, batch: Sequence[str], others: Sequence[str] = (), likely: str | None = None
    ) -> Sequence[str]:
        """A batch failed. Returns the requests to abort; the rest runs in groups. A request is
        aborted when it was run alone because of an earlier failure, and failed again.

        batch   its requests
        others  requests that were queued again with it
        likely  the request that the exception names; it runs alone first
        """
        if not self._groups:
            num = len(batch)
            self._num_failures = 0
            self._most_failures = 2 * num + math.ceil(math.log2(max(num, 2))) + _SPARE_FAILURES
        self._num_failures += 1
        group = set(self.group)
        suspects = [rid for rid in batch if rid in group] or list(batch)
        cleared = [rid for rid in (*batch, *others) if rid not in suspects]
        pending = list(self._groups)[1:]
        is_alone = len(batch) == 1 and tuple(batch) == self.group
        if is_alone or self._num_failures > self._most_failures:
            culprits, split = list(batch), []
            cleared = [rid for rid in cleared if rid not in culprits]
        else:
            culprits, split = [], _split(suspects, likely)
        left = [rid for rid in self.group if rid not in suspects and rid not in culprits]
        known = {rid for group in pending for rid in group}
        cleared = [rid for rid in cleared if rid not in known]
        self._groups = deque(tuple(g) for g in (*split, left, *pending, cleared) if g)
        return culprits

    def passed(self) -> None:
        """The group has run without a failure, or its requests have left."""
        self._groups.popleft()


def _split(suspects: Sequence[str], likely: str | None) -> list[Sequence[str]]:
    if len(suspects) == 1:
        return [suspects]
    if likely in suspects:
        return [[rid for rid in suspects if rid == likely], [r for r in suspects if r != likely]]
    middle = len(suspects) // 2
    return [suspects[:middle], suspects[middle:]]


class RequestFaults:
    """Guards the steps of a scheduler's loop, under every policy. One per scheduler."""

    def __init__(self, scheduler: Any, guard: Guard) -> None:
        self._scheduler = scheduler
        self._guard = guard
        self._isolation = Isolation()
        self._num_outputs: dict[str, int] = {}
        """Of each request of the group: its output tokens when the group began."""
        self._is_building = False
        self._can_take_back = recovery.can_take_back(scheduler)
        self.is_draining = False

    # --- Around SGLang's steps ---

    def receive(self, handle: Callable[[], None], received: Any) -> None:
        """Around the building of a request from its message."""
        try:
            handle()
        except Exception as error:
            self._raise_unless_guarded(error)
            self._refuse(received, error)

    def next_batch(self, build: Callable[[], Any]) -> Any | None:
        """Around SGLang's choice and preparation of a batch. None: it failed, and nothing runs."""
        scheduler = self._scheduler
        queue, unfinished = scheduler.waiting_queue, recovery.unfinished_prefill(scheduler)
        self._is_building = True
        try:
            return build()
        except Exception as error:
            scheduler.waiting_queue = self._queue_of(queue)
            self._take_back(error, None, (unfinished, *queue))
            return None
        finally:
            self._is_building = False

    def run(self, launch: Callable[[], Any], batch: Any) -> Any | None:
        """Around the launch of a batch. None: it failed, or was rolled back."""
        return None if recovery.was_taken_back(batch) else self._guarded(launch, batch)

    def sample(self, launch: Callable[[], Any], batch: Any) -> Any | None:
        """Around sampling that SGLang launches after the forward pass."""
        return self._guarded(launch, batch)

    def process(self, process: Callable[[], Any], batch: Any, result: Any) -> Any | None:
        """Around the processing of a result; `result` is None for a batch that was rolled back."""
        if result is None:
            return None
        if self._is_building:  # results are drained for a plan: `next_batch` takes both back
            return process()
        return self._guarded(process, batch)

    def _guarded(self, step: Callable[[], Any], batch: Any) -> Any | None:
        try:
            return step()
        except Exception as error:
            self._take_back(error, batch, ())
            return None

    # --- Isolation ---

    @property
    def is_isolating(self) -> bool:
        """The next batch is built by `build_group` and not by the policy."""
        while self._isolation.is_active and self._has_passed():
            self._isolation.passed()
            self._note_outputs()
        return self._isolation.is_active

    def build_group(
        self,
        original: Callable[..., tuple[Any, Any]],
        *,
        prefill_delayer_single_pass: Any,
        running_batch: Any,
    ) -> tuple[Any, Any]:
        """SGLang's own admission, of the current group only."""
        scheduler = self._scheduler
        queue = scheduler.waiting_queue
        group = set(self._isolation.group)
        candidates = [req for req in queue if req.rid in group]
        scheduler.waiting_queue = candidates
        try:
            batch, running_batch = original(
                prefill_delayer_single_pass=prefill_delayer_single_pass,
                running_batch=running_batch,
            )
            left = {id(req) for req in scheduler.waiting_queue}
        finally:
            scheduler.waiting_queue = queue
        controller = getattr(scheduler, "cosched", None)
        for req in candidates:
            if id(req) in left:
                continue
            if controller is None:
                queue.remove(req)
            else:
                queue.remove_rid(req.rid)
                controller.admitted(req.cosched)
        if batch is not None and controller is not None:
            count_resumed(batch)
        return batch, running_batch

    def _has_passed(self) -> bool:
        """True if every request of the group has a new token or has left."""
        waiting = {req.rid for req in self._scheduler.waiting_queue}
        running = {req.rid: req for req in port.in_flight(self._scheduler)}
        for rid in self._isolation.group:
            req = running.get(rid)
            if rid in waiting or (
                req is not None and len(req.output_ids) <= self._num_outputs.get(rid, -1)
            ):
                return False
        return True

    def _note_outputs(self) -> None:
        group = set(self._isolation.group)
        self._num_outputs = {
            req.rid: len(req.output_ids)
            for req in (*self._scheduler.waiting_queue, *port.in_flight(self._scheduler))
            if req.rid in group
        }

    # --- Failures ---

    def _raise_unless_guarded(self, error: Exception) -> None:
        if self._guard.is_strict or recovery.ends_device(error):
            raise error

    def _refuse(self, received: Any, error: Exception) -> None:
        """Answer a request that could not be built. It may have been queued already."""
        scheduler = self._scheduler
        rid = received.rid
        self._count("request", error, f"request {rid!r} could not be built")
        recovery.leave_grammar_queue(scheduler, rid)
        for req in [req for req in scheduler.waiting_queue if req.rid == rid]:
            port.take_out_unanswered(scheduler, req)
        message = f"the engine cannot build this request: {error!r}"
        refuse(scheduler, received, message)

    def _take_back(self, error: Exception, batch: Any | None, admitted: Iterable[Any]) -> None:
        """Roll the iteration back, and abort or isolate the requests that may have caused the
        error."""
        self._raise_unless_guarded(error)
        if not self._can_take_back or recovery.was_sending(error):
            raise error
        scheduler = self._scheduler
        try:
            recovery.agree(scheduler)
            half_processed = recovery.being_processed(error)
            failed = [] if batch is None else [req for req in batch.reqs if not req.finished()]
            recovery.send_finished(scheduler, batch)
            recovery.mark_taken_back(scheduler, batch)
            reqs = recovery.take_back(scheduler, batch, admitted)
            recovery.forget_results(scheduler, launched=batch is not None)
            self._forget_iteration(reqs)
            failed = failed or reqs
            likely = recovery.named_in(error, [*failed, *scheduler.waiting_queue])
            for req in reqs:
                recovery.queue_again(scheduler, req)
            if likely is not None and likely not in reqs:  # it was being admitted
                reqs, failed = [*reqs, likely], [*failed, likely]
            if not failed:
                raise error
        except Exception as another:
            if another is error:
                raise
            raise another from error
        self._count(
            "batch", error, f"a batch of {len(failed)} requests failed and is run again in parts"
        )
        self._judge(error, reqs, failed, half_processed, likely)
        self._check_memory(error)

    def _judge(
        self,
        error: Exception,
        reqs: Sequence[Any],
        failed: Sequence[Any],
        half_processed: Any | None,
        likely: Any | None,
    ) -> None:
        reason = repr(error)
        by_rid = {req.rid: req for req in reqs}
        if half_processed is not None:
            # Its output is complete in one place and missing in another: it cannot continue.
            self._abort(half_processed, reason)
            by_rid.pop(half_processed.rid, None)
            failed = []
        for req in list(by_rid.values()):
            why = recovery.why_not_requeued(req)
            if why is not None:
                self._abort(req, f"{reason}; {why}")
                del by_rid[req.rid]
        batch = [req.rid for req in failed if req.rid in by_rid]
        if batch:
            others = [rid for rid in by_rid if rid not in set(batch)]
            culprits = self._isolation.failed(batch, others, likely and likely.rid)
            for rid in culprits:
                self._abort(by_rid[rid], reason)
        self._note_outputs()

    def _abort(self, req: Any, reason: str) -> None:
        scheduler = self._scheduler
        _log.error("cosched: request %r is aborted: the engine failed on it: %s", req.rid, reason)
        if port.is_queued(scheduler, req):
            port.take_out_unanswered(scheduler, req)
        message = f"the engine failed on this request: {reason}"
        answer_with_error(scheduler, req, HTTPStatus.BAD_REQUEST, message)

    def _queue_of(self, before: Any) -> Any:
        """The waiting queue as it was. SGLang replaces its own list while it builds a batch."""
        now = self._scheduler.waiting_queue
        if now is not before and isinstance(before, list):
            known = {id(req) for req in before}
            before.extend(req for req in now if id(req) not in known)
        return before

    def _forget_iteration(self, reqs: Sequence[Any]) -> None:
        scheduler = self._scheduler
        scheduler.cosched_observer.abandon()
        controller = getattr(scheduler, "cosched", None)
        if controller is None:
            return
        controller.abandon([t for req in reqs if (t := TrackedRequest.of(req)) is not None])

    def _check_memory(self, error: Exception) -> None:
        use = recovery.memory_left(self._scheduler)
        if use.is_consistent:
            return
        if use.is_double or port.parallel().dp_rank is not None:
            raise RuntimeError(f"KV memory is not consistent: {use}") from error
        if self.is_draining:
            return
        self.is_draining = True
        recovery.stop_checking_memory()
        _log.critical(
            "cosched: KV memory is not consistent after a failure: %s. The server drains and ends; "
            "start it again",
            use,
        )
        os.kill(os.getppid(), DRAIN_SIGNAL)

    def _count(self, place: str, error: Exception, what: str) -> None:
        self._guard.failures[place] += 1
        _log.error("cosched: %s: %r", what, error, exc_info=error)
