"""What the cost models get wrong: ``python -m cosched.latency.report --data-dir DIR``.

DIR is the folder of the data sets (it holds ``profiles/``), or that of the kernel tables alone.
Prints tables for people and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cosched.errors import CoschedError
from cosched.latency import checks
from cosched.latency.attention import ContextTable, GenerationTable
from cosched.latency.base import CostModel
from cosched.latency.capacity import kv_capacity_tokens
from cosched.latency.gemm import AllReduceTable, GemmTable
from cosched.latency.held_out import ErrorSummary, HeldOutError, MeasuredTable, held_out_error
from cosched.latency.profile_file import MeasuredPoint
from cosched.latency.profile_model import ProfileModel
from cosched.latency.registry import make_cost_model
from cosched.latency.specs import GPUS, MODELS, GpuSpec
from cosched.latency.tables import (
    find_tables,
    read_allreduce,
    read_context_attention,
    read_gemm,
    read_generation_attention,
)

_GPUS = ("A100-80", "H100", "H200")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cosched.latency.report", description=__doc__)
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
    versions = {"cosched": version("cosched"), "numpy": version("numpy")}
    print(json.dumps({"config": config, "versions": versions, "results": results}))
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
        batches = checks.typical_batches(seed=seed, num=600, max_kv_tokens=capacity)
        roofline = make_cost_model("roofline", model=model, gpu=name)
        ratios |= {
            f"{name} {kind}": error
            for kind, error in checks.roofline_ratio(roofline, table, batches).items()
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
        "chunks over a cached prefix": checks.cached_prefix,
        "mixed batches": checks.mixed_batches,
        "uneven decodes": checks.skewed_decodes,
        "GEMMs of other measurements": checks.gemms,
    }
    for title, check in sections.items():
        try:
            _print_errors(title, check(profiles), results)
        except FileNotFoundError as error:
            print(f"\n{title}: left out, no {error.filename}")
    try:
        slopes = checks.kv_reading(profiles, tables["H200"])
        print("\nreading KV in decode, H200 [ns per token of KV]: predicted, measured")
        for context, (predicted, measured) in slopes.items():
            print(f"  {context:<34}{predicted * 1e9:>7.1f}  {measured * 1e9:.1f}")
        results["kv reading"] = slopes
        fixed, slope = checks.cpu_overhead(profiles)
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
