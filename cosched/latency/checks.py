"""The modelling assumptions against tables of other people, where those are at hand.

Each function reads one public data set and returns errors; none feeds a model. What they measure
and what came out is in docs/cost_models.md.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from cosched.core.batch import BatchShape, Prefill
from cosched.latency.attention import SKEW, ContextAttention, GenerationAttention
from cosched.latency.base import CostModel
from cosched.latency.gemm import GemmTable
from cosched.latency.held_out import ErrorSummary, summarise
from cosched.latency.specs import Gemm
from cosched.latency.tables import find_tables, read_gemm

__all__ = [
    "cached_prefix",
    "cpu_overhead",
    "gemms",
    "kv_reading",
    "mixed_batches",
    "roofline_ratio",
    "skewed_decodes",
    "typical_batches",
]

_US = 1e-6
_SIM_GPUS = ("RTX4090", "RTXPRO6000")
_Row = Mapping[str, str]


def _read(path: Path) -> Iterator[_Row]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    else:
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)


def _simulated(profiles: Path, gpu: str, table: str) -> list[_Row]:
    name = f"{gpu}_Llama-3.1-8B_bf16_tp1_{table}.csv.gz"
    return list(_read(profiles / "llmservingsim" / name))


class _Mixed:
    """LLMServingSim's attention table of one GPU (Llama-3.1-8B, vLLM's FlashAttention-2 kernel)."""

    def __init__(self, profiles: Path, gpu: str) -> None:
        self.rows = [
            (
                int(row["prefill_chunk"]),
                int(row["kv_prefill"]),
                int(row["n_decode"]),
                int(row["kv_decode"]),
                float(row["time_us"]) * _US,
            )
            for row in _simulated(profiles, gpu, "attention")
        ]
        self.context = ContextAttention(
            {(1, new): s for new, cached, n, _, s in self.rows if new and not cached and not n}
        )
        self.generation = GenerationAttention(
            {(n, context): s for new, _, n, context, s in self.rows if not new}
        )


def cached_prefix(profiles: Path) -> dict[str, ErrorSummary]:
    """Chunks over a cached prefix, predicted from whole prompts up to 2048 tokens, by GPU and by
    whether the chunk is long enough to fill the GPU."""
    errors = {}
    for gpu in _SIM_GPUS:
        table = _Mixed(profiles, gpu)
        for label, low, high in (("chunk < 300", 0, 300), ("chunk >= 300", 300, 1 << 30)):
            predicted, measured = [], []
            for new, cached, decodes, _, seconds in table.rows:
                if cached and not decodes and low <= new < high:
                    work = table.context.seconds([Prefill(new, cached)], new)
                    reading = table.generation.equal_s(1, new + cached)
                    predicted.append(max(work, reading))
                    measured.append(seconds)
            errors[f"{gpu}, {label}"] = summarise(predicted, measured)
    return errors


def mixed_batches(profiles: Path) -> dict[str, ErrorSummary]:
    """Attention of a chunk and decodes together, as the sum of both measured apart less a launch,
    by GPU and number of decodes."""
    errors = {}
    for gpu in _SIM_GPUS:
        table = _Mixed(profiles, gpu)
        apart = {(new, cached): s for new, cached, n, _, s in table.rows if new and not n}
        alone = {(n, context): s for new, _, n, context, s in table.rows if not new}
        for label, low, high in (("1 to 8 decodes", 1, 8), ("16 to 128 decodes", 16, 128)):
            predicted, measured = [], []
            for new, cached, n, context, seconds in table.rows:
                if new and low <= n <= high and (new, cached) in apart and (n, context) in alone:
                    parts = apart[new, cached] + alone[n, context]
                    predicted.append(parts - table.generation.floor_s)
                    measured.append(seconds)
            errors[f"{gpu}, {label}"] = summarise(predicted, measured)
    return errors


def skewed_decodes(profiles: Path) -> dict[str, ErrorSummary]:
    """Pure decodes of uneven contexts, from the measured times at their mean and their maximum."""
    errors = {}
    for gpu in _SIM_GPUS:
        rows = [row for row in _simulated(profiles, gpu, "skew") if row["regime"] == "pure"]
        measured = [float(row["t_skew_us"]) for row in rows]
        mean = [float(row["t_mean_us"]) for row in rows]
        longest = [float(row["t_max_us"]) for row in rows]
        errors[f"{gpu}, mean alone"] = summarise(mean, measured)
        moved = [low + SKEW * (high - low) for low, high in zip(mean, longest, strict=True)]
        errors[f"{gpu}, mean moved by {SKEW}"] = summarise(moved, measured)
    return errors


def gemms(profiles: Path) -> dict[str, ErrorSummary]:
    """GEMMs of Llama-3 8B as Vidur (A100) and LLMServingSim's first version (H100) measured them,
    predicted from the kernel tables; up to 8192 tokens."""
    shapes = {
        "attn_pre_proj": Gemm("qkv", 6144, 4096),
        "attn_post_proj": Gemm("o", 4096, 4096),
        "mlp_up_proj": Gemm("gate_up", 28672, 4096),
        "mlp_down_proj": Gemm("down", 4096, 14336),
    }
    a100 = [
        (shape, float(row["num_tokens"]), float(row[f"time_stats.{op}.median"]) * 1e-3)
        for row in _read(profiles / "vidur" / "a100_Meta-Llama-3-8B_mlp.csv.gz")
        if row["num_tensor_parallel_workers"] == "1" and int(row["num_tokens"]) <= 8192
        for op, shape in shapes.items()
    ]
    layers = {
        "o_proj": Gemm("o", 4096, 4096),
        "gate_proj": Gemm("gate", 14336, 4096),
        "down_proj": Gemm("down", 4096, 14336),
        "lm_head": Gemm("lm_head", 128256, 4096),
    }
    h100 = [
        (layers[row["layer_name"]], float(row["input"]), float(row["latency(ns)"]) * 1e-9)
        for row in _read(profiles / "llmservingsim" / "v0_H100_Llama-3.1-8B_tp1_layers.csv.gz")
        if row["layer_name"] in layers
    ]
    errors = {}
    for gpu, points in (("a100_sxm", a100), ("h100_sxm", h100)):
        table = GemmTable(read_gemm(find_tables(profiles, gpu).gemm))
        for name in dict.fromkeys(shape.name for shape, _, _ in points):
            chosen = [point for point in points if point[0].name == name]
            shape = chosen[0][0]
            tokens = np.array([m for _, m, _ in chosen])
            predicted = table.seconds(shape.n, shape.k, tokens).tolist()
            errors[f"{gpu} {name}"] = summarise(predicted, [s for _, _, s in chosen])
    return errors


def kv_reading(profiles: Path, model: CostModel) -> dict[str, tuple[float, float]]:
    """(predicted, measured) growth of a decode iteration per token of KV [s], by context length:
    NVIDIA Dynamo's sweep of Llama-3.1-8B on an H200, whose KV cache is bfloat16 though its weights
    are not. `model` must be that model on an H200. Points of more than 1000 requests are left out:
    the sweep asks for them, the engine ran fewer at a time."""
    points: dict[int, list[tuple[float, float]]] = {}
    for row in _read(profiles / "dynamo_h200_llama31_8b_fp8_decode.csv"):
        context = int(float(row["y_context_length"]))
        kv_tokens = float(row["x_kv_usage"]) * float(row["max_kv_tokens"])
        if kv_tokens > 1000 * context:
            continue
        points.setdefault(context, []).append((kv_tokens, float(row["z_itl"]) * 1e-3))
    slopes = {}
    for context, measured in points.items():
        few, many = measured[1], measured[-1]
        predicted = [
            model.iteration_s(BatchShape(decodes=[context] * max(1, round(kv / context))))
            for kv, _ in (few, many)
        ]
        tokens = many[0] - few[0]
        slopes[f"{context} tokens"] = (
            (predicted[1] - predicted[0]) / tokens,
            (many[1] - few[1]) / tokens,
        )
    return slopes


def cpu_overhead(profiles: Path, model: str = "meta-llama/Llama-2-7b-hf") -> tuple[float, float]:
    """(fixed, per sequence) CPU time of an iteration [s], fitted to Vidur's measurements."""
    parts = (
        "schedule_mean",
        "prepare_inputs_launch_mean",
        "model_execution_launch_mean",
        "sampler_launch_mean",
        "process_model_outputs_mean",
    )
    points = [
        (float(row["batch_size"]), sum(float(row[part]) for part in parts) * 1e-3)
        for row in _read(profiles / "vidur" / "a100_cpu_overheads.csv.gz")
        if row["model_name"] == model and row["tensor_parallel_degree"] == "1"
    ]
    batch_sizes, seconds = np.array(points).T
    slope, fixed = np.polyfit(batch_sizes, seconds, 1)
    return float(fixed), float(slope)


def typical_batches(*, seed: int, num: int, max_kv_tokens: int) -> list[BatchShape]:
    """Batches as a co-serving replica runs them: 0 to 256 decodes, 0 to 3 prefill chunks."""
    rng = np.random.default_rng(seed)
    batches: list[BatchShape] = []
    while len(batches) < num:
        num_decodes = int(rng.choice([0, 1, 8, 32, 64, 128, 256]))
        num_prefills = int(rng.choice([0, 1, 1, 2, 3]))
        mean = min(float(rng.choice([128, 512, 2048, 8192])), max_kv_tokens / max(num_decodes, 1))
        decodes = [1 + int(context) for context in rng.exponential(mean, num_decodes)]
        prefills = [
            Prefill(int(rng.choice([16, 64, 256, 512, 2048])), int(rng.choice([0, 0, 512, 8192])))
            for _ in range(num_prefills)
        ]
        if decodes or prefills:
            batches.append(BatchShape(prefills=prefills, decodes=decodes))
    return batches


def roofline_ratio(
    roofline: CostModel, table: CostModel, batches: list[BatchShape]
) -> dict[str, ErrorSummary]:
    """The roofline against the tables, by kind of batch."""
    kinds: dict[str, Callable[[BatchShape], bool]] = {
        "prefill": lambda batch: not batch.decodes,
        "decode": lambda batch: not batch.prefills,
        "mixed": lambda batch: bool(batch.prefills and batch.decodes),
    }
    return {
        kind: summarise(
            [roofline.iteration_s(batch) for batch in batches if of_kind(batch)],
            [table.iteration_s(batch) for batch in batches if of_kind(batch)],
        )
        for kind, of_kind in kinds.items()
    }
