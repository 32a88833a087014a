"""What SGLang chooses for a GPU by default: sizes of CUDA graphs, memory of the KV cache.

``tests/lab/simulation/test_sglang_defaults.py`` asks the installed SGLang.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from cosched.errors import ConfigError
from cosched.lab.cost_models.specs import GpuSpec, ModelSpec
from cosched.predict.fitted import GraphSizes

_LARGE_GPU_BYTES = 60 << 30

RUNTIME_BYTES = int(0.85 * 2**30)
"""CUDA context and libraries: of the 79.65 GiB of an H100 SGLang finds 78.81 GiB free before it
loads weights (server log in SGLang's documentation)."""


WINDOW_POOL_RATIO = 0.8
"""SGLang's --swa-full-tokens-ratio: tokens of the KV pool of sliding windows, by those of the other
one."""


def default_graph_sizes(gpu: GpuSpec, tp: int) -> GraphSizes:
    """All of them."""
    return GraphSizes(
        prefill=tuple(prefill_graph_sizes(default_chunk_tokens(gpu.memory_bytes))),
        decode=tuple(decode_graph_sizes(default_max_batch(gpu, tp))),
    )


def default_chunk_tokens(memory_bytes: int) -> int:
    """SGLang's --chunked-prefill-size for a GPU of this memory, which is also its largest prefill
    graph [tokens]."""
    gib = memory_bytes / 2**30
    for limit_gib, num_tokens in ((20, 2048), (60, 4096), (160, 8192)):
        if gib < limit_gib:
            return num_tokens
    return 16384


def default_max_batch(gpu: GpuSpec, tp: int) -> int:
    """SGLang's largest decode graph [requests]."""
    if gpu.memory_bytes > _LARGE_GPU_BYTES:
        return 256 if tp < 4 else 512
    return 32 if tp < 4 else 160


def default_max_running(kv_tokens: int, context_length: int) -> int:
    """SGLang's --max-running-requests for such a KV pool (`resolve_max_num_reqs`) [requests]."""
    by_memory = int(kv_tokens / context_length * 512)
    return min(max(min(by_memory, 4096), 2048), kv_tokens // 2)


def prefill_graph_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens with a prefill graph; mixed batches run in them too."""
    sizes = (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, max_tokens + 1, 512),
    )
    return [size for size in sizes if size <= max_tokens]


def decode_graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes with a decode graph."""
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_batch, 32))
    return [*(size for size in sizes if size < max_batch), max_batch]


def padded_sizes(sizes: Sequence[int], largest: int) -> list[int]:
    """For each size 0..largest, the graph it runs in; itself where none is large enough."""
    padded = [0]
    for size in range(1, largest + 1):
        i = bisect_left(sizes, size)
        padded.append(sizes[i] if i < len(sizes) else size)
    return padded


def default_mem_fraction(gpu: GpuSpec, tp: int = 1) -> float:
    """--mem-fraction-static as SGLang chooses it (`handle_gpu_memory_settings`).

    In MiB it keeps 512 + 1.5 per token of a prefill chunk + 128 per GPU + 2 per request of the
    largest decode graph + 8 per prefill graph, at least 10240 on large GPUs: 0.83 on 80 GB.
    """
    chunk_tokens = default_chunk_tokens(gpu.memory_bytes)
    reserved_mib = 512 + 1.5 * chunk_tokens + 128 * tp
    reserved_mib += 2 * default_max_batch(gpu, tp) + 8 * len(prefill_graph_sizes(chunk_tokens))
    if gpu.memory_bytes > _LARGE_GPU_BYTES:
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
    # SGLang's second pool, of layers with sliding windows, holds fewer tokens.
    in_pools = 1 - (1 - WINDOW_POOL_RATIO) * model.window_layers / model.num_layers
    num_tokens = int(pool_bytes // (model.kv_bytes_per_token(tp) * in_pools))
    num_tokens = num_tokens // page_size * page_size
    if num_tokens <= 0:
        raise ConfigError(
            f"{model.name} leaves no room for KV cache on {tp} x {gpu.name}: "
            f"{model.weight_bytes(tp) / 2**30:.1f} GiB of weights per GPU, "
            f"{gpu.memory_bytes / 2**30:.1f} GiB of memory, mem_fraction {mem_fraction}"
        )
    return num_tokens
