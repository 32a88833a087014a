"""What holds for every supported version of SGLang."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.managers.scheduler import _make_abort_req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule

from cosched.core.batch import BatchShape, Prefill
from cosched.core.caps import EngineCaps
from cosched.core.request import Traits
from cosched.engine.port.attention import reads_once
from cosched.latency.graphs import GraphSizes

__all__ = [
    "GRAMMAR_LIMIT_S",
    "Found",
    "Parallel",
    "Peek",
    "WaitingTotal",
    "admit_ready_grammars",
    "can_hold",
    "can_split",
    "caps_of",
    "computed_of",
    "created_s",
    "decodes_of",
    "drain_results",
    "end_with_error",
    "error_answer",
    "evictable_at",
    "free_slots",
    "graph_sizes_of",
    "has_one_pool",
    "has_penalties",
    "holds_ended",
    "host_free",
    "host_total",
    "in_flight",
    "is_aborted",
    "is_cancelled",
    "is_constrained",
    "is_done",
    "is_ending",
    "is_idle",
    "is_queued",
    "is_under_way",
    "kv_evictable",
    "kv_free",
    "kv_shared",
    "kv_total",
    "last_node",
    "leave_a_page",
    "longest_prompt",
    "lookup_key",
    "metric_labels",
    "mix_only_decodes",
    "num_cached_at_first",
    "num_committed",
    "num_in_session",
    "num_loaded",
    "num_outputs",
    "num_own",
    "num_prefills",
    "num_retractions",
    "num_slots_taken",
    "overlaps",
    "parallel",
    "peek",
    "prefills_of",
    "prefix_key",
    "put_back",
    "rank_group",
    "report_waiting",
    "reserve_ratio",
    "row_generations",
    "rows_of",
    "runs_model",
    "runs_on_cpu",
    "searches_host",
    "shape_of",
    "take_out_unanswered",
    "tell_client",
    "token_ids",
    "traits_of",
    "under_way",
    "wait_for",
    "waits_alone",
]


class Parallel(NamedTuple):
    """Where this process stands among those of a server: its place among the tensor-parallel ranks
    of its replica, how many these are, and the replica's number; None: there is one."""

    tp_rank: int
    tp_size: int
    dp_rank: int | None


class Peek(NamedTuple):
    """What the radix tree holds of a request on the device, looked at without a trace.

    num_tokens  at its head
    node        the last node on the way
    num_pinned  that a lock on this node would take: it may go on behind the match
    """

    num_tokens: int
    node: Any
    num_pinned: int


class Found(NamedTuple):
    """The same by SGLang's whole search, which counts as a use and may split a node.

    num_device, num_host  tokens at its head on the device, and behind them on the host
    node                  the last node on the device
    """

    num_device: int
    num_host: int
    node: Any


# --- The engine's limits ---


def caps_of(scheduler: Any) -> EngineCaps:
    """The limits of a scheduler, read once after it was built."""
    return EngineCaps(
        page_size=scheduler.page_size,
        max_running_requests=scheduler.max_running_requests,
        max_chunk_tokens=scheduler.chunked_prefill_size,
        max_prefill_tokens=scheduler.max_prefill_tokens,
        max_prefills=get_schedule().prefill_max_requests,
        max_reserved_tokens=CLIP_MAX_NEW_TOKENS,
        chunk_align=scheduler.truncation_align_size or 1,
        max_adapters=scheduler.max_loras_per_batch if scheduler.enable_lora else None,
        mixed_batches=bool(scheduler.is_mixed_chunk),
        partial_decode=can_split(scheduler),
        promises=True,
        hosts=True,
        shared_prefix=reads_once(),
        host_tokens=host_total(scheduler),
    )


def can_split(scheduler: Any) -> bool:
    """Whether this engine's running batch can be divided at all: its requests must carry no state
    of their own beside rows and tokens."""
    return (
        scheduler.is_generation
        and scheduler.spec_algorithm.is_none()
        and not scheduler.enable_hisparse
        and scheduler.dllm_config is None
        and not scheduler.model_config.is_encoder_decoder
        and not scheduler.is_hybrid_ssm
    )


def longest_prompt(scheduler: Any) -> int:
    """Tokens of a prompt that the engine takes."""
    return int(scheduler.max_req_input_len) - 1


def graph_sizes_of(scheduler: Any) -> GraphSizes | None:
    """The sizes that its batches are padded to for CUDA graphs; None: they are not."""
    config = get_exec().graph.cuda_graph_config
    if scheduler.device == "cpu" or config is None:
        return None

    def sizes(phase: Any) -> tuple[int, ...]:
        return () if phase.backend == "disabled" else tuple(sorted(phase.bs or ()))

    graphs = GraphSizes(prefill=sizes(config.prefill), decode=sizes(config.decode))
    return graphs if graphs.prefill or graphs.decode else None


def parallel() -> Parallel:
    """Of this process, once SGLang has set it up."""
    groups = get_parallel()
    return Parallel(groups.tp_rank, groups.tp_size, groups.dp_rank)


def rank_group(scheduler: Any) -> Any:
    """The process group of the ranks that schedule together, on the CPU."""
    return scheduler.tp_cpu_group


def has_one_pool(scheduler: Any) -> bool:
    """Whether all KV of its model is in one pool: that of sliding-window and state-space layers is
    not."""
    return not (scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm)


def runs_on_cpu(scheduler: Any) -> bool:
    """Whether a forward is done when its call returns."""
    return bool(scheduler.device == "cpu")


def metric_labels(scheduler: Any) -> Mapping[str, Any] | None:
    """Labels of SGLang's own metrics of this scheduler; None: it reports none."""
    context = scheduler.metrics_collector_context
    return context.collector.labels if context.current_scheduler_metrics_enabled else None


# --- What is set in a scheduler when it is taken over ---


def leave_a_page(scheduler: Any) -> None:
    """Lower SGLang's limit of a request's length by what its `PrefillAdder` asks for beside it, a
    page. Requests between the two would be taken and never admitted, and block all behind them."""
    beyond = scheduler.max_req_len - (scheduler.max_total_num_tokens - scheduler.page_size)
    if beyond > 0:
        scheduler.max_req_len -= beyond
        scheduler.max_req_input_len -= beyond


def mix_only_decodes(scheduler: Any) -> None:
    """Mix no batches where nothing decodes: SGLang's assume a model that generates."""
    if not scheduler.is_generation:
        scheduler.is_mixed_chunk = False


class WaitingTotal(NamedTuple):
    """All waiting requests as one, for load reports."""

    seqlen: int
    num_matched_prefix_tokens: int = 0
    cache_request_handle: None = None  # 0.5.23 asks what its storage would find of it


def report_waiting(scheduler: Any, waiting: Any) -> None:
    """Have load reports look at `waiting`, for its length and for the lengths of its items."""
    # The inquirer is a frozen dataclass of callables that the scheduler itself builds.
    object.__setattr__(scheduler.load_inquirer, "get_waiting_queue", lambda: waiting)


# --- Memory and slots ---


def kv_total(scheduler: Any) -> int:
    """KV tokens of the device."""
    return int(scheduler.max_total_num_tokens)


def kv_free(scheduler: Any) -> int:
    """KV tokens that nobody uses."""
    return int(scheduler.token_to_kv_pool_allocator.available_size())


def kv_evictable(scheduler: Any) -> int:
    """KV tokens that only the radix tree holds."""
    return int(scheduler.tree_cache.evictable_size())


def kv_shared(scheduler: Any) -> int:
    """KV tokens of the radix tree that requests use, each once."""
    return int(scheduler.tree_cache.protected_size())


def host_total(scheduler: Any) -> int:
    """KV tokens of host memory; 0: there is none."""
    if not scheduler.enable_hierarchical_cache:
        return 0
    return int(scheduler.tree_cache.cache_controller.mem_pool_host.size)


def host_free(scheduler: Any) -> int:
    """KV tokens of host memory that nobody uses."""
    if not scheduler.enable_hierarchical_cache:
        return 0
    return int(scheduler.tree_cache.cache_controller.mem_pool_host.available_size())


def free_slots(scheduler: Any, running_batch: Any) -> int:
    """Requests that may join those of `running_batch`."""
    slots = scheduler.get_num_allocatable_reqs(len(running_batch.reqs), running_batch=running_batch)
    return int(slots)


def num_slots_taken(scheduler: Any) -> int:
    """Requests that have a slot, whether they run in this iteration or not."""
    rows = scheduler.req_to_token_pool
    return int(rows.size - rows.available_size())


def reserve_ratio(scheduler: Any) -> float:
    """The share of the output still to come that SGLang keeps free for running requests, learnt
    from past iterations. See `reserves_whole_output`."""
    return float(scheduler.new_token_ratio_tracker.current)


# --- A request ---


def token_ids(req: Any) -> array[int]:
    """Prompt and generated tokens. Not to be written: without output it is the prompt itself."""
    ids: array[int] = req.origin_input_ids
    return ids + req.output_ids if req.output_ids else ids


def num_committed(req: Any) -> int:
    """Tokens whose KV is computed."""
    return req.kv.kv_committed_len  # type: ignore[no-any-return]


def num_own(req: Any) -> int:
    """KV tokens that it holds beside what the radix tree owns."""
    return int(req.kv.kv_allocated_len) - int(req.kv.cache_protected_len)


def lookup_key(req: Any) -> Any:
    """What admission will look up (`Req.init_next_round_input`): all tokens but those that must be
    computed in any case."""
    ids = token_ids(req)
    if req.positional_embed_overrides is not None:
        ids = ids[:0]
    limit = req._compute_max_prefix_len(len(ids))
    return RadixKey(token_ids=ids, extra_key=req.extra_key, limit=limit, cache_salt=req.cache_salt)


def is_under_way(req: Any) -> bool:
    """Whether a request of the running batch goes on: one that has ended stays in it until it is
    next filtered."""
    return req.finished_reason is None


def holds_ended(running_batch: Any) -> bool:
    """Whether some request of the running batch does not go on."""
    return any([req.finished_reason is not None for req in running_batch.reqs])


def is_ending(req: Any) -> bool:
    """Whether it ends with the iteration under way, aborted as it is; only the engine sees it."""
    return req.to_finish is not None


def num_cached_at_first(req: Any) -> int:
    """Prompt tokens found in the prefix cache when it was first admitted."""
    return req.cached_tokens  # type: ignore[no-any-return]


def num_retractions(req: Any) -> int:
    """How often it went back to the queue, by plans and by the engine."""
    return req.retraction_count  # type: ignore[no-any-return]


def prefix_key(req: Any) -> Hashable:
    """Requests share nothing unless these are equal. SGLang has the LoRA adapter in its extra
    key."""
    return req.extra_key, req.cache_salt


def traits_of(req: Any) -> Traits:
    """What cannot be done with it."""
    beams = req.beam_group
    streams_session = req.session is not None and req.session.streaming
    has_embeds = req.input_embeds is not None
    return Traits(
        # Beams share rows that only the whole group can give back, a streaming session keeps its
        # row and its KV, and from embeddings the engine would generate everything anew.
        can_stop=beams is None and not streams_session and not has_embeds,
        # SGLang mixes no batch in which one of these is (`_get_new_batch_prefill_raw`).
        can_mix=beams is None and not req.return_logprob and not has_embeds,
        num_rows=1 if beams is None else int(beams.beam_width),
        adapter=req.lora_id,
    )


def tell_client(req: Any, key: str, value: str) -> None:
    """Put a value into the ``meta_info`` of a reply, of a streamed one in its first piece: a list
    with it alone. Nothing of the request may have been sent yet.

    SGLang sends of each list the entries of the tokens it sends.
    """
    req.customized_info = {**(req.customized_info or {}), key: [value]}


def has_penalties(req: Any) -> bool:
    """Whether what it may generate depends on what it has generated, by SGLang's penalizers."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def is_constrained(req: Any) -> bool:
    """Whether a grammar says what it may generate."""
    params = req.sampling_params
    return bool(params.json_schema or params.regex or params.ebnf or params.structural_tag)


def overlaps(scheduler: Any) -> bool:
    """It plans an iteration while the one before it runs."""
    return bool(scheduler.enable_overlap)


def waits_alone(scheduler: Any) -> bool:
    """Whether the loop of this scheduler is its own: no other replica or stage computes in step
    with it or waits for what it receives."""
    args = scheduler.server_args
    return args.disaggregation_mode == "null" and args.pp_size == 1 and not args.enable_dp_attention


def is_aborted(req: Any) -> bool:
    """Whether one that is over was ended by somebody, and neither by itself nor by its limit."""
    return isinstance(req.finished_reason, FINISH_ABORT)


def is_cancelled(req: Any) -> bool:
    """Whether one that is aborted was taken back by its client: errors have a status."""
    return is_aborted(req) and req.finished_reason.status_code is None


def num_outputs(reqs: Iterable[Any]) -> list[int]:
    """Generated tokens of each."""
    return [len(req.output_ids) for req in reqs]


_NO_ROWS = np.empty(0, dtype=np.int64)


def row_generations(scheduler: Any) -> Any:
    """Of each request row a number that changes when another request gets it: an array of int64,
    which the engine goes on writing."""
    return scheduler.req_to_token_pool.req_generation.numpy()


def rows_of(batch: Any) -> Any:
    """The row of each request of a batch: an array of int64. Those of beams lie behind them."""
    if not batch.reqs:
        return _NO_ROWS
    return batch.req_pool_indices_cpu.numpy()[: len(batch.reqs)]


def computed_of(running_batch: Any) -> Any:
    """Tokens whose KV is computed, of each request of the running batch: an array of int64."""
    reqs = running_batch.reqs
    if not reqs:
        return _NO_ROWS
    lengths = running_batch.seq_lens_cpu.numpy()
    if len(lengths) != len(reqs):  # with beams
        return np.array([num_committed(req) for req in reqs], dtype=np.int64)
    return lengths


# --- The radix tree ---


def peek(tree: Any, req: Any) -> Peek:
    """Changes nothing that eviction sees."""
    return Peek(*tree.tree_core.match_full_device_prefix(lookup_key(req)))


def num_in_session(tree: Any, req: Any) -> int | None:
    """Tokens that a streaming session has kept for its next request (`find_active_slot`); None:
    what is cached of it is in the tree."""
    if req.session is None or not req.session.streaming or req.to_finish is not None:
        return None
    slot = tree.session.slots.get(req.session.session_id)
    return int(slot.kv.kv_committed_len) if slot is not None and slot.kv.holds_kv else None


def evictable_at(tree: Any, node: Any) -> int:
    """Tokens from a node up to the root that nobody holds; measured by locking it for a moment."""
    before: int = tree.evictable_size()
    lock = tree.inc_lock_ref(node)
    held: int = before - tree.evictable_size()
    tree.dec_lock_ref(node, lock.to_dec_params())
    return held


def last_node(req: Any) -> Any:
    """The node of the tree that a running request holds, with those above it."""
    return req.last_node


def searches_host(scheduler: Any) -> bool:
    """Whether a look-up must be SGLang's whole search: only that knows what is in host memory. It
    touches what it finds, so with several ranks, of which one plans, their trees would differ."""
    return bool(scheduler.enable_hierarchical_cache) and parallel().tp_size == 1


# --- Batches ---


def can_hold(running_batch: Any) -> bool:
    """Whether the requests that run now can be divided: beams have rows of their own behind those
    of the requests."""
    return all([req.beam_group is None for req in running_batch.reqs])


def decodes_of(batch: Any) -> Sequence[Any]:
    """The requests that decode in a prefill batch. A batch keeps them when it becomes the running
    batch; there they say nothing."""
    return batch.decoding_reqs or ()


def num_prefills(batch: Any) -> int:
    """Requests of a batch that compute prompt tokens."""
    if batch.forward_mode.is_decode():
        return 0
    return len(batch.extend_lens) - len(decodes_of(batch))


def prefills_of(batch: Any) -> Iterator[tuple[Any, int]]:
    """The requests of a prefill batch and the tokens it computes of each, without the decodes that
    were mixed into it. From the batch: a mixed decode leaves other numbers on its request."""
    num_prefills = len(batch.reqs) - len(decodes_of(batch))
    return zip(batch.reqs[:num_prefills], batch.extend_lens[:num_prefills], strict=True)


def num_loaded(batch: Any) -> int:
    """Tokens that are loaded from host memory while a batch runs: begun when it was built."""
    if batch.hicache_consumer_index < 0:
        return 0
    loads = batch.tree_cache.cache_controller.ack_load_queue
    return int(loads[-1].num_tokens) if loads else 0


def shape_of(batch: Any) -> BatchShape:
    """What the time of a batch depends on; valid from when the batch was built until it ran."""
    if batch.forward_mode.is_decode():
        return BatchShape(decodes=batch.seq_lens_cpu.tolist())
    number = num_prefills(batch)
    return BatchShape(
        prefills=[
            Prefill(new, cached)
            for new, cached in zip(
                batch.extend_lens[:number], batch.prefix_lens[:number], strict=True
            )
        ],
        decodes=[cached + 1 for cached in batch.prefix_lens[number:]],
        num_loaded=num_loaded(batch),
    )


def runs_model(batch: Any) -> bool:
    """Whether there is anything in it to compute."""
    return not (batch.forward_mode.is_idle() or batch.forward_mode.is_prebuilt())


def is_idle(scheduler: Any) -> bool:
    """Whether the scheduler had nothing to run before the iteration that it launches."""
    return bool(scheduler._sched_idled)


def wait_for(scheduler: Any, result: Any) -> None:
    """Return once the device has a result ready."""
    event = getattr(result, "copy_done", None)
    if event is not None:
        event.synchronize()
    elif not runs_on_cpu(scheduler):
        # Without the overlap scheduler nothing has waited for the device yet.
        torch.get_device_module(scheduler.device).current_stream().synchronize()


def created_s(req: Any) -> float:
    """When it came to the server, by the clock of `time.perf_counter`; 0.0: nobody said [s]."""
    return float(req.time_stats.created_time)


def is_done(result: Any) -> bool:
    """Whether the device has a result ready, as far as an event tells."""
    event = getattr(result, "copy_done", None)
    return event is not None and bool(event.query())


def under_way(scheduler: Any) -> list[Any]:
    """Requests that run. Those that decode beside a prefill are in its batch, and in the running
    batch again only after it."""
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch]
    reqs = {req.rid: req for batch in batches for req in batch.reqs if not req.finished()}
    return list(reqs.values())


def in_flight(scheduler: Any) -> list[Any]:
    """The same with an unfinished prefill and what was launched last, whatever schedules."""
    reqs = scheduler.collect_inflight_reqs() | {scheduler.chunked_req}
    for batch, _ in getattr(scheduler, "result_queue", ()):  # under the overlap scheduler
        reqs.update(batch.reqs)
    return [req for req in reqs if req is not None and not req.finished()]


# --- Steps of the scheduler that cosched takes in its place ---


GRAMMAR_LIMIT_S = 20.0
"""Longest that a request waits for its grammar to be compiled [s]."""

_GRAMMAR_POLL_S = 1e-4
_MOST_GRAMMARS = 256


def admit_ready_grammars(scheduler: Any, now_s: float) -> None:
    """Queue requests whose grammar is compiled now, so that the plan sees them.

    Grammars are compiled on other threads. Stock SGLang waits up to 5 ms for them in every
    iteration of all requests, for up to 10,000 iterations, and keeps every grammar that it has
    compiled. Here an iteration does not wait, a request does for `GRAMMAR_LIMIT_S`, and the cache
    loses its oldest grammar when it is full.
    """
    manager = scheduler.grammar_manager
    if not manager.has_waiting_grammars():
        return
    manager.SGLANG_GRAMMAR_POLL_INTERVAL = _GRAMMAR_POLL_S
    manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = sys.maxsize
    for req in manager.grammar_queue:
        if not hasattr(req, "cosched_grammar_s"):
            req.cosched_grammar_s = now_s
        elif now_s - req.cosched_grammar_s > GRAMMAR_LIMIT_S:
            req.grammar_wait_ct = sys.maxsize
    for req in manager.get_ready_grammar_requests():
        scheduler._add_request_to_queue(req)
    # Not `reset`: that waits for the grammars that are being compiled.
    cache = manager.grammar_backend.cache
    while len(cache) > _MOST_GRAMMARS:
        del cache[next(iter(cache))]


def drain_results(scheduler: Any) -> bool:
    """Process the results that the overlap scheduler still has in flight. True when there were any.

    `last_batch` is cleared, as SGLang does itself when it pauses, so that the event loop does not
    wait for these results again.
    """
    if not (scheduler.enable_overlap and scheduler.last_batch and scheduler.result_queue):
        return False
    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = None
    return True


def put_back(scheduler: Any, req: Any) -> None:
    """Queue a running request again whose memory was given back."""
    req.reset_for_retract()
    scheduler._add_request_to_queue(req, is_retracted=True)


def take_out_unanswered(scheduler: Any, req: Any) -> None:
    """Take a waiting request out of the queue and drop what caches and beams keep for it."""
    scheduler.waiting_queue.remove(req)
    scheduler._release_aborted_request(req)
    scheduler.beam_coordinator.retire_group(req)


def is_queued(scheduler: Any, req: Any) -> bool:
    """Whether a request is in the waiting queue."""
    return req in scheduler.waiting_queue


def error_answer(req: Any, status: HTTPStatus, message: str) -> Any:
    """The message that answers a request with an error; `send_abort` sends it."""
    reason = {"type": "abort", "status_code": status, "message": message}
    return _make_abort_req(req, finished_reason=reason)


def end_with_error(scheduler: Any, req: Any, status: HTTPStatus, message: str) -> None:
    """Have a request that runs, or is in the middle of its prefill, end with an error after the
    iteration under way."""
    if req is scheduler.chunked_req:
        scheduler._pending_chunked_abort_req = req
    req.to_finish = FINISH_ABORT(message, status)
