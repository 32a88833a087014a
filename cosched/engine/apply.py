"""A plan applied to SGLang: what is stopped, what is held, what the engine is to build."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from cosched.core.plan import Plan, PreemptMode
from cosched.engine import port
from cosched.engine.controller import Controller
from cosched.engine.port.building import PrefillPlan, build_prefill
from cosched.engine.port.partial import split
from cosched.engine.port.penalties import count_resumed


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
    port.admit_ready_grammars(scheduler, controller.clock.now_s())
    nothing_runs = scheduler.chunked_req is None and running_batch.is_empty()
    if nothing_runs and not controller.waiting.may_admit:
        controller.idle()
        return None, running_batch
    if port.holds_ended(running_batch):
        running_batch.filter_batch()
    plan = controller.plan(running_batch)
    # A request can only be stopped at a point where all its tokens are known; the price is that one
    # iteration does not overlap.
    if plan.preempt and port.drain_results(scheduler):
        plan = _after_draining(controller, plan, running_batch)
    controller.promise(plan, running_batch)
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
        controller.decodes_due = not port.decodes_of(batch) and not running_batch.is_empty()
        count_resumed(batch)
    return batch, running_batch


def held_adapters(controller: Controller) -> Set[str | None]:
    """LoRA adapters of the requests that sit out the iteration that is being made ready."""
    return frozenset() if controller.split is None else controller.split.adapters


def rejoin_held(controller: Controller, batch: Any | None, running_batch: Any) -> Any:
    """Put the requests that sit out the iteration back among the running ones, and return these.

    batch: of the iteration, ready to run; None: nothing runs
    """
    if controller.split is not None:
        running_batch = controller.split.rejoin(batch)
        controller.split = None
    controller.on_launch(batch)
    return running_batch


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
    if mode is PreemptMode.CHECKPOINT and controller.kv is not None:
        controller.kv.checkpoint(req.cosched)
    port.put_back(scheduler, req)


def _build_batch(
    original: Callable[..., tuple[Any, Any]],
    controller: Controller,
    plan: Plan,
    running_batch: Any,
    prefill_delayer_single_pass: Any,
) -> tuple[Any, Any]:
    waiting = controller.waiting
    candidates = [t.req for rid in plan.prefill if (t := waiting.get(rid)) is not None]
    batch, running_batch, left = build_prefill(
        original,
        controller.scheduler,
        plan=PrefillPlan(num_tokens=plan.prefill, taken=controller.taken),
        num_tokens=sum(map(controller.caps.ceil_to_page, plan.prefill.values())),
        candidates=candidates,
        running_batch=running_batch,
        prefill_delayer_single_pass=prefill_delayer_single_pass,
    )
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
