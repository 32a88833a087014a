"""Prefill attention on a CPU that computes what is asked for and no more.

SGLang's `torch_native` backend pads the queries of every row of a prefill batch to the whole
sequence and throws the padding away. So the last 100 tokens behind a cached prefix of 500 cost as
much as all 600, and so does each decode that shares the batch with a prefill (mixed chunks): with
16 such decodes an iteration takes ten times as long as it should. No GPU backend does that, so on a
CPU it would hide what scheduling policies differ in. Every server that cosched starts on a CPU uses
this one, whatever the policy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend", "install"]


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


def install() -> None:
    """Replace the prefill attention of SGLang's `torch_native` backend. Idempotent."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    original = Backend._run_sdpa_forward_extend
    if not getattr(original, "computes_new_tokens_only", False):
        Backend._run_sdpa_forward_extend = _replacement(original)


def _replacement(original: Any) -> Any:
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
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or is_cross_attn or not causal or windowed:
            result: torch.Tensor = original(
                self,
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
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
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[begin:end] = out.movedim(0, 1)
            begin = end
        return output

    run.computes_new_tokens_only = True  # type: ignore[attr-defined]
    return run
