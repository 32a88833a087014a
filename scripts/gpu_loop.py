#!/usr/bin/env python3
"""SGLang's loop and cosched's on one GPU: what the simulator assumes of a card, measured.

    scripts/gpu_loop.py --out DIR                    # some eight minutes on a GPU
    scripts/gpu_loop.py --out DIR kernels engine     # some parts of it
    scripts/gpu_loop.py --out DIR --device cpu       # tiny, to see that it runs

The model has the shape of Llama-3.1-8B and dummy weights. Each part is a process of its own with a
limit on its time, and writes each result as it comes:

  kernels   one layer: decode attention, a chunk alone, both in one call as SGLang's Triton backend
            mixes them, and the linear layers of an iteration; from these the factor that
            `cosched simulate --mixed-decode-factor` takes
  engine    the same for whole iterations of cosched's scheduler, and host times of a launch and of
            a layer
  cosched   chats alone, planned at the last moment and early, then beside a batch
  stock     the same chats under SGLang's scheduler
  host      copies to the device from pageable and pinned memory behind a busy device, and the
            longest fit of the predictor
  sweep     the shared-prefix kernels: programs, splits and block sizes
  replies   two layers under deterministic inference: with preemptions, stock's replies

SGLang's fused operators run in torch, and the four that a Llama needs in Triton (`gpu_ops`), so
that no compiled `sgl_kernel` is needed. Attention is Triton's; FlashAttention-3 with
`--flash-attention`. DIR gets loop.jsonl, loop.md and a log of each part. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_engines
import torch
from gpu_engines import LLAMA, TINY, Run

from cosched.wire import OFFLINE_PRIORITY

PARTS = {"kernels": 75, "engine": 120, "cosched": 130, "stock": 100}
PARTS |= {"host": 40, "sweep": 90, "replies": 120}
"""Part -> the most time it may take [s]."""


def kernels(run: Run) -> None:
    from gpu_kernels import LLAMA_8B, SMALL, Card, Shape, Work, copy_bandwidth, seconds
    from gpu_profile import Mixed, MixedWork

    card = Card(run.device)
    heads = SMALL if run.is_tiny else LLAMA_8B
    dtype = torch.bfloat16 if run.is_gpu else torch.float32
    num_layers = LLAMA["num_hidden_layers"]
    if run.is_gpu and not run.is_tiny:
        with run.step("copy"):
            run.note("copy", **{k: v for k, v in copy_bandwidth(card).items() if k != "step"})
    linear: dict[int, float] = {}
    with run.step("linear"):
        config = LLAMA | TINY if run.is_tiny else LLAMA
        sizes = {num for num, _, _ in run.mixes} | gpu_engines.prefill_sizes(run)
        linear = linear_s(config, sorted(sizes), run.device, dtype)
        for size, time_s in linear.items():
            run.note("linear", tokens=size, ms=time_s * 1e3)

    def call(work: Any) -> Callable[[], Any]:
        if run.flash is not None:
            return flash_attention(work)
        return work.stock(torch.empty_like(work.q))

    def extend(chunk: int, decodes: int, context: int) -> float:
        mixed = Mixed(chunk=chunk, decodes=decodes, context=context, is_one=False)
        return seconds(call(MixedWork(mixed, heads, card, dtype)), repeat=10)

    if run.flash is not None:
        with run.step("flash attention"):
            work = MixedWork(
                Mixed(chunk=100, decodes=8, context=500, is_one=False), heads, card, dtype
            )
            triton_out = torch.empty_like(work.q)
            work.stock(triton_out)()
            apart = (flash_attention(work)() - triton_out).abs().max()
            run.note("flash_attention", differs_by=float(apart))
    with run.step("mixed kernels"):
        for decodes, context, chunks in run.mixes:
            if run.flash is not None:
                decode_s = extend(1, decodes, context)
            else:
                shape = Shape(batch=decodes, documents=1, prefix=context - 20, suffix=20)
                work = Work(shape, heads, dtype, run.device, distinct=True, num_layers=1)
                decode_s = seconds(work.run_stock(), repeat=10)
                del work
            launch_s = extend(1, 0, 0)
            for chunk in chunks:
                alone_s, both_s = extend(chunk, 0, 0), extend(chunk, decodes, context)
                factor = (both_s - alone_s + launch_s) / decode_s
                row: dict[str, Any] = {"decode_us": decode_s * 1e6, "chunk_us": alone_s * 1e6}
                row |= {"mixed_us": both_s * 1e6, "launch_us": launch_s * 1e6, "factor": factor}
                if linear:
                    decode_ms = 1e3 * (linear[decodes] + num_layers * decode_s)
                    mixed_ms = 1e3 * (linear[decodes + chunk] + num_layers * both_s)
                    row |= {"decode_iteration_ms": decode_ms, "mixed_iteration_ms": mixed_ms}
                    row["us_per_token"] = (mixed_ms - decode_ms) * 1e3 / chunk
                    chunk_ms = 1e3 * (linear[chunk] + num_layers * alone_s)
                    row |= {
                        "chunk_iteration_ms": chunk_ms,
                        "saved_ms": decode_ms + chunk_ms - mixed_ms,
                    }
                run.note("mixed_kernels", decodes=decodes, context=context, chunk=chunk, **row)
                if run.is_gpu:
                    torch.cuda.empty_cache()


def flash_attention(work: Any) -> Callable[[], Any]:
    """What launches FlashAttention-3 on a mixed batch, as SGLang's backend does."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    def sums(counts: Any) -> torch.Tensor:
        ends = torch.from_numpy(counts.cumsum()).to(work.q.device, torch.int32)
        return torch.nn.functional.pad(ends, (1, 0))

    lengths = work.new + work.cached
    return partial(
        flash_attn_with_kvcache,
        q=work.q,
        k_cache=work.k.unsqueeze(1),
        v_cache=work.v.unsqueeze(1),
        page_table=work.req_to_token,
        cache_seqlens=torch.from_numpy(lengths).to(work.q.device, torch.int32),
        cu_seqlens_q=sums(work.new),
        cu_seqlens_k_new=sums(lengths),
        max_seqlen_q=int(work.new.max()),
        softmax_scale=work.heads.head_dim**-0.5,
        causal=True,
        num_splits=0,
    )


def linear_s(
    config: dict[str, Any], sizes: Sequence[int], device: str, dtype: torch.dtype
) -> dict[int, float]:
    """Tokens -> seconds of all layers' matrix products, and of the head for 64 requests."""
    from gpu_kernels import seconds

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = [(hidden, (heads + 2 * kv_heads) * size), (heads * size, hidden)]
    shapes += [(hidden, 2 * inner), (inner, hidden)]
    make = partial(torch.randn, device=device, dtype=dtype)
    layers = [[make(n, k) for k, n in shapes] for _ in range(config["num_hidden_layers"])]
    head = make(config["vocab_size"], hidden)
    found = {}
    for num in sizes:
        inputs = [make(num, k) for k, _ in shapes]

        def multiply(inputs: list[torch.Tensor] = inputs) -> None:
            for weights in layers:
                for x, weight in zip(inputs, weights, strict=True):
                    torch.nn.functional.linear(x, weight)
            torch.nn.functional.linear(inputs[0][:64], head)

        multiply()
        found[num] = seconds(multiply, repeat=5)
    return found


def host(run: Run) -> None:
    with run.step("copies"):
        for kind in ("pageable", "pinned", "pageable, idle", "pinned, idle", "pageable, blocking"):
            for num in (64, 4096, 65_536):
                times = []
                for _ in range(20 if run.is_gpu else 2):
                    source = torch.zeros(
                        num, dtype=torch.int64, pin_memory="pinned" in kind and run.is_gpu
                    )
                    if run.is_gpu:
                        torch.cuda.synchronize()
                        if "idle" not in kind:
                            torch.cuda._sleep(35_000_000)  # some 20 ms
                    begun = time.perf_counter()
                    source.to(run.device, non_blocking="blocking" not in kind)
                    times.append((time.perf_counter() - begun) * 1e3)
                run.note("copy_behind", kind=kind, int64s=num, ms=statistics.median(times))
    with run.step("fit"):
        from cosched.core.batch import BatchShape, Prefill
        from cosched.predict.calibration import Calibrator

        learner = Calibrator()
        generator = torch.Generator().manual_seed(run.seed)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (1,), generator=generator))

        took = []
        for _ in range(300 if run.is_tiny else 6000):
            decodes = [draw(100, 4000)] * draw(1, 128)
            new = draw(0, 2) * draw(16, 2048)
            prefills = [Prefill(new, draw(0, 2000))] if new else []
            shape = BatchShape(prefills=prefills, decodes=decodes)
            fits, begun = learner.num_fits, time.perf_counter()
            seconds = 0.006 + 2e-8 * sum(decodes) + 2e-5 * new
            learner.observe(shape, seconds)
            if learner.num_fits > fits:
                took.append((time.perf_counter() - begun) * 1e3)
        run.note("fit", fits=len(took), mean_ms=statistics.fmean(took), most_ms=max(took))


def sweep(run: Run) -> None:
    import gpu_kernels
    from gpu_kernels import LLAMA_8B, SMALL, Shape, Work, seconds

    from cosched_kernels import plan as plans
    from cosched_kernels import shared_prefix
    from cosched_kernels.buffers import upload
    from cosched_kernels.plan import Tiling, bytes_moved

    heads = SMALL if run.is_tiny else LLAMA_8B
    dtype = torch.bfloat16 if run.is_gpu else torch.float32
    shapes = [
        Shape(batch=64, documents=1, prefix=10_000),
        Shape(batch=64, documents=4, prefix=4000),
    ]
    shapes += [Shape(batch=32, documents=4, prefix=10_000)]
    if run.is_tiny:
        shapes = [Shape(batch=2, documents=1, prefix=24, suffix=5)]
    card = gpu_kernels.Card(run.device)
    normal, least = dict(shared_prefix._TILES), plans._MIN_SPLIT
    layers = 4 if run.is_gpu else 1
    works = [Work(s, heads, dtype, run.device, distinct=False, num_layers=layers) for s in shapes]
    try:
        for block_n in (64, 32, 128) if not run.is_tiny else (64,):
            stages = 2 if block_n == 128 else 3
            for rows, tile in normal.items():
                shared_prefix._TILES[rows] = replace(tile, block_n=block_n, num_stages=stages)
            for split in (128, 256, 512):
                plans._MIN_SPLIT = split
                for programs in (66, 132, 264, 528):
                    with run.step(f"sweep {block_n} {split} {programs}"):
                        for shape, work in zip(shapes, works, strict=True):
                            tiling = Tiling(rows=tuple(normal), programs=programs)
                            plan = work.plan(tiling)
                            tensors = upload(
                                plan,
                                heads,
                                device=run.device,
                                dtype=dtype,
                                num_programs=card.num_sms,
                            )
                            once = seconds(partial(work.run, tensors), repeat=10) / layers
                            run.note(
                                "sweep",
                                batch=shape.batch,
                                documents=shape.documents,
                                prefix=shape.prefix,
                                block_n=block_n,
                                split=split,
                                programs=programs,
                                us=once * 1e6,
                                gb_per_s=bytes_moved(plan, heads).total / once / 1e9,
                            )
    finally:
        shared_prefix._TILES.update(normal)
        plans._MIN_SPLIT = least


def replies(run: Run) -> None:
    """Two layers whose weights make the context matter, deterministic: stock's replies with memory
    for all against cosched's with memory for some, so that it preempts."""
    small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    small |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 2000,
    }
    num, most, new = (8, 60, 8) if run.is_tiny else (120, 400, 48)
    common = ["--max-running-requests", "12"]
    if run.is_gpu:
        common += ["--enable-deterministic-inference"]
        if not run.is_tiny:
            common += ["--cuda-graph-bs-decode", "1", "4", "8", "12"]
            common += [
                "--cuda-graph-bs-prefill",
                "64",
                "256",
                "1024",
                "--chunked-prefill-size",
                "1024",
            ]
    if run.is_tiny and run.is_gpu:
        common += [
            *("--cuda-graph-backend-prefill", "disabled"),
            *("--cuda-graph-backend-decode", "disabled"),
        ]
    little = ["--max-total-tokens", str(5 * (most + new))]
    plenty = ["--max-total-tokens", "60000" if not run.is_tiny else "3000"]
    found: dict[str, list[list[int]]] = {}
    for name, policy, memory in (
        ("stock", "sglang", plenty),
        ("cosched", "cosched", plenty),
        ("cosched, little memory", "cosched", little),
    ):
        with (
            run.step(f"replies {name}"),
            gpu_engines.engine(run, policy, *common, *memory, config=small) as local,
        ):
            model = local.scheduler.tp_worker.model_runner.model
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        drawn = torch.randn(weight.shape, generator=generator) * 0.08
                        weight.copy_(drawn.to(weight.dtype))

            def send(i: int, local: Any = local, policy: str = policy) -> None:
                length = 20 + (37 * i) % (most - 20)
                own = {} if policy == "sglang" else {"priority": OFFLINE_PRIORITY if i % 3 else 0}
                local.submit(
                    f"r{i}", gpu_engines.tokens(length, 9000 + i), max_new_tokens=new, **own
                )

            chats = [i for i in range(num) if i % 3 == 0]
            for i in range(num):
                if i % 3:
                    send(i)

            def on_iteration(count: int, chats: Any = chats, send: Any = send) -> None:
                if chats and count % 4 == 3:  # several at once
                    for _ in range(min(3, len(chats))):
                        send(chats.pop(0))

            local.run_until_idle(on_iteration=on_iteration)
            found[name] = [local.replies[f"r{i}"].output_ids for i in range(num)]
            row: dict[str, Any] = {"distinct": len({t for ids in found[name] for t in ids})}
            if "stock" in found:
                pairs = zip(found["stock"], found[name], strict=True)
                row["same"] = sum(a == b for a, b in pairs)
            controller = getattr(local.scheduler, "cosched", None)
            if controller is not None:
                row["preemptions"] = controller.counters.num_preemptions
            row["retractions"] = sum(r.num_retractions for r in local.replies.values())
            run.note("replies", name=name, replies=num, **row)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each kind of row, its columns in the order of the first."""

    def cell(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        mine = [row for row in rows if row["step"] == step]
        names = list(dict.fromkeys(name for row in mine for name in row if name != "step"))
        lines += ["", f"**{step}**", "", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        lines += ["| " + " | ".join(cell(row.get(n)) for n in names) + " |" for row in mine]
    return "\n".join(lines) + "\n"


RUNS: dict[str, Callable[[Run], None]] = {
    "kernels": kernels,
    "engine": gpu_engines.iterations,
    "cosched": gpu_engines.with_cosched,
    "stock": gpu_engines.stock,
    "host": host,
    "sweep": sweep,
    "replies": replies,
}


def part(args: argparse.Namespace, name: str) -> None:
    """In a process of its own."""
    run = Run(args)
    torch.manual_seed(args.seed)
    if run.is_gpu:
        import gpu_ops

        gpu_ops.install()
        if run.flash is not None:
            gpu_ops.use_flash_attention(run.flash)
    else:
        if name in ("kernels", "sweep"):
            os.environ.setdefault("TRITON_INTERPRET", "1")
        import cosched.bootstrap  # noqa: F401
    with run.step(name):
        RUNS[name](run)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS) + " (all)")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a GPU too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--flash-attention",
        type=Path,
        metavar="DIR",
        help="with flash_ops.abi3.so and flash_attn.py of sglang-kernel: that instead of Triton",
    )
    parser.add_argument("--in-process", action="store_true", help="the parts in this process")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_loop: torch sees no CUDA GPU; --device cpu runs tiny shapes without one")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "loop.jsonl").touch()
    if args.in_process:
        for name in args.parts or PARTS:
            part(args, name)
        return 0
    for name in args.parts or PARTS:
        own = [sys.executable, __file__, name, "--in-process", "--out", str(args.out)]
        own += ["--device", args.device, "--seed", str(args.seed)] + ["--tiny"] * args.tiny
        if args.flash_attention is not None:
            own += ["--flash-attention", str(args.flash_attention)]
        begun = time.perf_counter()
        with (args.out / f"{name}.log").open("w") as log:
            try:
                code = subprocess.run(own, stdout=log, stderr=log, timeout=PARTS[name]).returncode
            except subprocess.TimeoutExpired:
                code = -1
        took = time.perf_counter() - begun
        print(f"# part {name}: exit {code}, {took:.0f} s", flush=True)
    rows = [json.loads(line) for line in (args.out / "loop.jsonl").read_text().splitlines()]
    (args.out / "loop.md").write_text(markdown(rows))
    print(markdown(rows))
    from cosched.versions import versions

    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    result = {"device": device, "seed": args.seed, "versions": versions("triton")}
    print(json.dumps({**result, "rows": len(rows)}))
    return 1 if any(row["step"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
