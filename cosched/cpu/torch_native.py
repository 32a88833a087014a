"""SGLang's CPU engine: what cosched replaces in it on machines without a GPU.

Attention: the `torch_native` backend pads the queries of each prefill to the whole sequence and
drops the padding. The last 100 tokens behind a cached prefix of 500 then cost as much as 600, and
so does each decode in a mixed batch. No GPU backend does that, and it would hide the differences
between policies. `attend` computes the new tokens only, under every policy. For sliding windows
that have a KV pool of their own it also translates the slots (SGLang's backend reads those of the
other pool), and it knows attention sinks.

Host memory (HiCache): SGLang copies KV between the device and pinned host memory with GPU kernels.
Here the memory is not pinned and the copies are plain torch; queues, events, locks and the
layer-by-layer loading are SGLang's own.

DP attention: `torch_native` does not say how long a padded row is.

Speculative decoding: `cosched.cpu.lookup_drafts`. Linear attention:
`cosched.cpu.delta_net`.

``torch.compile``: SGLang compiles some operations of the sampler (repetition penalties). The first
request that needs one would stop the scheduler for seconds while it compiles. Without compilation
these operations take less than a millisecond.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cosched.bootstrap import has_cuda


def install() -> None:
    """Replace the prefill attention of SGLang's `torch_native` backend, and allocation and copies
    of its host pool for multi-head attention. Idempotent."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.mem_cache.pool_host import common, mha
    from sglang.srt.models.deepseek_common import attention_backend_handler
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.create_worker = _worker_by_lookup
    _replace_states()
    attention_backend_handler.AttentionBackendRegistry.register("torch_native", _absorbed)
    original = Backend._run_sdpa_forward_extend
    if not getattr(original, "computes_new_tokens_only", False):
        Backend._run_sdpa_forward_extend = _new_tokens_only(original)
        Backend.forward_extend = _windowed(Backend.forward_extend)
        Backend.forward_decode = _windowed(Backend.forward_decode)
    Backend.get_cpu_graph_seq_len_fill_value = _padded_length
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    pool = mha.MHATokenToKVPoolHost
    original_page = pool.get_dummy_flat_data_page
    if not getattr(original_page, "is_unpinned", False):
        pool.get_dummy_flat_data_page = _unpinned(original_page)
    for name, function in (
        ("load_to_device_per_layer", _load),
        ("backup_from_device_all_layer", _back_up),
    ):
        assert hasattr(pool, name), f"sglang's host pool has no {name}"
        setattr(pool, name, function)


def run_uncompiled(server_args: Any) -> None:
    """Ignore ``torch.compile`` in this process from now on, unless there is a GPU or the operator
    asks for compilation (``--enable-torch-compile``)."""
    if not has_cuda() and not server_args.enable_torch_compile:
        torch.compiler.set_stance("force_eager")


def _replace_states() -> None:
    """Of models with state slots, the kernels are replaced when the first pool of slots is made."""
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.mem_cache.memory_pool import MambaPool

    original = MambaPool.__init__
    if hasattr(original, "replaces_kernels"):
        return

    def init(self: Any, *args: Any, cache_params: Any, **options: Any) -> None:
        from cosched.cpu import delta_net

        delta_net.install()
        cache_params = delta_net.in_models_dtype(cache_params)
        original(self, *args, cache_params=cache_params, **options)

    init.replaces_kernels = True  # type: ignore[attr-defined]
    MambaPool.__init__ = init
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def _worker_by_lookup(algorithm: Any, server_args: Any) -> Any:
    from cosched.cpu import lookup_drafts

    lookup_drafts.install()
    return lookup_drafts.LookupWorker


# --- Attention ---


def _padded_length(backend: Any) -> int:
    """With DP attention all ranks pad their batches to the same number of rows."""
    return 1


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence: query is [heads, n, size], key and value
    are [kv heads, length, size] with n <= length; the result is like query."""
    num_queries, length = query.shape[1], key.shape[1]
    mask = None
    if 1 < num_queries < length:
        # PyTorch's own causal mask would align the first query, not the last, with its key.
        mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
    return scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=num_queries == length,
        scale=scale,
        enable_gqa=enable_gqa,
    ).squeeze(0)


def _absorbed(attention: Any, batch: Any) -> Any:
    """How a layer of latent attention (MLA) runs: over the latent KV, in prefills too."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return AttnForwardMethod.MLA


def _new_tokens_only(original: Any) -> Any:
    """`original` with `attend` for causal attention without windows."""

    def run(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        sequences = req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens
        window = options["sliding_window_size"]
        is_windowed = window is not None and window > -1
        is_causal = options["causal"] and not options["is_cross_attn"]
        if encoder_lens is not None or not is_causal or is_windowed:
            result: torch.Tensor = original(
                self, query, output, k_cache, v_cache, *sequences, encoder_lens, **options
            )
            return result
        begin = 0
        rows = torch.stack((req_pool_indices, seq_lens, extend_seq_lens), dim=1).tolist()
        for pool_index, length, num_new in rows:
            slots = req_to_token[pool_index, :length]
            end = begin + num_new
            out = attend(
                query[begin:end].movedim(0, 1),
                k_cache[slots].to(query.dtype).movedim(0, 1),
                v_cache[slots].to(query.dtype).movedim(0, 1),
                scale=options["scaling"],
                enable_gqa=options["enable_gqa"],
            )
            output[begin:end] = out.movedim(0, 1)
            begin = end
        return output

    run.computes_new_tokens_only = True  # type: ignore[attr-defined]
    return run


def attend_in_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `attend`, for grouped heads. window: tokens before its own that a query attends to, None:
    all; sinks: [heads], a logit that takes part in the softmax and has no value."""
    num_heads, num_queries, _ = query.shape
    length = key.shape[1]
    key, value = (x.repeat_interleave(num_heads // x.shape[0], dim=0) for x in (key, value))
    logits = (query @ key.transpose(1, 2)).float() * scale
    behind = torch.arange(length - num_queries, length)[:, None] - torch.arange(length)
    is_hidden = behind < 0
    if window is not None:
        is_hidden |= behind > window
    logits = logits.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, num_queries, 1)
        return (
            torch.softmax(torch.cat((logits, column), dim=2), dim=2)[..., :-1].to(value.dtype)
            @ value
        )
    return torch.softmax(logits, dim=2).to(value.dtype) @ value


def _windowed(original: Any) -> Any:
    """`original`, the attention of prefills or of decodes, with `attend_in_window` for layers whose
    KV is in the pool of sliding windows, and for those with attention sinks."""

    def forward(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        pool = self.token_to_kv_pool
        in_pool = self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        if not in_pool and sinks is None:
            result: torch.Tensor = original(
                self, q, k, v, layer, forward_batch, save_kv_cache, **options
            )
            return result
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, slots, k, v)
        window = layer.sliding_window_size
        if window is None or window < 0:
            window = None
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(len(query), layer.tp_q_head_num * layer.v_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        new = forward_batch.extend_seq_lens
        if forward_batch.forward_mode.is_decode():
            new = torch.ones_like(forward_batch.seq_lens)
        begin = 0
        rows = torch.stack((forward_batch.req_pool_indices, forward_batch.seq_lens, new), dim=1)
        for pool_index, length, num_new in rows.tolist():
            first = 0 if window is None else max(length - num_new - window, 0)
            slots = self.req_to_token_pool.req_to_token[pool_index, first:length]
            if in_pool:
                slots = pool.translate_loc_from_full_to_swa(slots)
            end = begin + num_new
            out = attend_in_window(
                query[begin:end].movedim(0, 1),
                keys[slots].to(query.dtype).movedim(0, 1),
                values[slots].to(query.dtype).movedim(0, 1),
                scale=layer.scaling,
                window=window,
                sinks=sinks,
            )
            output[begin:end] = out.movedim(0, 1).flatten(1)
            begin = end
        return output

    return forward


# --- Host memory ---


def _allocate(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    buffer: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return buffer


def _unpinned(original: Any) -> Any:
    """Of the method that makes a page for reads from a storage."""

    def make_page(pool: Any) -> torch.Tensor:
        pool.pin_memory = False
        page: torch.Tensor = original(pool)
        return page

    make_page.is_unpinned = True  # type: ignore[attr-defined]
    return make_page


def _check_layout(pool: Any) -> None:
    if pool.layout not in ("layer_first", "page_first"):
        raise NotImplementedError(
            f"--hicache-mem-layout {pool.layout} needs a GPU; on a CPU: layer_first, page_first"
        )


def _load(
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy one layer's keys and values of these slots from the host."""
    _check_layout(pool)
    pool.device_k_buffers[layer_id][device_indices] = pool.k_data_refs[layer_id][host_indices]
    pool.device_v_buffers[layer_id][device_indices] = pool.v_data_refs[layer_id][host_indices]


def _back_up(
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str,
) -> None:
    """Copy all layers' keys and values of these slots to the host."""
    _check_layout(pool)
    device = (*pool.device_k_buffers, *pool.device_v_buffers)
    for source, copy in zip(device, pool.host_kv_data_refs, strict=True):
        copy[host_indices] = source[device_indices]
