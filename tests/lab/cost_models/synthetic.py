"""Kernel tables of a made-up GPU, small enough to write in a test."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from cosched.lab.cost_models.specs import GpuSpec, ModelSpec

GPU = GpuSpec(
    name="T1",
    memory_bytes=80 << 30,
    bandwidth_bytes_per_s=2e12,
    flops_per_s=400e12,
    link_bytes_per_s=300e9,
    tables="t1",
    tables_bandwidth=2e12,
)

MODEL = ModelSpec(
    name="Toy",
    num_layers=8,
    hidden=2048,
    intermediate=6000,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    vocab=20000,
)

ATTENTION = (
    "device,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,"
    "step,window_size,latency"
)
GEMM = "device,gemm_dtype,m,n,k,latency"
ALLREDUCE = "device,allreduce_dtype,num_gpus,message_size,latency,backend"
HEADS = ((2, 1), (8, 2), (16, 4), (32, 4), (16, 16))


def gemm_s(m: float, n: float, k: float) -> float:
    work = 2 * m * n * k / (0.75 * GPU.flops_per_s)
    traffic = 2 * (m * n + n * k + m * k) / (0.8 * GPU.bandwidth_bytes_per_s)
    return 2e-6 + max(work, traffic)


def context_s(batch: float, isl: float, heads: int) -> float:
    pairs = batch * isl * isl / 2
    return 8e-6 + 20e-9 * batch * isl + 4 * pairs * heads * 128 / (0.6 * GPU.flops_per_s)


def generation_s(batch: float, context: float, kv_heads: int) -> float:
    kv = batch * context * 4 * kv_heads * 128
    return 8e-6 + 0.1e-6 * batch + kv / (0.8 * GPU.bandwidth_bytes_per_s)


def write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> Path:
    text = "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_tables(folder: Path, *, noise: float = 0.0, seed: int = 0) -> Path:
    """All four tables of `GPU`, times scattered by a factor of about 1 +- noise."""
    rng = np.random.default_rng(seed)

    def ms(seconds: float) -> float:
        return seconds * 1e3 * float(np.exp(noise * rng.standard_normal()))

    sizes = [256, 1024, 2048, 4096, 8192, 16384]
    ms_grid = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    write(
        folder / "t1_any_gemm.csv.gz",
        GEMM,
        (
            ("T1", "bfloat16", m, n, k, ms(gemm_s(m, n, k)))
            for m, n, k in product(ms_grid, sizes, sizes)
        ),
    )
    lengths = [1, 16, 64, 256, 1024, 2048, 4096, 8192]
    write(
        folder / "t1_any_context_attention.csv",
        ATTENTION,
        (
            ("T1", b, x, h, kv, 128, "bfloat16", "bfloat16", 0, 0, ms(context_s(b, x, h)))
            for (h, kv), b, x in product(HEADS, [1, 2, 4, 16, 64], lengths)
            if b * x <= 32768
        ),
    )
    write(
        folder / "t1_any_generation_attention.csv",
        ATTENTION,
        (
            ("T1", b, 1, h, kv, 128, "bfloat16", "bfloat16", c - 1, 0, ms(generation_s(b, c, kv)))
            for (h, kv), b, c in product(
                HEADS, [1, 4, 16, 64, 256], [2, 16, 128, 1024, 8192, 65536]
            )
            if b * c <= 262144
        ),
    )
    write(
        folder / "t1_any_custom_allreduce.csv",
        ALLREDUCE,
        (
            ("T1", "bfloat16", gpus, size, ms(4e-6 + size * 2 / 200e9), f"sglang_{backend}")
            for gpus, size, backend in product(
                [2, 4], [128, 4096, 1 << 20, 1 << 25], ["graph", "eager"]
            )
        ),
    )
    return folder
