#!/usr/bin/env python
"""What the cost models get wrong: ``scripts/cost_model_report.py --data-dir DIR``.

DIR is the folder of the data sets (it holds ``profiles/``). Tables are held against rows that they
were not given, the modelling assumptions against tables of other people, where those are at hand;
nothing here feeds a model. What came out is in docs/cost_models.md.

Prints tables for people and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from cosched.core.batch import BatchShape, Prefill
from cosched.cost_models.attention import (
    SKEW,
    ContextAttention,
    ContextTable,
    GenerationAttention,
    GenerationTable,
)
from cosched.cost_models.base import CostModel
from cosched.cost_models.capacity import kv_capacity_tokens
from cosched.cost_models.gemm import AllReduceTable, GemmTable
from cosched.cost_models.profile_model import ProfileModel
from cosched.cost_models.registry import make_cost_model
from cosched.cost_models.specs import GPUS, MODELS, Gemm, GpuSpec
from cosched.cost_models.tables import (
    find_tables,
    read_allreduce,
    read_context_attention,
    read_gemm,
    read_generation_attention,
)
from cosched.errors import ConfigError, CoschedError
from cosched.latency.profile_file import MeasuredPoint
from cosched.latency.relative_error import ErrorSummary, summarise
from cosched.versions import versions

_GPUS = ("A100-80", "H100", "H200")


_US = 1e-6
_SIM_GPUS = ("RTX4090", "RTXPRO6000")
_Row = Mapping[str, str]


class TableRow(Protocol):
    @property
    def seconds(self) -> float: ...


RowT = TypeVar("RowT", bound=TableRow)


class MeasuredTable(Protocol[RowT]):
    """A table that can be made from part of its rows.

    group(row)  what curve a row lies on: a matrix shape, a number of heads
    """

    def __init__(self, rows: Sequence[RowT]) -> None: ...
    @property
    def rows(self) -> Sequence[RowT]: ...
    def predict(self, row: RowT) -> float: ...
    def group(self, row: RowT) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """rows: rows of measured curves held out; curves: whole curves held out."""

    rows: ErrorSummary
    curves: ErrorSummary | None


def held_out_error(
    table: MeasuredTable[RowT], *, fraction: float = 0.1, seed: int = 0
) -> HeldOutError:
    """Error of a table on rows it was not given: a random `fraction` of the rows, then a random
    `fraction` of the curves. Both are harder than use: the full grid is twice as dense around a
    point as what is left here around a held-out one.

    curves is None where whole curves cannot be predicted (there are too few).
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"fraction is {fraction}; it must be in (0, 1)")
    rng = np.random.default_rng(seed)
    some_rows = (rng.random(len(table.rows)) < fraction).tolist()
    by_row = _error(table, some_rows)
    if by_row is None:
        raise ConfigError(f"no row of {len(table.rows)} can be predicted from the others")
    groups = sorted({table.group(row) for row in table.rows})
    chosen = {group for group in groups if rng.random() < fraction}
    by_curve = _error(table, [table.group(row) in chosen for row in table.rows])
    return HeldOutError(rows=by_row, curves=by_curve)


def _error(table: MeasuredTable[RowT], held: Sequence[bool]) -> ErrorSummary | None:
    """Error on the rows marked in `held` of a table of the others."""
    rest = type(table)([row for row, out in zip(table.rows, held, strict=True) if not out])
    predicted, measured = [], []
    for row, out in zip(table.rows, held, strict=True):
        if not out:
            continue
        try:
            predicted.append(rest.predict(row))
        except ConfigError:
            continue  # Nothing around it is left; a reader of the whole table would be told so.
        measured.append(row.seconds)
    return summarise(predicted, measured) if measured else None


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/cost_model_report.py", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--model", default="Llama-3.1-8B", choices=sorted(MODELS))
    parser.add_argument("--fraction", type=float, default=0.1, help="of the rows, held out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        results = _report(args.data_dir, model=args.model, fraction=args.fraction, seed=args.seed)
    except CoschedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    config = {"model": args.model, "fraction": args.fraction, "seed": args.seed}
    print(json.dumps({"config": config, "versions": versions("numpy"), "results": results}))
    return 0


def _report(data_dir: Path, *, model: str, fraction: float, seed: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    held_out: dict[str, HeldOutError] = {}
    for name in _GPUS:
        held_out |= {
            f"{name} {table}": error
            for table, error in _held_out(data_dir, GPUS[name], fraction, seed).items()
        }
    _print_errors("held-out rows", {name: error.rows for name, error in held_out.items()}, results)
    _print_errors(
        "held-out curves",
        {name: error.curves for name, error in held_out.items() if error.curves},
        results,
    )

    tables = {name: _make(model, name, data_dir) for name in _GPUS}
    ratios: dict[str, ErrorSummary] = {}
    fits: dict[str, Any] = {}
    for name, table in tables.items():
        capacity = kv_capacity_tokens(MODELS[model], GPUS[name])
        batches = typical_batches(seed=seed, num=600, max_kv_tokens=capacity)
        roofline = make_cost_model("roofline", model=model, gpu=name)
        ratios |= {
            f"{name} {kind}": error
            for kind, error in roofline_ratio(roofline, table, batches).items()
        }
        points = [MeasuredPoint(batch=batch, seconds=table.iteration_s(batch)) for batch in batches]
        fits[name] = asdict(ProfileModel.fit(points).held_out)
    _print_errors("roofline against kernel tables", ratios, results)
    print("\nprofile fitted to kernel-table iterations: held-out points, bias, mean")
    for name, fit in fits.items():
        print(f"  {name:<34}{fit['num_points']:>7}{fit['bias']:>+8.3f}{fit['mean']:>8.3f}")
    results["profile fit"] = fits

    _checks(data_dir / "profiles", tables, results)
    return results


def _make(model: str, gpu: str, data_dir: Path) -> CostModel:
    return make_cost_model("kernel-table", model=model, gpu=gpu, data_dir=data_dir)


def _held_out(
    data_dir: Path, gpu: GpuSpec, fraction: float, seed: int
) -> Mapping[str, HeldOutError]:
    paths = find_tables(data_dir, gpu.tables)

    def error(table: MeasuredTable[Any]) -> HeldOutError:
        return held_out_error(table, fraction=fraction, seed=seed)

    context = ContextTable(read_context_attention(paths.context_attention))
    generation = GenerationTable(read_generation_attention(paths.generation_attention))
    errors = {
        "gemm": error(GemmTable(read_gemm(paths.gemm))),
        "context attention": error(context),
        "generation attention": error(generation),
    }
    if paths.allreduce is not None:
        errors["all-reduce"] = error(AllReduceTable(read_allreduce(paths.allreduce)))
    return errors


def _checks(profiles: Path, tables: Mapping[str, CostModel], results: dict[str, Any]) -> None:
    """The parts for which other people's data are there; the others are named and left out."""
    sections: dict[str, Callable[[Path], dict[str, ErrorSummary]]] = {
        "chunks over a cached prefix": cached_prefix,
        "mixed batches": mixed_batches,
        "uneven decodes": skewed_decodes,
        "GEMMs of other measurements": gemms,
    }
    for title, check in sections.items():
        try:
            _print_errors(title, check(profiles), results)
        except FileNotFoundError as error:
            print(f"\n{title}: left out, no {error.filename}")
    try:
        slopes = kv_reading(profiles, tables["H200"])
        print("\nreading KV in decode, H200 [ns per token of KV]: predicted, measured")
        for context, (predicted, measured) in slopes.items():
            print(f"  {context:<34}{predicted * 1e9:>7.1f}  {measured * 1e9:.1f}")
        results["kv reading"] = slopes
        fixed, slope = cpu_overhead(profiles)
        print(
            f"\nCPU per iteration (Vidur): {fixed * 1e3:.2f} ms + {slope * 1e6:.0f} us a sequence"
        )
        results["cpu overhead"] = {"fixed_s": fixed, "per_sequence_s": slope}
    except FileNotFoundError as error:
        print(f"\nleft out, no {error.filename}")


def _print_errors(title: str, errors: Mapping[str, ErrorSummary], results: dict[str, Any]) -> None:
    print(f"\n{title}\n  {'':<34}{'points':>7}{'bias':>8}{'mean':>8}{'p50':>8}{'p99':>8}")
    for name, e in errors.items():
        print(
            f"  {name:<34}{e.num_points:>7}{e.bias:>+8.3f}{e.mean:>8.3f}{e.p50:>8.3f}{e.p99:>8.3f}"
        )
    results[title] = {name: asdict(error) for name, error in errors.items()}


if __name__ == "__main__":
    sys.exit(main())
