"""The sizes for which SGLang captures CUDA graphs by default.

``tests/lab/simulation/test_sglang_defaults.py`` asks the installed SGLang.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from cosched.lab.cost_models.specs import GpuSpec
from cosched.predict.fitted import GraphSizes

_LARGE_GPU_BYTES = 60 << 30


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
