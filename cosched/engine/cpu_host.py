"""Host memory (HiCache) without a GPU.

SGLang copies KV between a device and pinned host memory with GPU kernels; on its CPU engine
``--enable-hierarchical-cache`` fails for want of them. Here the memory is not pinned and the copies
are plain torch. Everything around them is SGLang's own: queues, events (done as soon as recorded),
locks, layer by layer.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["install"]


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


def install() -> None:
    """Replace what allocates and copies in SGLang's host pool of ordinary attention (MHA).
    Idempotent."""
    from sglang.srt.mem_cache.pool_host import common, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    pool = mha.MHATokenToKVPoolHost
    for name, function in (
        ("load_to_device_per_layer", _load),
        ("backup_from_device_all_layer", _back_up),
    ):
        assert hasattr(pool, name), f"sglang's host pool has no {name}"
        setattr(pool, name, function)
