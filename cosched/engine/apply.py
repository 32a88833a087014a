"""A plan applied to SGLang: what is stopped, what is handed to the engine, chunk by chunk.

SGLang's `Scheduler._get_new_batch_prefill_raw` stays in charge of building batches. It is given a
short waiting queue (the requests of the plan, in its order) and a `PrefillAdder` that knows how
many tokens each of them gets; everything else it does (LoRA, mixed batches, HiCache, logprobs) is
its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from cosched.core.plan import Plan, PreemptMode
from cosched.engine import port
from cosched.engine.controller import Controller
from cosched.engine.partial import split
from cosched.engine.penalties import count_resumed

__all__ = ["PlannedPrefillAdder", "held_adapters", "rejoin_held", "schedule_prefill"]

# The scheduler builds its adder from fixed arguments, so the plan reaches it past them. A scheduler
# process has one thread that schedules.
_active_plan: Plan | None = None


class PlannedPrefillAdder(PrefillAdder):  # type: ignore[misc]  # SGLang's classes are untyped here
    """SGLang's adder with a token limit per request. Without an active plan it is the stock one.

    Memory, slot and alignment rules are the stock ones; a refusal of one request does not end the
    admission of those behind it, because the plan already says what fits.
    """

    rem_chunk_tokens: int | None

    def add_chunked_req(self, req: Any) -> Any:
        if _active_plan is not None:
            self.chunked_req_limit = _active_plan.prefill[req.rid]
        return super().add_chunked_req(req)

    def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        if _active_plan is None:
            return super().add_one_req(req, *args, **kwargs)
        # Whole pages, as the stock adder counts: a chunk of the plan ends on a page boundary, and
        # the end of a prompt is rounded up.
        limit = self.ceil_paged_tokens(_active_plan.prefill.get(req.rid, 0))
        if limit <= 0:
            return AddReqResult.CONTINUE
        outer = self.rem_chunk_tokens
        if outer is not None:
            self.rem_chunk_tokens = limit
        super().add_one_req(req, *args, **kwargs)
        if outer is not None:
            assert self.rem_chunk_tokens is not None
            self.rem_chunk_tokens = outer - (limit - self.rem_chunk_tokens)
        return AddReqResult.CONTINUE


@contextlib.contextmanager
def _applying(plan: Plan) -> Iterator[None]:
    global _active_plan
    assert _active_plan is None
    _active_plan = plan
    try:
        yield
    finally:
        _active_plan = None


def schedule_prefill(
    original: Callable[..., tuple[Any, Any]],
    controller: Controller,
    *,
    prefill_delayer_single_pass: Any,
    running_batch: Any,
) -> tuple[Any, Any]:
    """Plan one iteration and have SGLang build its prefill batch.

    Returns ``(batch or None, running_batch)`` as `Scheduler._get_new_batch_prefill_raw` does; with
    None the scheduler decodes the running batch.
    """
    scheduler = controller.scheduler
    port.admit_ready_grammars(scheduler)
    nothing_runs = scheduler.chunked_req is None and running_batch.is_empty()
    if nothing_runs and not controller.waiting.may_admit:
        if controller.exporter is not None:
            with controller.guard.watching("metrics"):
                controller.exporter.idle()
        return None, running_batch
    if not all([port.is_under_way(req) for req in running_batch.reqs]):
        running_batch.filter_batch()
    plan = controller.plan(running_batch)
    # A request can only be stopped at a point where all its tokens are known; the price is that one
    # iteration does not overlap.
    if plan.preempt and port.drain_results(scheduler):
        plan = _after_draining(controller, plan, running_batch)
    _preempt(controller, plan, running_batch)
    controller.split = split(running_batch, plan.hold) if plan.hold else None
    if controller.split is not None:
        running_batch = controller.split.active
    controller.decodes_due = False
    if not plan.prefill:
        return None, running_batch
    batch, running_batch = _build_batch(
        original, controller, plan, running_batch, prefill_delayer_single_pass
    )
    if batch is not None:
        controller.decodes_due = not batch.decoding_reqs and not running_batch.is_empty()
        count_resumed(batch)
    return batch, running_batch


def held_adapters(controller: Controller) -> Set[str | None]:
    """LoRA adapters of the requests that sit out the iteration that is being made ready."""
    return frozenset() if controller.split is None else controller.split.adapters


def rejoin_held(controller: Controller, next_batch: Any) -> Any:
    """Put the requests that sit out the iteration back among the running ones; its batch is ready.

    `next_batch` is what `Scheduler.get_next_batch_to_run` returns.
    """
    if controller.split is not None:
        next_batch.running_batch = controller.split.rejoin(next_batch.batch_to_run)
        controller.split = None
    controller.on_launch(next_batch.batch_to_run)
    return next_batch


def _after_draining(controller: Controller, plan: Plan, running_batch: Any) -> Plan:
    """What is left of a plan now that all results are known.

    Requests that ended leave more room than it reckoned with, so it still fits; it is made anew
    only where that may spare a running request that it stops.
    """
    num_running = len(running_batch.reqs)
    running_batch.filter_batch()
    if len(running_batch.reqs) == num_running:
        return plan
    unfinished = controller.scheduler.chunked_req
    stops_running = any(unfinished is None or p.rid != unfinished.rid for p in plan.preempt)
    if stops_running or not plan.prefill:
        controller.counters.num_replans += 1
        return controller.plan(running_batch, is_again=True)
    left = {req.rid for req in running_batch.reqs}
    return replace(plan, hold=plan.hold & left)


def _preempt(controller: Controller, plan: Plan, running_batch: Any) -> None:
    if not plan.preempt:
        return
    scheduler = controller.scheduler
    stopped = {preemption.rid: preemption.mode for preemption in plan.preempt}
    chunked_req = scheduler.chunked_req
    if chunked_req is not None and chunked_req.rid in stopped:
        scheduler.chunked_req = None
        _stop(controller, chunked_req, stopped[chunked_req.rid])
    keep_indices = []
    for index, req in enumerate(running_batch.reqs):
        if req.rid in stopped:
            _stop(controller, req, stopped[req.rid])
        else:
            keep_indices.append(index)
    if len(keep_indices) < len(running_batch.reqs):
        running_batch.filter_batch(keep_indices=keep_indices)


def _stop(controller: Controller, req: Any, mode: PreemptMode) -> None:
    """Give back a request's memory and send it back to where it waits."""
    scheduler = controller.scheduler
    controller.stopped(req)
    port.release(scheduler.tree_cache, req, keep=mode is not PreemptMode.RECOMPUTE)
    port.put_back(scheduler, req)


def _build_batch(
    original: Callable[..., tuple[Any, Any]],
    controller: Controller,
    plan: Plan,
    running_batch: Any,
    prefill_delayer_single_pass: Any,
) -> tuple[Any, Any]:
    scheduler = controller.scheduler
    waiting = controller.waiting
    candidates = [t.req for rid in plan.prefill if (t := waiting.get(rid)) is not None]
    chunk_size = scheduler.chunked_prefill_size
    limit = chunk_size
    if chunk_size is not None:
        num_mixed = len(running_batch.reqs) if scheduler.is_mixed_chunk else 0
        limit = num_mixed + sum(map(controller.caps.ceil_to_page, plan.prefill.values()))

    def build(running_batch: Any) -> tuple[Any, Any]:
        running_batch.batch_is_full = False  # it remembers a verdict on another plan
        scheduler.waiting_queue = list(candidates)
        return original(
            prefill_delayer_single_pass=prefill_delayer_single_pass, running_batch=running_batch
        )

    try:
        scheduler.chunked_prefill_size = limit
        with _applying(plan):
            batch, running_batch = build(running_batch)
        scheduler.chunked_prefill_size = chunk_size
        if batch is None and running_batch.is_empty():
            # The engine is idle and takes nothing as it was planned, by a rule that no plan knows.
            # Its own cut gets it going.
            batch, running_batch = build(running_batch)
    finally:
        left = scheduler.waiting_queue
        scheduler.waiting_queue = waiting
        scheduler.chunked_prefill_size = chunk_size
    refused = {req.rid for req in left}
    for req in candidates:
        if req.rid not in refused:
            waiting.remove_rid(req.rid)
            controller.admitted(req.cosched)
    for req in left:
        if req in waiting:
            controller.bar(req.cosched)
        else:
            waiting.append(req)
    if batch is not None:
        for req, num_tokens in port.prefills_of(batch):
            controller.count_prefill(req, num_tokens)
    return batch, running_batch
