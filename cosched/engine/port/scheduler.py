"""The scheduler: its limits, what is set when cosched takes over, steps of its loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.managers.scheduler_components.dp_attn import exchange_sync_rows
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec

from cosched.core.caps import EngineCaps
from cosched.engine.port.read_once import reads_once
from cosched.predict.fitted import GraphSizes

# --- Limits ---


class Parallel(NamedTuple):
    """Of this process.

    tp_rank     its place among the ranks that share a waiting queue
    tp_size     number of these
    dp_rank     number of the replica, or of the rank of DP attention; None: there is one
    group_size  ranks of DP attention, which step together; 1: it is off
    stage       of the pipeline
    num_stages  each computes a part of the layers; 1: there is no pipeline
    """

    tp_rank: int
    tp_size: int
    dp_rank: int | None
    group_size: int
    stage: int
    num_stages: int

    @property
    def plans(self) -> bool:
        """This rank plans for all that share its waiting queue."""
        return self.tp_rank == 0 and self.stage == 0

    @property
    def is_alone(self) -> bool:
        """No other rank runs the same batches."""
        return self.tp_size == 1 and self.num_stages == 1


def caps_of(scheduler: Any) -> EngineCaps:
    """The limits of a scheduler. Read once."""
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
        shared_prefix=reads_once() and scheduler.spec_algorithm.is_none(),
        decode_reserve=1 if scheduler.spec_algorithm.is_none() else get_alloc_reserve_per_decode(),
        takes_turns=parallel().group_size > 1
        and not scheduler.spec_algorithm.is_none()
        and not envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get(),
    )


def drafts_per_decode() -> int:
    """Tokens that a decode verifies beside its own; 0 without speculative decoding."""
    return int(get_spec().speculative_num_draft_tokens or 1) - 1


def can_split(scheduler: Any) -> bool:
    """Whether a part of the running batch can decode: requests must have no state besides rows and
    tokens."""
    return (
        scheduler.is_generation
        and scheduler.spec_algorithm.is_none()
        and not scheduler.enable_hisparse
        and scheduler.dllm_config is None
        and not scheduler.model_config.is_encoder_decoder
    )


def longest_prompt(scheduler: Any) -> int:
    """Longest prompt that the engine accepts [tokens]."""
    return int(scheduler.max_req_input_len) - 1


def graph_sizes_of(scheduler: Any) -> GraphSizes | None:
    """The sizes that batches are padded to for CUDA graphs; None: there are no graphs."""
    config = get_exec().graph.cuda_graph_config
    if scheduler.device == "cpu" or config is None:
        return None

    def sizes(phase: Any) -> tuple[int, ...]:
        return () if phase.backend == "disabled" else tuple(sorted(phase.bs or ()))

    graphs = GraphSizes(prefill=sizes(config.prefill), decode=sizes(config.decode))
    return graphs if graphs.prefill or graphs.decode else None


def parallel() -> Parallel:
    """Of this process, after SGLang has set it up."""
    groups = get_parallel()
    stages = groups.pp_rank, groups.pp_size
    if groups.attn_dp_size > 1:
        ranks = groups.attn_tp_rank, groups.attn_tp_size
        return Parallel(*ranks, groups.attn_dp_rank, groups.attn_dp_size, *stages)
    return Parallel(groups.tp_rank, groups.tp_size, groups.dp_rank, 1, *stages)


def num_local_schedulers(scheduler: Any) -> int:
    """Schedulers that share this machine: ranks, and replicas."""
    args = scheduler.server_args
    num_ranks: int = max(1, args.tp_size * args.pp_size // args.nnodes)
    return num_ranks if args.enable_dp_attention else num_ranks * int(args.dp_size)


def rank_group(scheduler: Any) -> Any:
    """The CPU process group of the ranks that share a waiting queue."""
    shared = scheduler.attn_tp_cpu_group if parallel().group_size > 1 else scheduler.tp_cpu_group
    return shared


def exchange(scheduler: Any, numbers: Sequence[float]) -> list[list[float]]:
    """The numbers of each rank of DP attention; all ranks call it equally often."""
    groups = get_parallel()
    rows = torch.empty(groups.tp_size, len(numbers), dtype=torch.float64)
    own = torch.tensor(numbers, dtype=torch.float64)
    exchange_sync_rows(rows.view(-1), own, scheduler.tp_cpu_group)
    first: list[list[float]] = rows[:: groups.attn_tp_size].tolist()
    return first


def runs_on_cpu(scheduler: Any) -> bool:
    """Whether a forward pass is done when its call returns."""
    return bool(scheduler.device == "cpu")


def overlaps(scheduler: Any) -> bool:
    """Whether an iteration is planned while the previous one runs."""
    return bool(scheduler.enable_overlap)


def waits_alone(scheduler: Any) -> bool:
    """Whether no other replica or pipeline stage runs in lockstep with this scheduler."""
    args = scheduler.server_args
    is_whole = args.disaggregation_mode == "null" and args.pp_size == 1
    return is_whole and not scheduler.attn_dp_enabled


def searches_host(scheduler: Any) -> bool:
    """Whether lookups use SGLang's full search, which also finds KV in host memory. It marks what
    it finds as used, so not with several ranks, of which only one plans: their trees would
    differ."""
    return bool(scheduler.enable_hierarchical_cache) and parallel().is_alone


def reads_storage(scheduler: Any) -> bool:
    """Whether there is a storage of KV below host memory."""
    return bool(scheduler.enable_hicache_storage or scheduler.enable_lmcache)


def read_storage(scheduler: Any, req: Any) -> None:
    """Begin to load what the storage has of a waiting request into host memory."""
    scheduler._prefetch_kvcache(req)


def metric_labels(scheduler: Any) -> Mapping[str, Any] | None:
    """Labels of SGLang's metrics of this scheduler; None: it has no metrics."""
    context = scheduler.metrics_collector_context
    return context.collector.labels if context.current_scheduler_metrics_enabled else None


# --- Set when cosched takes over ---


def leave_a_page(scheduler: Any) -> None:
    """Lower SGLang's limit of a request's length by the page that its `PrefillAdder` also asks for.
    Requests between the two limits would never be admitted and block all others."""
    beyond = scheduler.max_req_len - (scheduler.max_total_num_tokens - scheduler.page_size)
    if beyond > 0:
        scheduler.max_req_len -= beyond
        scheduler.max_req_input_len -= beyond


def mix_only_decodes(scheduler: Any) -> None:
    """Do not mix batches of models that do not generate: SGLang assumes that they do."""
    if not scheduler.is_generation:
        scheduler.is_mixed_chunk = False


class WaitingTotal(NamedTuple):
    """All waiting requests as one, for load reports."""

    seqlen: int
    num_matched_prefix_tokens: int = 0
    cache_request_handle: None = None  # 0.5.23 asks what its storage would find of it


def drop_prefill_delayer(scheduler: Any) -> None:
    """With DP attention, SGLang's own agreement of the ranks about prefills."""
    scheduler.prefill_delayer = None


def report_waiting(scheduler: Any, waiting: Any) -> None:
    """Let load reports read the waiting requests from `waiting`."""
    # The inquirer is a frozen dataclass of callables.
    object.__setattr__(scheduler.load_inquirer, "get_waiting_queue", lambda: waiting)


# --- Its loop ---


def is_idle(scheduler: Any) -> bool:
    """Whether the scheduler was idle before the iteration that it launches."""
    return bool(scheduler._sched_idled)


def under_way(scheduler: Any) -> list[Any]:
    """Running requests. Those that decode in a mixed batch are only in that batch until it ends."""
    batches = [batch for batch in scheduler._collect_inflight_batches() if batch]
    reqs = {req.rid: req for batch in batches for req in batch.reqs if not req.finished()}
    return list(reqs.values())


def in_flight(scheduler: Any) -> list[Any]:
    """The same, with the unfinished prefill and the latest launch. Also without a controller."""
    reqs = scheduler.collect_inflight_reqs() | {scheduler.chunked_req}
    for batch, _ in getattr(scheduler, "result_queue", ()):  # under the overlap scheduler
        reqs.update(batch.reqs)
    return [req for req in reqs if req is not None and not req.finished()]


def admit_ready_grammars(scheduler: Any) -> None:
    """Queue requests whose grammar is compiled, so that the plan includes them."""
    manager = scheduler.grammar_manager
    if manager.has_waiting_grammars():
        for req in manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)


def drain_results(scheduler: Any) -> bool:
    """Process the results that the overlap scheduler has in flight. Whether there were any.

    `last_batch` is cleared, as SGLang does when it pauses, so that the event loop does not wait for
    these results again.
    """
    if not (scheduler.enable_overlap and scheduler.last_batch and scheduler.result_queue):
        return False
    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = None
    return True


def put_back(scheduler: Any, req: Any) -> None:
    """Queue a running request whose memory was released."""
    req.reset_for_retract()
    scheduler._add_request_to_queue(req, is_retracted=True)


def take_out_unanswered(scheduler: Any, req: Any) -> None:
    """Remove a waiting request from the queue, and from caches and beam groups."""
    scheduler.waiting_queue.remove(req)
    scheduler._release_aborted_request(req)
    scheduler.beam_coordinator.retire_group(req)


def is_queued(scheduler: Any, req: Any) -> bool:
    """Whether a request is in the waiting queue."""
    return req in scheduler.waiting_queue
