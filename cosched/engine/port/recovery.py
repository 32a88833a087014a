"""Takes a failed iteration back: running requests release their memory, batches are emptied."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch

from cosched.engine import port
from cosched.engine.port.batch import wait_for
from cosched.engine.port.scheduler import parallel, rank_group, waits_alone

_AGREE_S = 15.0
"""Time in which all tensor-parallel ranks must report the same failure [s]."""

_PROCESSING = "process_batch_result_"


def can_take_back(scheduler: Any) -> bool:
    """Whether this engine's iterations can be taken back. Drafts, state-space layers, sliding
    windows, beams and pipeline stages hold state that a release here would not cover."""
    return (
        scheduler.spec_algorithm.is_none()
        and not scheduler.enable_hisparse
        and scheduler.dllm_config is None
        and not (scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm)
        and waits_alone(scheduler)
    )


def ends_device(error: BaseException) -> bool:
    """Whether the device cannot be used after this error: CUDA errors stay with the process."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    text = str(error)
    return "CUDA error" in text or "NCCL" in text


def agree(scheduler: Any) -> None:
    """Return once every tensor-parallel rank has failed in this iteration. RuntimeError when one
    has not: the ranks would run different batches from here on."""
    if parallel().tp_size > 1:
        group = rank_group(scheduler)
        torch.distributed.monitored_barrier(group, timeout=timedelta(seconds=_AGREE_S))


def being_processed(error: BaseException) -> Any | None:
    """The request whose result was being processed when the error was raised: its output may be
    complete in one place and missing in another. None: no result was."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name.startswith(_PROCESSING) and "req" in frame.f_locals:
            return frame.f_locals["req"]
    return None


def named_in(error: BaseException, reqs: Sequence[Any]) -> Any | None:
    """The request that the innermost function with one of `reqs` as its ``req`` or ``self`` was
    working on. None: no function says."""
    known = {id(req) for req in reqs}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in ("req", "self"):
            req = frame.f_locals.get(name)
            if id(req) in known:
                found = req
    return found


def was_sending(error: BaseException) -> bool:
    """Whether outputs were being sent: some requests may already count tokens as sent that no
    client got."""
    return any(
        frame.f_code.co_name.startswith("stream_output")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def why_not_requeued(req: Any) -> str | None:
    """Why a running request cannot wait and run again; None: it can."""
    if req.session is not None and req.session.streaming:
        return "a streaming session cannot run a request again"
    if req.input_embeds is not None and req.output_ids:
        return "a request with input embeddings cannot continue its output"
    return None


def take_back(scheduler: Any, failed: Any | None, admitted: Iterable[Any]) -> list[Any]:
    """Release the memory of every request that runs, and empty all batches. Returns the requests
    that have not finished, in the order of the batches.

    failed    the batch that was launched or whose result was processed; None: it was being built
    admitted  requests that the batch that was being built may have taken from the queue
    """
    _wait_for_device(scheduler)
    allocator = scheduler.token_to_kv_pool_allocator
    if allocator.free_group is not None:
        allocator.free_group_end()
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
    """Drop the results that are under way. SGLang's loop expects one for its last batch; in its
    place stands None.

    launched: the loop goes on with the batch that failed; else with none
    """
    results = getattr(scheduler, "result_queue", None)
    if results:
        emptied = [(batch, None) for batch, _ in results]
        results.clear()
        if launched:
            results.extend(emptied)
    if not launched:
        scheduler.last_batch = None


def unfinished_prefill(scheduler: Any) -> Any | None:
    """The request whose prefill continues with the next batch."""
    return scheduler.chunked_req


def mark_taken_back(scheduler: Any, batch: Any | None) -> None:
    """`was_taken_back` holds for this batch and for the one that the loop is about to launch."""
    for each in (batch, scheduler.cur_batch_for_debug):
        if each is not None:
            each.cosched_taken_back = True


def was_taken_back(batch: Any) -> bool:
    """Whether a batch is to be launched whose requests were taken out of it."""
    return not batch.reqs and getattr(batch, "cosched_taken_back", False)


def queue_again(scheduler: Any, req: Any) -> None:
    """Put a request that has released its memory into the waiting queue, unless it is there."""
    if port.is_queued(scheduler, req):
        req.reset_for_retract()
    else:
        port.put_back(scheduler, req)


def leave_grammar_queue(scheduler: Any, rid: str) -> None:
    """A request does not wait for its grammar any more."""
    manager = scheduler.grammar_manager
    manager.grammar_queue = [req for req in manager.grammar_queue if req.rid != rid]


def send_finished(scheduler: Any, failed: Any | None) -> None:
    """Send the last outputs of requests that have finished, where the failure came before that."""
    for batch in (failed, scheduler.last_batch):
        if batch is not None and (finished := [req for req in batch.reqs if req.finished()]):
            scheduler.output_streamer.stream_output(finished, batch.return_logprob)


def _empty(batch: Any) -> None:
    """Take all requests out of a batch. SGLang's loop drops it then."""
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
    """What was launched is done, and nothing is written to the memory that is given back."""
    for _, result in getattr(scheduler, "result_queue", ()):
        if result is not None:
            wait_for(scheduler, result)
    if scheduler.device != "cpu":
        torch.get_device_module(scheduler.device).synchronize()


class MemoryUse:
    """KV tokens and request rows of an engine that runs nothing.

    num_lost     tokens that neither the allocator nor the radix tree holds; below 0: tokens that
                 both hold, which may be handed out twice
    rows_lost    the same of request rows
    """

    def __init__(self, num_lost: int, rows_lost: int) -> None:
        self.num_lost = num_lost
        self.rows_lost = rows_lost

    @property
    def is_consistent(self) -> bool:
        return self.num_lost == 0 and self.rows_lost == 0

    @property
    def is_double(self) -> bool:
        """Some memory may be handed out twice."""
        return self.num_lost < 0 or self.rows_lost < 0

    def __str__(self) -> str:
        return f"{self.num_lost} KV tokens and {self.rows_lost} request rows are unaccounted for"


def memory_left(scheduler: Any) -> MemoryUse:
    """The engine's own invariant while no request runs."""
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
    )


def stop_checking_memory() -> None:
    """SGLang's own check of an idle scheduler warns from now on, and does not end the process."""
    envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.set(False)
