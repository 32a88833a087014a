#!/usr/bin/env python3
"""The attention kernels on a GPU: correctness, times, and the prefix from which sharing is faster.

    scripts/gpu_kernels.py             # minutes on a GPU; writes gpu_kernels.jsonl as it goes
    scripts/gpu_kernels.py --on cpu    # the same steps as far as they go without one

1. *copy*: bandwidth of memory.
2. *check*: outputs in bf16 and fp16 against float64, in memory filled with NaN.
3. *time*: decodes over one or several documents: our kernels, and SGLang's Triton kernels on the
   same slots and on distinct slots, which shows what the cache of the device does for a shared
   prefix. A CUDA graph spans the KV of several layers, so that no layer finds its KV in the cache.
4. *crossover*: for each batch, the prefix from which ours is faster.

Without a GPU, 2 runs in Triton's interpreter on small shapes, and 3 counts bytes instead of time.
SGLang is needed for its own kernels only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from cosched.versions import versions
from cosched_kernels import shared_prefix
from cosched_kernels.buffers import PlanTensors, upload
from cosched_kernels.groups import Groups, Shared, groups_of
from cosched_kernels.plan import HeadShape, Plan, Tiling, bytes_moved, make_plan
from cosched_kernels.shared_prefix import tiles_for

LLAMA_8B = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=128)
SMALL = HeadShape(num_q_heads=4, num_kv_heads=1, head_dim=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`batch` decodes over `documents` documents of `prefix` tokens, each with `suffix` of its
    own."""

    batch: int
    documents: int
    prefix: int
    suffix: int = 200


SHAPES = [
    Shape(batch=batch, documents=documents, prefix=prefix)
    for batch in (8, 16, 32, 64)
    for documents in (1, 4)
    for prefix in (500, 1000, 2000, 4000, 10_000, 32_000)
]


class Work:
    """The tensors of a shape. distinct: every request has its own copy of its document's KV."""

    def __init__(
        self,
        shape: Shape,
        heads: HeadShape,
        dtype: torch.dtype,
        device: str,
        *,
        distinct: bool,
        num_layers: int,
    ) -> None:
        self.shape, self.heads = shape, heads
        length, batch = shape.prefix + shape.suffix, shape.batch
        copies = batch if distinct else shape.documents
        num_slots = copies * shape.prefix + batch * shape.suffix
        rows = torch.empty((batch, length), dtype=torch.int32)
        order = torch.randperm(num_slots).to(torch.int32)
        for index in range(batch):
            copy = index if distinct else index % shape.documents
            rows[index, : shape.prefix] = order[copy * shape.prefix : (copy + 1) * shape.prefix]
            begin = copies * shape.prefix + index * shape.suffix
            rows[index, shape.prefix :] = order[begin : begin + shape.suffix]
        self.req_to_token = rows.to(device)
        self.pool_rows = torch.arange(batch, device=device)
        size = (num_slots, heads.num_kv_heads, heads.head_dim)
        self.layers = [
            tuple(torch.randn(size, dtype=dtype, device=device) for _ in range(2))
            for _ in range(num_layers)
        ]
        self.q = torch.randn(batch, heads.num_q_heads, heads.head_dim, dtype=dtype, device=device)
        self.out = torch.full_like(self.q, float("nan"))
        self.scale = heads.head_dim**-0.5

    def groups(self) -> Groups:
        shape = self.shape
        documents = [np.full(shape.prefix, index) for index in range(shape.documents)]
        requests = [
            Shared(namespace=None, tokens=documents[i % shape.documents], length=shape.prefix)
            for i in range(shape.batch)
        ]
        return groups_of(requests)

    def plan(self, tiling: Tiling) -> Plan:
        shape = self.shape
        return make_plan(
            self.groups(),
            num_queries=np.ones(shape.batch, dtype=np.int64),
            seq_lens=np.full(shape.batch, shape.prefix + shape.suffix),
            heads=self.heads,
            tiling=tiling,
        )

    def run(self, plan: PlanTensors) -> None:
        """Ours, all layers."""
        for layer in self.layers:
            self.attend(plan, [layer])
            shared_prefix.reduce_pieces(out=self.out, plan=plan)

    def attend(
        self, plan: PlanTensors, layers: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> None:
        """The items alone; of all layers, or of these."""
        for k, v in self.layers if layers is None else layers:
            shared_prefix.attend_items(
                self.q,
                k,
                v,
                out=self.out,
                plan=plan,
                req_to_token=self.req_to_token,
                pool_rows=self.pool_rows,
                scale=self.scale,
            )

    def reduce(self, plan: PlanTensors) -> None:
        """The weighing of pieces alone, as often as there are layers."""
        for _ in self.layers:
            shared_prefix.reduce_pieces(out=self.out, plan=plan)

    def run_stock(self, *, only_reduce: bool = False) -> Callable[[], None]:
        """What launches SGLang's Triton decode attention, all layers. only_reduce: its second
        kernel alone, which weighs the splits."""
        decode = stock_module("decode_attention")
        batch, max_splits, device = self.shape.batch, 16, self.q.device
        length = self.shape.prefix + self.shape.suffix
        indptr = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
        indices = self.req_to_token.reshape(-1).to(torch.int64)
        logits = torch.empty(
            (batch, self.heads.num_q_heads, max_splits, self.heads.head_dim), device=device
        )
        lse = torch.empty((batch, self.heads.num_q_heads, max_splits), device=device)
        splits = torch.full((batch,), max_splits, dtype=torch.int32, device=device)

        def reduce() -> None:
            for _, v in self.layers:
                decode._decode_softmax_reducev_fwd(
                    logits, lse, self.q, self.out, 1.0, v, indptr, splits, max_splits
                )

        def run() -> None:
            for k, v in self.layers:
                decode.decode_attention_fwd(
                    self.q,
                    k,
                    v,
                    self.out,
                    indptr,
                    indices,
                    logits,
                    lse,
                    splits,
                    max_splits,
                    self.scale,
                    1.0,
                    1.0,
                )

        return reduce if only_reduce else run

    def reference(self) -> torch.Tensor:
        """Attention over the last layer, in float64."""
        k, v = self.layers[-1]
        group = self.heads.group
        result = torch.empty(self.q.shape, dtype=torch.float64, device=self.q.device)
        for index, slots in enumerate(self.req_to_token.long()):
            keys = k[slots].double().repeat_interleave(group, dim=1)
            values = v[slots].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,shd->hs", self.q[index].double(), keys) * self.scale
            result[index] = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
        return result


def stock_module(name: str) -> ModuleType:
    """One of SGLang's files of Triton attention kernels, wherever this version has them."""
    import cosched.bootstrap  # noqa: F401  # a stand-in for sgl_kernel where there is none

    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(f"sglang.kernels.ops.attention.{name}")
    return importlib.import_module(f"sglang.srt.layers.attention.triton_ops.{name}")


def seconds(run: Callable[[], None], *, repeat: int = 20) -> float:
    """Of one call, replayed from a CUDA graph. Without a GPU: of the first call."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeat


class Card:
    """The device, and how plans are cut for it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_gpu = device == "cuda"
        self.num_sms = 1
        self.name = "CPU"
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(0)
            self.num_sms, self.name = properties.multi_processor_count, properties.name

    def tiling(self, heads: HeadShape) -> Tiling:
        return Tiling(rows=tuple(tiles_for(heads.head_dim)), programs=max(1, self.num_sms // 2))

    def upload(self, plan: Plan, heads: HeadShape, dtype: torch.dtype) -> PlanTensors:
        tensors = upload(plan, heads, device=self.device, dtype=dtype, num_programs=self.num_sms)
        tensors.pieces.fill_(float("nan"))
        tensors.weights.fill_(float("nan"))
        return tensors


def copy_bandwidth(card: Card) -> dict[str, Any]:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    once = seconds(lambda: target.copy_(source))
    return {"step": "copy", "bytes_per_s": 2 * source.numel() / once}


def check(card: Card, shape: Shape, heads: HeadShape, dtype: torch.dtype) -> dict[str, Any]:
    work = Work(shape, heads, dtype, card.device, distinct=False, num_layers=1)
    work.run(card.upload(work.plan(card.tiling(heads)), heads, dtype))
    error = float((work.out.double() - work.reference()).abs().max())
    limit = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    # A NaN is no number below the limit either.
    assert error <= limit, f"{shape} {heads} {dtype}: off by {error}, more than {limit}"
    return {"step": "check", "dtype": str(dtype), "head_dim": heads.head_dim, "error": error}


def times(card: Card, shape: Shape, heads: HeadShape, num_layers: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": "time",
        "batch": shape.batch,
        "documents": shape.documents,
        "prefix": shape.prefix,
    }
    dtype = torch.bfloat16
    if not card.is_gpu:
        small = Work(shape, heads, torch.float32, card.device, distinct=False, num_layers=1)
        moved = bytes_moved(small.plan(card.tiling(heads)), heads)
        return row | {"kv_bytes": moved.kv, "bytes": moved.total}
    for distinct in (False, True):
        try:
            work = Work(shape, heads, dtype, card.device, distinct=distinct, num_layers=num_layers)
        except torch.OutOfMemoryError:
            continue
        stock = seconds(work.run_stock()) / num_layers
        row["stock_distinct_us" if distinct else "stock_shared_us"] = stock * 1e6
        if not distinct:
            plan = work.plan(card.tiling(heads))
            tensors = card.upload(plan, heads, dtype)
            ours = seconds(partial(work.run, tensors)) / num_layers
            moved = bytes_moved(plan, heads)
            row |= {"ours_us": ours * 1e6, "bytes": moved.total, "bytes_per_s": moved.total / ours}
        del work
        torch.cuda.empty_cache()
    return row


def crossover(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Batch and documents -> the shortest prefix from which on ours is always faster; None: it is
    not at the longest."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "ours_us" in row:
            series.setdefault(f"{row['batch']} over {row['documents']}", []).append(row)
    found: dict[str, int | None] = {}
    for name, times_of in series.items():
        found[name] = None
        for row in sorted(times_of, key=lambda row: -row["prefix"]):
            if row["ours_us"] >= row["stock_shared_us"]:
                break
            found[name] = row["prefix"]
    return {"step": "crossover", "prefix": found}


class Rows:
    """Rows of results, which are printed and written to a file as JSON lines at once."""

    def __init__(self, path: Path) -> None:
        self.all: list[dict[str, Any]] = []
        self._file = path.open("w")

    def note(self, row: dict[str, Any]) -> None:
        self.all.append(row)
        print(json.dumps(row), file=self._file, flush=True)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_kernels.jsonl"))
    parser.add_argument("--layers", type=int, default=4, help="layers with KV of their own")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.on == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_kernels: torch sees no CUDA GPU; --on cpu runs what goes without one")
    torch.manual_seed(args.seed)
    card = Card(args.on)
    rows = Rows(args.out)
    if card.is_gpu:
        rows.note(copy_bandwidth(card))
        for head_dim in (64, 96, 128, 256):
            heads = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=head_dim)
            for dtype in (torch.float16, torch.bfloat16):
                rows.note(check(card, Shape(batch=37, documents=3, prefix=3000), heads, dtype))
        for shape in SHAPES:
            rows.note(times(card, shape, LLAMA_8B, args.layers))
        rows.note(crossover(rows.all))
    else:
        tiny = Shape(batch=3, documents=1, prefix=40, suffix=5)
        for dtype in (torch.float32, torch.float16):
            rows.note(check(card, tiny, SMALL, dtype))
        rows.note(times(card, tiny, SMALL, 1))
    config = {"layers": args.layers, "seed": args.seed, "on": args.on}
    result = {
        "device": card.name,
        "config": config,
        "versions": versions("triton"),
        "rows": rows.all,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
