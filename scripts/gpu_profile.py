#!/usr/bin/env python3
"""Times and bandwidth of the shared-prefix kernels on this GPU beside SGLang's, the parameters of
the picker, and the error of the cost models.

    scripts/gpu_profile.py --out DIR                 # some minutes on a GPU
    scripts/gpu_profile.py --device cpu --out DIR    # tiny shapes in Triton's interpreter

Decodes over one or several documents, and mixed batches. Of each shape:

  attend, reduce    our two kernels; `ours` is both, as a layer launches them
  shared            SGLang's Triton kernels on the same slots; of these `stage 2` weighs the splits
  distinct          the same where every request has a copy of its document: what the cache of the
                    device does for shared slots is the difference
  of the bound      time that each KV token takes once at the bandwidth of a copy, over ours

Then the model of the device that fits these times, and how often the picker is right with it and
with data sheets; and what the cost models of the simulator assume (`--gpu` names the GPU as they
do): the L2 speed-up of stock attention, the overhead of reading once, and their attention times.

DIR gets profile.jsonl (line by line, as it goes), profile.json, profile.md (rows for
docs/results) and picker.json, which `shared_prefix.device_model` of the configuration reads.
On a CPU SGLang's kernels run under TRITON_INTERPRET=1 only; else they are left out, and so is
picker.json. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_kernels
import numpy as np
import torch
from gpu_kernels import (
    LLAMA_8B,
    SHAPES,
    SMALL,
    Card,
    Rows,
    Shape,
    Work,
    copy_bandwidth,
    seconds,
    stock_module,
)

from cosched.core.batch import BatchShape
from cosched.lab.cost_models.cost_model import L2_SPEEDUP, ONCE_OVERHEAD, PrefixReads
from cosched.lab.cost_models.roofline import RooflineModel
from cosched.lab.cost_models.specs import GPUS, MODELS
from cosched.versions import versions
from cosched_kernels.groups import Groups, Shared, groups_of
from cosched_kernels.interpret import is_interpreting
from cosched_kernels.picker import DeviceModel, Measured, fitted, gain_s, write_model
from cosched_kernels.plan import HeadShape, Plan, bytes_moved, make_plan

MODEL = "Llama-3.1-8B"
TINY = Shape(batch=2, documents=1, prefix=24, suffix=5)
FEW_SHAPES = [Shape(batch=b, documents=1, prefix=p) for b in (8, 32) for p in (1000, 10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A chunk of a prompt beside decodes. is_one: all decode on one document, else each has its
    own. context: tokens of each before its new ones."""

    chunk: int
    decodes: int
    context: int
    is_one: bool


MIXED = [
    Mixed(chunk=512, decodes=decodes, context=context, is_one=is_one)
    for decodes, context in ((32, 1000), (32, 10_000), (64, 4000))
    for is_one in (True, False)
]


class Case(NamedTuple):
    """A batch that was timed, and how long a layer took here and in the other backend [s]."""

    groups: Groups
    plan: Plan
    num_queries: Any
    seq_lens: Any
    ours_s: float
    other_s: float


class MixedWork:
    """The tensors of a mixed batch, the chunk first; it reads nothing before itself."""

    def __init__(self, mixed: Mixed, heads: HeadShape, card: Card, dtype: torch.dtype) -> None:
        self.heads = heads
        self.new = np.array([mixed.chunk] + [1] * mixed.decodes)
        self.cached = np.array([0] + [mixed.context] * mixed.decodes)
        requests = [Shared(namespace=None, tokens=np.zeros(0, int), length=0)]
        rows, num_slots = [np.arange(mixed.chunk)], mixed.chunk
        for index in range(mixed.decodes):
            tokens = np.full(mixed.context, 0 if mixed.is_one else index)
            requests.append(Shared(namespace=None, tokens=tokens, length=mixed.context))
            if index == 0 or not mixed.is_one:
                document = num_slots + np.arange(mixed.context)
                num_slots += mixed.context
            rows.append(np.append(document, num_slots))
            num_slots += 1
        self.groups = groups_of(requests)
        lengths = self.new + self.cached
        table = torch.zeros((len(rows), int(lengths.max())), dtype=torch.int32)
        order = torch.randperm(num_slots).to(torch.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = order[torch.from_numpy(row)]
        self.req_to_token = table.to(card.device)
        self.pool_rows = torch.arange(len(rows), device=card.device)
        size = (num_slots, heads.num_kv_heads, heads.head_dim)
        self.k, self.v = (torch.randn(size, dtype=dtype, device=card.device) for _ in range(2))
        num_tokens = int(self.new.sum())
        shape = num_tokens, heads.num_q_heads, heads.head_dim
        self.q = torch.randn(shape, dtype=dtype, device=card.device)
        self.out = torch.empty_like(self.q)
        self.plan = make_plan(
            self.groups,
            num_queries=self.new,
            seq_lens=lengths,
            heads=heads,
            tiling=card.tiling(heads),
        )
        self.tensors = card.upload(self.plan, heads, dtype)

    def run(self) -> None:
        kernels = gpu_kernels.shared_prefix
        kernels.attend_items(
            self.q,
            self.k,
            self.v,
            out=self.out,
            plan=self.tensors,
            req_to_token=self.req_to_token,
            pool_rows=self.pool_rows,
            scale=self.heads.head_dim**-0.5,
        )
        kernels.reduce_pieces(out=self.out, plan=self.tensors)

    def stock(self, out: torch.Tensor) -> Callable[[], None]:
        """What launches SGLang's Triton kernel for prefills and mixed batches."""
        extend = stock_module("extend_attention")
        device = self.q.device

        def sums(counts: Any) -> torch.Tensor:
            return torch.from_numpy(np.append(0, np.cumsum(counts))).to(device, torch.int32)

        new_slots, cached_slots = [], []
        for row, cached, new in zip(self.req_to_token, self.cached, self.new, strict=True):
            cached_slots.append(row[:cached])
            new_slots.append(row[cached : cached + new])
        slots = torch.cat(new_slots).long()
        return partial(
            extend.extend_attention_fwd,
            self.q,
            self.k[slots],
            self.v[slots],
            out,
            self.k,
            self.v,
            sums(self.new),
            sums(self.cached),
            torch.cat(cached_slots).long(),
            None,
            True,
            None,
            int(self.new.max()),
            1.0,
            1.0,
        )


class Profile:
    """Measures shape by shape; `rows` is all that was found."""

    def __init__(
        self, card: Card, *, num_layers: int, note: Callable[[dict[str, Any]], None]
    ) -> None:
        self.card = card
        self.num_layers = num_layers if card.is_gpu else 1
        self.heads = LLAMA_8B if card.is_gpu else SMALL
        self.dtype = torch.bfloat16 if card.is_gpu else torch.float32
        if not card.is_gpu:
            self.heads = replace(self.heads, kv_bytes=4, q_bytes=4)
        self.has_stock = card.is_gpu or is_interpreting()
        self.note = note
        self.times: list[tuple[Shape, Measured]] = []
        self.cases: list[Case] = []

    def decodes(self, shape: Shape) -> None:
        row = {"step": "decode", **asdict(shape)}
        plan = groups = None
        for distinct in (False, True):
            try:
                work = Work(
                    shape,
                    self.heads,
                    self.dtype,
                    self.card.device,
                    distinct=distinct,
                    num_layers=self.num_layers,
                )
            except torch.OutOfMemoryError:
                continue
            if distinct and self.has_stock:
                row["distinct_us"] = self._us(work.run_stock())
            if not distinct:
                groups, plan = work.groups(), work.plan(self.card.tiling(self.heads))
                tensors = self.card.upload(plan, self.heads, self.dtype)
                row["ours_us"] = self._us(partial(work.run, tensors))
                row["attend_us"] = self._us(partial(work.attend, tensors))
                row["reduce_us"] = self._us(partial(work.reduce, tensors))
                if self.has_stock:
                    row["shared_us"] = self._us(work.run_stock())
                    row["stage_2_us"] = self._us(work.run_stock(only_reduce=True))
            del work
            if self.card.is_gpu:
                torch.cuda.empty_cache()
        assert plan is not None and groups is not None
        moved = bytes_moved(plan, self.heads)
        each = shape.batch * (shape.prefix + shape.suffix) * self.heads.kv_bytes_per_token
        row |= {"bytes": moved.total, "bound_bytes": moved.kv, "each_bytes": each}
        row["bytes_per_s"] = moved.total / (row["ours_us"] * 1e-6)
        self.note(row)
        if self.has_stock:
            distinct_us = row.get("distinct_us")
            measured = Measured(
                distinct_bytes=moved.kv,
                each_bytes=each,
                piece_bytes=moved.pieces,
                ours_s=row["ours_us"] * 1e-6,
                shared_s=row["shared_us"] * 1e-6,
                distinct_s=None if distinct_us is None else distinct_us * 1e-6,
            )
            self.times.append((shape, measured))
            one = np.ones(shape.batch, dtype=np.int64)
            lengths = one * (shape.prefix + shape.suffix)
            case = Case(groups, plan, one, lengths, measured.ours_s, measured.shared_s)
            self.cases.append(case)

    def mixed(self, mixed: Mixed) -> None:
        work = MixedWork(mixed, self.heads, self.card, self.dtype)
        row: dict[str, Any] = {"step": "mixed", **asdict(mixed)}
        work.run()
        row["ours_us"] = seconds(work.run) * 1e6
        if self.has_stock:
            out = torch.empty_like(work.out)
            stock = work.stock(out)
            row["stock_us"] = seconds(stock) * 1e6
            row["apart"] = float((out.double() - work.out.double()).abs().max())
            lengths = work.new + work.cached
            ours_s, other_s = row["ours_us"] * 1e-6, row["stock_us"] * 1e-6
            self.cases.append(Case(work.groups, work.plan, work.new, lengths, ours_s, other_s))
        self.note(row)

    def _us(self, run: Callable[[], None]) -> float:
        return seconds(run) / self.num_layers * 1e6

    def picker(self, path: Path) -> None:
        """Fit the model, write it, and hold what it and data sheets pick against the times."""
        times = [measured for _, measured in self.times]
        sheets = DeviceModel().beside("triton")
        model = fitted(times, sheets)
        origin = f"scripts/gpu_profile, {len(times)} shapes, {MODEL}"
        write_model(path, model, device_name=self.card.name, origin=origin)
        row: dict[str, Any] = {"step": "picker", "model": asdict(model), "shapes": len(self.cases)}
        for name, device in (("fitted", model), ("sheets", sheets)):
            right, lost_us = 0, [0.0]
            for case in self.cases:
                gain = gain_s(
                    case.groups,
                    case.plan,
                    num_queries=case.num_queries,
                    seq_lens=case.seq_lens,
                    heads=self.heads,
                    device=device,
                )
                picked = case.ours_s if gain > 0 else case.other_s
                best = min(case.ours_s, case.other_s)
                right += picked == best
                lost_us.append((picked - best) * 1e6)
            row |= {f"{name}_right": right, f"{name}_worst_loss_us": max(lost_us)}
        self.note(row)

    def latency(self, gpu: str) -> None:
        """What the simulator's cost model assumes of attention, against the times."""
        speedups, overheads, ratios = [], [], dict[str, list[float]]()
        for shape, measured in self.times:
            if measured.distinct_s is None:
                continue
            once_s = measured.distinct_s * measured.distinct_bytes / measured.each_bytes
            overheads.append(measured.ours_s / once_s)
            if measured.shared_s > once_s:
                speedups.append((measured.distinct_s - once_s) / (measured.shared_s - once_s))
            found = {"each": measured.distinct_s, "cached": measured.shared_s}
            for name, seconds_ in (found | {"once": measured.ours_s}).items():
                model_s = modelled_s(shape, gpu, PrefixReads(name))
                ratios.setdefault(name, []).append(seconds_ / model_s)
        if not overheads:
            return
        row: dict[str, Any] = {"step": "latency", "gpu": gpu, "shapes": len(overheads)}
        row["once_overhead"] = {"assumed": ONCE_OVERHEAD, "measured": statistics.median(overheads)}
        if speedups:
            row["l2_speedup"] = {"assumed": L2_SPEEDUP, "measured": statistics.median(speedups)}
        row["measured_over_roofline"] = {
            name: {"median": statistics.median(v), "least": min(v), "most": max(v)}
            for name, v in ratios.items()
        }
        self.note(row)


def modelled_s(shape: Shape, gpu: str, reads: PrefixReads) -> float:
    """A layer's decode attention by the simulator's roofline [s]: an iteration less one whose
    contexts are of one token."""
    model = RooflineModel(model=MODELS[MODEL], gpu=GPUS[gpu], prefix_reads=reads)
    contexts = [shape.prefix + shape.suffix] * shape.batch
    num_repeated = (shape.batch - min(shape.documents, shape.batch)) * shape.prefix
    full = model.iteration_s(BatchShape(decodes=contexts, num_repeated=num_repeated))
    least = model.iteration_s(BatchShape(decodes=[1] * shape.batch))
    return (full - least) / MODELS[MODEL].num_layers


def markdown(rows: list[dict[str, Any]], device: str) -> str:
    """The rows for docs/results."""

    def cell(value: object) -> str:
        return f"{value:.1f}" if isinstance(value, float) else "" if value is None else str(value)

    copy = next((row["bytes_per_s"] for row in rows if row["step"] == "copy"), None)
    lines = [f"Measured on {device} with `scripts/gpu_profile.py`, one layer of {MODEL}, us.", ""]
    names = ("attend_us", "reduce_us", "ours_us", "shared_us", "stage_2_us", "distinct_us")
    lines += [
        "| batch | documents | prefix | attend | reduce | ours | shared | stage 2 | distinct "
        "| GB/s | of the bound |",
        "|" + "---|" * 11,
    ]
    for row in rows:
        if row["step"] == "decode":
            share = row["bound_bytes"] / copy / (row["ours_us"] * 1e-6) if copy else None
            values = [row[name] for name in ("batch", "documents", "prefix")]
            values += [row.get(name) for name in names]
            values += [row["bytes_per_s"] / 1e9, f"{share:.0%}" if share is not None else None]
            lines.append("| " + " | ".join(map(cell, values)) + " |")
    lines += [
        "",
        "| chunk | decodes | context | one document | ours | stock Triton |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        if row["step"] == "mixed":
            values = [row[name] for name in ("chunk", "decodes", "context")]
            values += ["yes" if row["is_one"] else "no", row["ours_us"], row.get("stock_us")]
            lines.append("| " + " | ".join(map(cell, values)) + " |")
    for row in rows:
        if row["step"] in ("picker", "latency"):
            lines += ["", f"`{json.dumps({k: v for k, v in row.items() if k != 'step'})}`"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_profile"), help="(%(default)s)")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="H200", help="(%(default)s)")
    parser.add_argument(
        "--layers",
        type=int,
        default=4,
        help="with KV of their own, so none is cached (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a few shapes only")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_profile: torch sees no CUDA GPU; --device cpu runs tiny shapes without one")
    torch.manual_seed(args.seed)
    card = Card(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(args.out / "profile.jsonl")
    profile = Profile(card, num_layers=args.layers, note=rows.note)
    if card.is_gpu:
        rows.note(copy_bandwidth(card))
    shapes = FEW_SHAPES if args.quick else SHAPES
    for shape in shapes if card.is_gpu else [TINY]:
        profile.decodes(shape)
    tiny = Mixed(chunk=5, decodes=2, context=20, is_one=True)
    for mixed in MIXED if card.is_gpu else [tiny]:
        profile.mixed(mixed)
    if profile.cases:
        profile.picker(args.out / "picker.json")
        profile.latency(args.gpu)
    config = {"gpu": args.gpu, "layers": args.layers, "quick": args.quick, "seed": args.seed}
    result = {
        "device": card.name,
        "config": config,
        "versions": versions("torch"),
        "rows": rows.all,
    }
    (args.out / "profile.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "profile.md").write_text(markdown(rows.all, card.name))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
