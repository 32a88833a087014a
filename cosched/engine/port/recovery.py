"""Rolls a failed iteration back: running requests release their memory, batches are emptied."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch

from cosched.engine import port
from cosched.engine.port import states
from cosched.engine.port.batch import wait_for
from cosched.engine.port.scheduler import parallel, rank_group, waits_alone

_AGREE_S = 15.0  # time in which all tensor-parallel ranks must fail


def can_take_back(scheduler: Any) -> bool:
    """Whether iterations of this engine can be rolled back. Drafts, sliding windows and pipeline
    stages have state that is not released here."""
    return (
        scheduler.spec_algorithm.is_none()
        and not scheduler.enable_hisparse
        and scheduler.dllm_config is None
        and not scheduler.is_hybrid_swa
        and waits_alone(scheduler)
    )


def ends_device(error: BaseException) -> bool:
    """Whether the process cannot use the device after this error, as after most CUDA errors."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    text = str(error)
    return "CUDA error" in text or "NCCL" in text


def agree(scheduler: Any) -> None:
    """Wait until every tensor-parallel rank has failed in this iteration. RuntimeError if one has
    not: the ranks would then run different batches."""
    if parallel().tp_size > 1:
        group = rank_group(scheduler)
        torch.distributed.monitored_barrier(group, timeout=timedelta(seconds=_AGREE_S))


def being_processed(error: BaseException) -> Any | None:
    """The request whose result was being processed when the error was raised: its output may be
    inconsistent. None: no result was being processed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name.startswith("process_batch_result_") and "req" in frame.f_locals:
            return frame.f_locals["req"]
    return None


def named_in(error: BaseException, reqs: Sequence[Any]) -> Any | None:
    """The request of `reqs` that is ``req`` or ``self`` in the innermost such function of the
    traceback; None: there is no such function."""
    known = {id(req) for req in reqs}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in ("req", "self"):
            req = frame.f_locals.get(name)
            if id(req) in known:
                found = req
    return found


def was_sending(error: BaseException) -> bool:
    """Whether outputs were being sent: requests may count tokens as sent that no client got."""
    return any(
        frame.f_code.co_name.startswith("stream_output")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def why_not_requeued(req: Any) -> str | None:
    """Why a running request cannot be queued again; None: it can."""
    if req.session is not None and req.session.streaming:
        return "a streaming session cannot run a request again"
    if req.input_embeds is not None and req.output_ids:
        return "a request with input embeddings cannot continue its output"
    return None


def take_back(scheduler: Any, failed: Any | None, admitted: Iterable[Any]) -> list[Any]:
    """Release the memory of all running requests and empty all batches. Returns the unfinished
    requests in the order of the batches.

    failed    the batch that was launched or processed; None: a batch was being built
    admitted  requests that this batch may have taken from the queue
    """
    _wait_for_device(scheduler)
    allocator = scheduler.token_to_kv_pool_allocator
    if allocator.free_group is not None:
        allocator.free_group_end()
    states.end_allocation(scheduler)
    batches = list(_batches(scheduler, failed))
    reqs = {id(req): req for batch in batches for req in batch.reqs}
    for req in (scheduler.chunked_req, *admitted):
        if req is not None and port.holds_memory(req):
            reqs.setdefault(id(req), req)
    scheduler.chunked_req = None
    for batch in batches:
        _empty(batch)
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    for req in reqs.values():
        port.release_whatever(scheduler.tree_cache, req)
    return [req for req in reqs.values() if not req.finished()]


def forget_results(scheduler: Any, *, launched: bool) -> None:
    """Drop the results in flight. launched: SGLang's loop continues with the batch that failed and
    expects a result, which is None; else it continues without a batch."""
    results = getattr(scheduler, "result_queue", None)
    if results:
        emptied = [(batch, None) for batch, _ in results] if launched else []
        results.clear()
        results.extend(emptied)
    if not launched:
        scheduler.last_batch = None


def unfinished_prefill(scheduler: Any) -> Any | None:
    """The request whose prefill continues with the next batch."""
    return scheduler.chunked_req


def mark_taken_back(scheduler: Any, batch: Any | None) -> None:
    """Mark this batch and the one that the loop is about to launch, for `was_taken_back`."""
    for each in (batch, scheduler.cur_batch_for_debug):
        if each is not None:
            each.cosched_taken_back = True


def was_taken_back(batch: Any) -> bool:
    """Whether all requests of a batch were removed before it is launched."""
    return not batch.reqs and getattr(batch, "cosched_taken_back", False)


def queue_again(scheduler: Any, req: Any) -> None:
    """Queue a request that has released its memory, unless it is queued."""
    if port.is_queued(scheduler, req):
        req.reset_for_retract()
    else:
        port.put_back(scheduler, req)


def leave_grammar_queue(scheduler: Any, rid: str) -> None:
    """Remove a request from those that wait for their grammar."""
    manager = scheduler.grammar_manager
    manager.grammar_queue = [req for req in manager.grammar_queue if req.rid != rid]


def send_finished(scheduler: Any, failed: Any | None) -> None:
    """Send the last outputs of finished requests, which the failure has prevented."""
    for batch in (failed, scheduler.last_batch):
        if batch is not None and (finished := [req for req in batch.reqs if req.finished()]):
            scheduler.output_streamer.stream_output(finished, batch.return_logprob)


def _empty(batch: Any) -> None:
    """Remove all requests from a batch. SGLang's loop then drops it."""
    batch.filter_batch(keep_indices=[])
    batch.decoding_reqs = None
    batch.chunked_req = None


def _batches(scheduler: Any, failed: Any | None) -> Iterator[Any]:
    seen = set()
    queued = [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    current = scheduler.cur_batch_for_debug
    for batch in (failed, scheduler.running_batch, scheduler.last_batch, current, *queued):
        if batch is not None and id(batch) not in seen:
            seen.add(id(batch))
            yield batch


def _wait_for_device(scheduler: Any) -> None:
    """Wait for what was launched, so that nothing is written to released memory."""
    for _, result in getattr(scheduler, "result_queue", ()):
        if result is not None:
            wait_for(scheduler, result)
    if scheduler.device != "cpu":
        torch.get_device_module(scheduler.device).synchronize()


class MemoryUse(NamedTuple):
    """KV tokens, request rows and state slots of an idle engine that nothing accounts for.
    Negative numbers: both do, and the memory may be used twice."""

    num_lost: int
    rows_lost: int
    states_lost: int

    @property
    def is_consistent(self) -> bool:
        return not any(self)

    @property
    def is_double(self) -> bool:
        """Whether some memory may be used twice."""
        return min(self) < 0

    def __str__(self) -> str:
        return (
            f"{self.num_lost} KV tokens, {self.rows_lost} request rows and {self.states_lost} "
            "state slots are unaccounted for"
        )


def memory_left(scheduler: Any) -> MemoryUse:
    """SGLang's invariant of an idle engine."""
    tree, rows = scheduler.tree_cache, scheduler.req_to_token_pool
    observer = scheduler.pool_stats_observer
    accounted = (
        scheduler.token_to_kv_pool_allocator.available_size()
        + tree.evictable_size()
        + tree.protected_size()
        + observer.session_held_tokens()
    )
    free_rows = len(rows.free_slots) + observer.session_held_req_count()
    return MemoryUse(
        int(scheduler.max_total_num_tokens - accounted),
        int(rows.size + rows.pre_alloc_size - free_rows),
        states.num_lost(scheduler),
    )


def stop_checking_memory() -> None:
    """SGLang's check of an idle scheduler only warns from now on, instead of ending the process."""
    envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.set(False)
