"""Gated delta networks (Qwen3-Next, Qwen3.5) on SGLang's CPU engine.

SGLang's CPU path calls compiled kernels that a machine without a GPU build does not have. These are
the same operations in plain torch, a loop over the tokens of each sequence: right, and slow. State
slots, their copies and checkpoints are SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.runtime_context import get_server_args
from torch.nn import functional

_CHUNK = 64
"""Tokens between two of the states that `extend` returns: SGLang's chunk."""
_ONE_TOKEN = torch.tensor([0, 1])
_FIRST = torch.tensor([0])


def gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of the decay, and the write strength, of each token and head."""
    decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _sequences(starts: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Number, first and last token of each."""
    bounds = starts.tolist()
    for number, (start, end) in enumerate(pairwise(bounds)):
        yield number, start, end


def _step(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the gated delta rule. state: [heads, value size, key size]."""
    state = state * decay.exp()[:, None, None]
    missing = (value - (state * key[:, None]).sum(-1)) * strength[:, None]
    state = state + missing[:, :, None] * key[:, None]
    return state, (state * query[:, None]).sum(-1)


def _unit(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Of unit length, and repeated for each value head."""
    x = x[0].float()
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Several tokens of each sequence; its state is updated in place. Returns the outputs, and the
    state before each chunk of `_CHUNK` tokens."""
    num_heads = v.shape[2]
    query = _unit(q, num_heads) * q.shape[-1] ** -0.5
    key, value = _unit(k, num_heads), v[0].float()
    outputs, before = torch.zeros_like(v), []
    slots = initial_state_indices.tolist()
    for number, start, end in _sequences(cu_seqlens):
        state = initial_state[slots[number]].float()
        for at in range(start, end):
            if (at - start) % _CHUNK == 0:
                before.append(state)
            state, out = _step(state, query[at], key[at], value[at], g[0, at], beta[0, at])
            outputs[0, at] = out.to(v.dtype)
        initial_state[slots[number]] = state.to(initial_state.dtype)
    return outputs, None, torch.stack(before)[None]


def decode(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """One token of each sequence; or several that are verified: the state stays as it is, and those
    after each token go into the buffer."""
    g, beta = gates(A_log, a, b, dt_bias)
    if intermediate_states_buffer is None:
        return extend(q, k, v, g, beta, initial_state_source, cu_seqlens, initial_state_indices)[0]
    assert intermediate_state_indices is not None
    outputs, rows = torch.zeros_like(v), intermediate_state_indices.tolist()
    slots = initial_state_indices.tolist()
    for number, start, end in _sequences(cu_seqlens):
        state = initial_state_source[slots[number], None].clone()
        for at in range(start, end):
            cut = slice(at, at + 1)
            one = q[:, cut], k[:, cut], v[:, cut], g[:, cut], beta[:, cut]
            outputs[:, cut] = extend(*one, state, _ONE_TOKEN, _FIRST)[0]
            intermediate_states_buffer[rows[number], at - start] = state[0]
    return outputs


def _activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return functional.silu(x) if activation in ("silu", "swish") else x


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Causal convolution of each sequence, [channels, tokens]. Its last inputs are kept in place of
    those of the tokens before."""
    width, outputs = weight.shape[1], torch.empty_like(x)
    slots, continues = cache_indices.tolist(), has_initial_state.tolist()
    for number, start, end in _sequences(query_start_loc):
        before = conv_states[slots[number], :, : width - 1]
        before = before if continues[number] else torch.zeros_like(before)
        inputs = torch.cat([before.to(x.dtype), x[:, start:end]], dim=1)
        out = functional.conv1d(inputs[None], weight[:, None], bias, groups=weight.shape[0])
        outputs[:, start:end] = _activated(out[0], activation)
        conv_states[slots[number], :, : width - 1] = inputs[:, -(width - 1) :].to(conv_states.dtype)
    return outputs


def convolve_one(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The same for one token of each sequence, [sequences, channels]; or for several that are
    verified, [sequences, channels, tokens]: the inputs kept after each go into the buffer."""
    assert conv_state_indices is not None
    number = x.shape[0]
    if intermediate_conv_window is not None:
        assert intermediate_state_indices is not None
        rows, kept = intermediate_state_indices.tolist(), conv_state[conv_state_indices.long()]
        everyone = torch.arange(number)
        outputs = []
        for step in range(x.shape[2]):
            outputs.append(convolve_one(x[:, :, step], kept, weight, bias, activation, everyone))
            intermediate_conv_window[rows, step] = kept
        return torch.stack(outputs, dim=1).transpose(1, 2)
    starts = torch.arange(number + 1)
    continues = torch.ones(number, dtype=torch.bool)
    return convolve(
        x.T, weight, bias, conv_state, starts, conv_state_indices, continues, activation
    ).T


def _keep(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mask: torch.Tensor,
    destinations: torch.Tensor,
    batch_size: int,
    **_: Any,
) -> None:
    """Copy the states of the sequences of `mask` to their checkpoints, of one layer."""
    rows = mask[:batch_size].nonzero(as_tuple=True)[0]
    source, kept = cache_indices[rows].long(), destinations[rows].long()
    conv_states[kept] = conv_states[source]
    ssm_states[kept] = ssm_states[source]


def _keep_all(conv_pool: torch.Tensor, ssm_pool: torch.Tensor, *args: Any, **options: Any) -> None:
    """The same of all layers."""
    _keep(conv_pool.transpose(0, 1), ssm_pool.transpose(0, 1), *args, **options)


def _commit(
    caches: Any,
    slots: torch.Tensor,
    steps: torch.Tensor,
    checkpoints: torch.Tensor | None,
    steps_of_checkpoints: torch.Tensor | None,
    **_: Any,
) -> None:
    """After a verification: the states after the last accepted token of each sequence, and those
    for its checkpoint (step -1: none)."""
    for kept, step in ((slots, steps), (checkpoints, steps_of_checkpoints)):
        if kept is None or step is None:
            continue
        rows = (step >= 0).nonzero(as_tuple=True)[0]
        to, at = kept[rows].long(), step[rows].long()
        caches.temporal[:, to] = caches.intermediate_ssm[:, rows, at]
        for states, windows in zip(caches.conv, caches.intermediate_conv_window, strict=True):
            states[:, to] = windows[:, rows, at]


def _norm(self: Any, x: torch.Tensor, gate: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """`FusedRMSNormGated.forward`."""
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
    activate = torch.sigmoid if self.activation == "sigmoid" else functional.silu
    return (values * self.weight.float() * activate(gate.float())).to(x.dtype)


def in_models_dtype(params: Any) -> Any:
    """Inputs of convolutions are kept as the model computes them, not in bfloat16."""
    dtype = replace(params.dtype, conv=model_config_of(get_server_args()).dtype)
    return replace(params, dtype=dtype)


def install() -> None:
    """Replace the kernels of linear attention. Idempotent."""
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        if not hasattr(torch.ops.sgl_kernel, name):  # read when the modules below are imported
            library.define(f"{name}() -> ()")
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    FusedRMSNormGated.forward = _norm
    gdn_backend.causal_conv1d_fn = convolve
    gdn_backend.causal_conv1d_update = convolve_one
    gdn_backend.fused_gdn_gating = gates
    gdn_triton.chunk_gated_delta_rule = extend
    gdn_triton.fused_sigmoid_gating_delta_rule_update = decode
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # the scheduler's, of what it tracks
    hybrid.scatter_mamba_states_after_mtp_verify = _commit
    hybrid.track_mamba_states_all_layers = _keep_all
    hybrid.track_mamba_states_if_needed = _keep
