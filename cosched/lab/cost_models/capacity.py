"""Capacity of SGLang's KV cache in tokens."""

from __future__ import annotations

from cosched.errors import ConfigError
from cosched.lab.cost_models.graph_sizes import (
    default_chunk_tokens,
    default_max_batch,
    prefill_graph_sizes,
)
from cosched.lab.cost_models.specs import GpuSpec, ModelSpec

RUNTIME_BYTES = int(0.85 * 2**30)
"""CUDA context and libraries: of the 79.65 GiB of an H100 SGLang finds 78.81 GiB free before it
loads weights (server log in SGLang's documentation)."""


def default_mem_fraction(gpu: GpuSpec, tp: int = 1) -> float:
    """--mem-fraction-static as SGLang chooses it (`handle_gpu_memory_settings`).

    In MiB it keeps 512 + 1.5 per token of a prefill chunk + 128 per GPU + 2 per request of the
    largest decode graph + 8 per prefill graph, at least 10240 on large GPUs: 0.83 on 80 GB.
    """
    chunk_tokens = default_chunk_tokens(gpu.memory_bytes)
    reserved_mib = 512 + 1.5 * chunk_tokens + 128 * tp
    reserved_mib += 2 * default_max_batch(gpu, tp) + 8 * len(prefill_graph_sizes(chunk_tokens))
    if gpu.memory_bytes > 60 << 30:
        reserved_mib = max(reserved_mib, 10240)
    memory_mib = gpu.memory_bytes / 2**20
    return round((memory_mib - reserved_mib) / memory_mib, 3)


def kv_capacity_tokens(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int = 1,
    *,
    mem_fraction: float | None = None,
    page_size: int = 1,
) -> int:
    """Tokens that fit into SGLang's KV pool, whole pages [tokens].

    As in SGLang (`_profile_available_bytes`):

        ((memory - RUNTIME_BYTES) * mem_fraction - weights) / kv_bytes_per_token

    `mem_fraction` is --mem-fraction-static; None: SGLang's default. Llama-3.1-8B on an H100 at 0.88
    gives 445,500 here and 444,500 in the server log of SGLang's documentation.
    """
    if mem_fraction is None:
        mem_fraction = default_mem_fraction(gpu, tp)
    if not 0 < mem_fraction < 1:
        raise ConfigError(f"mem_fraction is {mem_fraction}; it must be in (0, 1)")
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; it must be at least 1")
    model.check_tp(tp)
    pool_bytes = (gpu.memory_bytes - RUNTIME_BYTES) * mem_fraction - model.weight_bytes(tp)
    num_tokens = int(pool_bytes // model.kv_bytes_per_token(tp)) // page_size * page_size
    if num_tokens <= 0:
        raise ConfigError(
            f"{model.name} leaves no room for KV cache on {tp} x {gpu.name}: "
            f"{model.weight_bytes(tp) / 2**30:.1f} GiB of weights per GPU, "
            f"{gpu.memory_bytes / 2**30:.1f} GiB of memory, mem_fraction {mem_fraction}"
        )
    return num_tokens
