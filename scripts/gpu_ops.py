"""The compiled kernels that a Llama needs of SGLang, in Triton, for GPUs without `sgl_kernel`.

`install()` before anything of SGLang's is imported: it puts a stand-in for `sgl_kernel` on the
import path, as cosched does on machines without a GPU, and lets SGLang compute all other fused
operators in torch. Each kernel here is one launch, as SGLang's own are, so that the host time of a
layer stays comparable. Not for serving.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(
    x, residual, weight, out, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * width + at, values.to(residual.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + at, (values * scale * weights).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _silu_and_mul(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    positions,
    q,
    k,
    cache,
    q_stride,
    k_stride,
    NUM_Q: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    position = tl.load(positions + token)
    cos = tl.load(cache + position * 2 * HALF + at).to(tl.float32)
    sin = tl.load(cache + position * 2 * HALF + HALF + at).to(tl.float32)
    if head < NUM_Q:
        first = q + token * q_stride + head * SIZE + at
    else:
        first = k + token * k_stride + (head - NUM_Q) * SIZE + at
    one = tl.load(first).to(tl.float32)
    other = tl.load(first + HALF).to(tl.float32)
    tl.store(first, (one * cos - other * sin).to(q.dtype.element_ty))
    tl.store(first + HALF, (other * cos + one * sin).to(q.dtype.element_ty))


@triton.jit
def _store(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    slot = tl.load(slots + token).to(tl.int64)
    tl.store(
        k_cache + slot * WIDTH + at, tl.load(k + token * k_stride + at, mask=inside), mask=inside
    )
    tl.store(
        v_cache + slot * WIDTH + at, tl.load(v + token * v_stride + at, mask=inside), mask=inside
    )


def rms_norm(norm: Any, x: Any, residual: Any = None, post_residual_addition: Any = None) -> Any:
    """In place of `RMSNorm.forward_native`. Adds to `residual` in place."""
    assert post_residual_addition is None
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    _rms_norm[(x.numel() // width,)](
        x,
        x if residual is None else residual,
        norm.weight,
        out,
        width,
        norm.variance_epsilon,
        HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return out if residual is None else (out, residual)


def silu_and_mul(op: Any, x: Any) -> Any:
    """In place of `SiluAndMul.forward_native`."""
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_and_mul[(x.numel() // (2 * width), triton.cdiv(width, block))](x, out, width, BLOCK=block)
    return out


def rotate(
    rope: Any,
    positions: Any,
    query: Any,
    key: Any,
    offsets: Any = None,
    fused_set_kv_buffer_arg: Any = None,
) -> Any:
    """In place of `RotaryEmbedding.forward_native`: whole heads, NeoX style, in place."""
    assert fused_set_kv_buffer_arg is None and rope.is_neox_style
    assert rope.rotary_dim == rope.head_size
    size, num_tokens = rope.head_size, positions.shape[0]
    num_q, num_k = query.numel() // num_tokens // size, key.numel() // num_tokens // size
    _rotate[(num_tokens, num_q + num_k)](
        positions,
        query,
        key,
        rope.cos_sin_cache,
        query.stride(0),
        key.stride(0),
        NUM_Q=num_q,
        SIZE=size,
        HALF=size // 2,
        num_warps=1,
    )
    return query, key


def store_cache(k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any, **sizes: Any) -> None:
    """In place of SGLang's, for keys as wide as values."""
    width = k.shape[-1]
    _store[(len(indices),)](
        k,
        v,
        k_cache,
        v_cache,
        indices,
        k.stride(0),
        v.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )


def weak_reference(tensor: Any) -> Any:
    """A tensor on the same memory that does not keep it. For captured segments of graphs."""
    if not tensor.is_cuda:
        return tensor
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
    )
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
        {
            "nbytes": tensor.untyped_storage().nbytes(),
            "data_ptr": tensor.untyped_storage().data_ptr(),
            "size": tensor.shape,
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "storage_offset": tensor.storage_offset(),
        },
        storage,
    )


def install() -> None:
    """Idempotent."""
    os.environ.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
    from cosched import bootstrap

    bootstrap._install_kernel_stand_in()
    import sgl_kernel
    import sgl_kernel.utils

    sgl_kernel.weak_ref_tensor = weak_reference
    sgl_kernel.utils.is_arch_support_pdl = lambda: False
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.dual_gemm import DualGemm
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.mem_cache import memory_pool

    DualGemm._select_mode = lambda *layers: None  # of CuTe
    RMSNorm.forward_native = rms_norm
    SiluAndMul.forward_native = silu_and_mul
    RotaryEmbedding.forward_native = rotate
    memory_pool.can_use_store_cache = lambda *sizes: True
    memory_pool.store_cache = store_cache


def use_flash_attention(folder: Path) -> None:
    """After `install`: FlashAttention-3 of an sglang-kernel release, of whose wheel `folder` has
    ``flash_ops.abi3.so`` and ``flash_attn.py``. A release built for the torch that is installed."""
    import sgl_kernel
    import sgl_kernel.debug_utils

    sgl_kernel.debug_utils.maybe_wrap_debug_kernel = lambda function: function
    torch.ops.load_library(str(folder / "flash_ops.abi3.so"))
    name = "sgl_kernel.flash_attn"
    spec = importlib.util.spec_from_file_location(name, folder / "flash_attn.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with_cache = module.flash_attn_with_kvcache
    # SGLang 0.5.23 knows a newer one.
    module.flash_attn_with_kvcache = lambda *args, only_qv=False, **options: with_cache(
        *args, **options
    )
    sys.modules[name] = sgl_kernel.flash_attn = module
