"""What cosched uses inside SGLang beside the seams, and the check that it exists. Without the check
a missing name would be an AttributeError in the middle of a request, or stay unnoticed."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain

from cosched.errors import SeamError
from cosched_patches.seam import running_on

INTERNALS: Mapping[str, tuple[str, ...]] = {
    f"sglang.srt.{target}": tuple(names.split())
    for target, names in {
        "managers.scheduler.Scheduler": """
            _add_request_to_queue _collect_inflight_batches _pending_chunked_abort_req
            _prefetch_kvcache _release_aborted_request _sched_idled attn_dp_enabled
            attn_tp_cpu_group beam_coordinator chunked_prefill_size chunked_req
            collect_inflight_reqs cur_batch_for_debug device disagg_decode_prealloc_queue
            disagg_decode_transfer_queue dllm_config enable_hicache_storage
            enable_hierarchical_cache enable_hisparse enable_lmcache enable_lora enable_overlap
            forward_stream get_num_allocatable_reqs grammar_manager ipc_channels is_generation
            is_hybrid_ssm is_hybrid_swa is_mixed_chunk last_batch last_mbs load_inquirer
            max_loras_per_batch max_prefill_tokens max_queued_requests max_req_input_len max_req_len
            max_running_requests max_total_num_tokens mbs metrics_collector_context model_config
            new_token_ratio_tracker output_streamer page_size pool_stats_observer pp_group
            prefill_delayer process_batch_result req_to_token_pool result_queue running_batch
            running_mbs send_abort_output server_args spec_algorithm token_to_kv_pool_allocator
            tp_cpu_group tree_cache truncation_align_size waiting_queue
        """,
        "managers.schedule_policy.PrefillAdder": """
            _select_prefill_admission add_chunked_req add_one_req can_run_list ceil_paged_tokens
            chunked_req_limit is_hybrid_ssm_cache new_chunked_req rem_chunk_tokens tree_cache
        """,
        "managers.schedule_batch.ScheduleBatch": """
            batch_is_full check_decode_mem chunked_req decoding_reqs device extend_lens filter_batch
            forward_mode hicache_consumer_index input_ids is_empty is_extend_in_batch merge_batch
            multimodal_inputs
            orig_seq_lens out_cache_loc prefix_lens release_req req_pool_indices
            req_pool_indices_cpu req_to_token_pool reqs return_logprob sampling_info seq_lens
            seq_lens_cpu seq_lens_sum spec_algorithm spec_info tree_cache
        """,
        "managers.schedule_batch.Req": """
            _compute_max_prefix_len _stop_match_tail_len beam_group cache_salt cached_tokens
            customized_info extra_key finished finished_len finished_reason grammar grammar_key
            grammar_wait_ct
            inflight_middle_chunks input_embeds kv last_node lock lora_id multimodal_inputs
            origin_input_ids
            output_ids positional_embed_overrides prefix_len priority reset_for_retract
            retraction_count return_logprob rid sampling_params seqlen session time_stats to_finish
            tokenizer
        """,
        "managers.schedule_batch.MultimodalInputs": "mm_items",
        "managers.schedule_batch.MultimodalDataItem": """
            hash is_audio modality offsets precomputed_embeddings
        """,
        "mem_cache.multimodal_cache.MultiModalStaticCache": "combine_hashes has",
        "constrained.base_grammar_backend.BaseGrammarBackend": "cache executor",
        "constrained.grammar_manager.GrammarManager": """
            SGLANG_GRAMMAR_MAX_POLL_ITERATIONS SGLANG_GRAMMAR_POLL_INTERVAL grammar_backend
            grammar_queue has_waiting_grammars
        """,
        "constrained.xgrammar_backend.XGrammarGrammarBackend": "_tokenizer_info grammar_compiler",
        "managers.tokenizer_manager.TokenizerManager": """
            _dispatch_to_scheduler _handle_abort_req is_pause is_pause_cond model_update_lock
            rid_to_state set_internal_state
        """,
        "utils.aio_rwlock.RWLock": """
            _cond _lock _readers _waiting_writers _writer_active release_reader
        """,
        "disaggregation.decode.DecodePreallocQueue": "queue retracted_queue",
        "distributed.parallel_state.GroupCoordinator": """
            is_last_rank rank_in_group recv_object send_object
        """,
        "mem_cache.memory_pool.ReqToTokenPool": "req_generation req_to_token write",
        "mem_cache.memory_pool.HybridReqToTokenPool": """
            mamba_allocator mamba_ckpt_pool mamba_initial_tracking_slots
        """,
        "mem_cache.allocator.mamba.MambaSlotAllocator": """
            alloc_group_end free schedulable_available_size size
        """,
        "mem_cache.base_prefix_cache.DecLockRefParams": "skipped_lock_components",
        "mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore": """
            _can_reclaim_full_host_duplicate _evict_host_leaf _new_node _node_arena
            _ongoing_insert_walk_state _register_node _release_full_host_duplicate _split_node
            _unevict_node_on_insert _unregister_node _update_duplicate_tracking
            _update_evictable_leaf_sets begin_insert commit_backup commit_load_back
            component_evictable_size_ component_protected_size_ component_types dec_full_pin
            dec_lock_ref demote drive_host_eviction drop_subtree_no_host evict_device_end
            evict_device_leaf evict_device_next_node evict_device_start evictable_device_leaves
            evictable_host_leaves full_host_duplicates get_component_device_value inc_full_pin
            inc_lock_ref is_eagle is_write_back match_full_device_prefix match_prefix page_size
            reset resume_insert root_node swa_tombstone_ranges
        """,
        "mem_cache.unified_cache.unified_tree_core.UnifiedTreeNode": """
            children component_data id key parent
        """,
        "sampling.sampling_batch_info.SamplingBatchInfo": "penalizer_orchestrator",
        "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator": """
            batch device is_required penalizers
        """,
        "sampling.penaltylib.orchestrator._BatchedPenalizer": "_orchestrator_ref is_prepared",
        "sampling.penaltylib.frequency_penalty.BatchedFrequencyPenalizer": """
            cumulated_frequency_penalties frequency_penalties
        """,
        "sampling.penaltylib.presence_penalty.BatchedPresencePenalizer": """
            cumulated_presence_penalties presence_penalties
        """,
        "sampling.penaltylib.repetition_penalty.BatchedRepetitionPenalizer": """
            cumulated_repetition_penalties repetition_penalties
        """,
        "sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer": "len_output_tokens",
        "mem_cache.unified_radix_cache.UnifiedRadixCache": """
            _execute_and_commit_kv_backup cache_controller dec_lock_ref disable enable_storage
            evict_for_alloc evictable_size flush_pending_backups has_free_load_back_slot
            host_memory_mode inc_lock_ref load_back load_back_threshold lock mamba_evictable_size
            mamba_protected_size
            match_prefix ongoing_load_back ongoing_write_through page_size protected_size
            ready_to_load_host_cache req_to_token_pool root_node_handle session
            sliding_window_size supports_mamba supports_swa swa_evictable_size swa_retain_window
            token_to_kv_pool_allocator touch_prefix tree_components tree_core unlock writing_check
        """,
        "mem_cache.allocator.swa.SWATokenToKVPoolAllocator": """
            full_available_size size_swa swa_available_size
        """,
        "mem_cache.swa_memory_pool.SWAKVPool": "layers_mapping translate_loc_from_full_to_swa",
        "session.streaming_session.StreamingSession": "slots",
        "layers.attention.base_attn_backend.AttentionBackend": """
            forward_decode forward_extend init_cuda_graph_state init_forward_metadata
            init_forward_metadata_out_graph
        """,
        "mem_cache.memory_pool.MHATokenToKVPool": """
            _init_kv_copy_and_warmup _kv_copy_config get_key_buffer get_kv_buffer get_value_buffer
            move_kv_cache set_kv_buffer use_native_move_kv_cache
        """,
        "mem_cache.base_prefix_cache.MatchResult": "device_prefix_len",
        "managers.cache_controller.HiCacheController": """
            ack_load_queue l2_transfer_engine load_queue mem_pool_host start_loading
        """,
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator": """
            _kvcache alloc_decode alloc_extend available_size clear device evict_to_free_tokens
            free_page_ids free_pages free_segments page_size
        """,
    }.items()
}
"""Class -> its methods and attributes that ``cosched/engine`` uses."""


def check_internals(internals: Mapping[str, tuple[str, ...]]) -> None:
    """SeamError names the first class that lacks something, and what it lacks."""
    for target, names in internals.items():
        try:
            owner = pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            raise SeamError(f"SGLang's {target} is gone ({error}). {running_on()}") from None
        gone = [name for name in names if not _has(owner, name)]
        if gone:
            raise SeamError(
                f"SGLang's {target} has no {', '.join(gone)}, which cosched uses. {running_on()}"
            )
    _parsed.cache_clear()  # the syntax trees are large


def _has(owner: type, name: str) -> bool:
    """Whether its objects have the attribute: a method, a field, or what a method of it or of a
    base class assigns to ``self``."""
    return hasattr(owner, name) or any(name in _fields(base) for base in owner.__mro__)


@cache
def _fields(base: type) -> frozenset[str]:
    names = set(inspect.get_annotations(base))
    try:
        nodes = [_parsed(base.__module__)]
    except (KeyError, OSError, TypeError):  # built in, or made without a file
        return frozenset(names)
    for part in base.__qualname__.replace(".<locals>", "").split("."):
        nodes = [found for node in nodes for found in _defined_in(node, part)]
    for node in chain.from_iterable(map(ast.walk, nodes)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return frozenset(names)


@cache
def _parsed(module: str) -> ast.AST:
    """Cached, because `inspect.getsource` of a class parses the whole file."""
    return ast.parse(inspect.getsource(sys.modules[module]))


def _defined_in(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """The classes and functions of that name in a node, without nested ones."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _defined_in(child, name)
        elif child.name == name:
            yield child
