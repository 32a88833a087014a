"""What the kernels become on a GPU, without one: registers, spills, shared memory, instructions.

::

    python -m cosched_kernels.compile_table
    python -m cosched_kernels.compile_table --arch 90 --head-dim 128 --kv bf16 fp8e4nv

Triton compiles for any architecture, and its own ptxas and disassemblers show the result. A
second table counts the bytes that one layer moves for questions about one document, from the items
of the plan. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.backends.nvidia
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cosched_kernels.groups import Shared, groups_of
from cosched_kernels.interpret import compiled
from cosched_kernels.picker import DeviceModel, mixed_times_s
from cosched_kernels.plan import (
    Bytes,
    HeadShape,
    Tiling,
    bytes_moved,
    make_plan,
    scores_computed,
)
from cosched_kernels.shared_prefix import attend_constants, reduce_constants, tiles_for
from cosched_kernels.triton_kernels import attend_items_kernel, reduce_pieces_kernel

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability -> most shared memory of one program [bytes] (CUDA C++ Programming Guide)."""

TENSOR_CORES = ("UTCHMMA", "HGMMA", "HMMA")
"""Instructions of tensor cores, the strongest first: tcgen05 (sm_100), wgmma (sm_90), mma."""

_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel for one architecture.

    registers      per thread
    spilled        bytes of stack per thread, which is where registers are spilled to
    shared_memory  of a program [bytes]
    tensor_core    the strongest instruction found, empty if there is none
    async_copies   instructions that copy to shared memory while others compute
    """

    kernel: str
    arch: int
    rows: int
    head_dim: int
    kv: str
    registers: int
    spilled: int
    shared_memory: int
    tensor_core: str
    async_copies: int


def compile_attend(
    arch: int, rows: int, *, head_dim: int = 128, group: int = 4, q: str = "bf16", kv: str = "bf16"
) -> Compiled:
    """The attention kernel. q, kv are Triton's names of types: fp16, bf16, fp32; fp8e4nv, fp8e5."""
    tile = tiles_for(head_dim)[rows]
    constants = attend_constants(
        rows, num_kv_heads=8, group=group, head_dim=head_dim, is_float32=q == "fp32"
    )
    pointers = dict.fromkeys(("q", "out", "pieces"), q) | dict.fromkeys(("k", "v"), kv)
    return _compile(
        attend_items_kernel,
        pointers | {"weights": "fp32", "pool_rows": "i64"},
        constants | {"HEIGHT": 0},
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        {"arch": arch, "rows": rows, "head_dim": head_dim, "kv": kv},
    )


def compile_reduce(arch: int, *, head_dim: int = 128, q: str = "bf16") -> Compiled:
    """The kernel that weighs pieces."""
    return _compile(
        reduce_pieces_kernel,
        {"pieces": q, "out": q, "weights": "fp32"},
        reduce_constants(num_heads=32, head_dim=head_dim),
        {"num_warps": 4},
        {"arch": arch, "rows": 1, "head_dim": head_dim, "kv": ""},
    )


def _compile(
    kernel: Callable[..., None],
    pointers: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    labels: dict[str, Any],
) -> Compiled:
    function = compiled(kernel)
    signature = {}
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_scale"):
            signature[name] = "fp32"
        elif "stride" in name:
            signature[name] = "i32"
        else:
            signature[name] = "*" + pointers.get(name, "i32")
    # What a launch would find out: addresses and strides are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or "stride" in name
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    arch = labels["arch"]
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Compiled(
        kernel=function.__name__,
        **labels,
        registers=int(found[1]),
        spilled=int(found[2]),
        shared_memory=int(result.metadata.shared),
        tensor_core=next((name for name in TENSOR_CORES if name in code), ""),
        async_copies=code.count("LDGSTS"),
    )


def _tool(name: str, *arguments: str) -> str:
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_apart(tables: Sequence[tuple[int, Sequence[int], Sequence[str]]]) -> Iterator[Compiled]:
    """All kernels of each (compute capability, head dims, types of KV), each in a process of its
    own and never from Triton's cache: a process converts float8 for good as the first architecture
    that it compiled for can, which others cannot or need not."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for found in pool.imap(_compile_all, tables):
            yield from found


def _compile_all(table: tuple[int, Sequence[int], Sequence[str]]) -> list[Compiled]:
    arch, head_dims, types = table
    knobs.compilation.always_compile = True
    found = []
    for head_dim in head_dims:
        for kv in types:
            if arch >= 89 or kv != "fp8e4nv":  # Triton converts no e4m3 below
                found += [
                    compile_attend(arch, height, head_dim=head_dim, kv=kv)
                    for height in tiles_for(head_dim)
                ]
        found.append(compile_reduce(arch, head_dim=head_dim))
    return found


def document_bytes(
    *, batch: int, prefix: int, suffix: int, heads: HeadShape, tiling: Tiling
) -> tuple[Bytes, int, int]:
    """What one layer moves for `batch` decodes over one document of `prefix` tokens, each with
    `suffix` of its own: from the plan, the bound (each KV token once), and without sharing
    [bytes]."""
    document = np.zeros(prefix, dtype=np.int64)
    plan = make_plan(
        groups_of([Shared(namespace=None, tokens=document, length=prefix)] * batch),
        num_queries=np.ones(batch, dtype=np.int64),
        seq_lens=np.full(batch, prefix + suffix),
        heads=heads,
        tiling=tiling,
    )
    token = heads.kv_bytes_per_token
    return (
        bytes_moved(plan, heads),
        (prefix + batch * suffix) * token,
        batch * (prefix + suffix) * token,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=SHARED_MEMORY)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 96, 128, 256])
    parser.add_argument("--kv", nargs="+", default=["bf16", "fp8e4nv", "fp8e5"])
    args = parser.parse_args()
    header = (
        "arch",
        "kernel",
        "rows",
        "dim",
        "KV",
        "registers",
        "spilled",
        "shared",
        "core",
        "async",
    )
    print(("{:>5} {:<21} {:>5} {:>4} {:<8}" + " {:>9}" * 5).format(*header))
    rows = []
    for row in compile_apart([(arch, args.head_dim, args.kv) for arch in args.arch]):
        rows.append(asdict(row))
        print(
            f"{row.arch:>5} {row.kernel:<21} {row.rows:>5} {row.head_dim:>4} {row.kv:<8} "
            f"{row.registers:>9} {row.spilled:>9} {row.shared_memory:>9} "
            f"{row.tensor_core:>9} {row.async_copies:>9}"
        )
    moved, mixed = _bytes_table(args.head_dim), _mixed_table()
    print(
        json.dumps({"triton": triton.__version__, "kernels": rows, "bytes": moved, "mixed": mixed})
    )


def _bytes_table(head_dims: list[int]) -> list[dict[str, float]]:
    print("\nMB that one layer moves, decodes over one document with 200 tokens each of their own")
    print("(32 query heads, 8 KV heads, bf16); asked: what tiles read, the cache's share included")
    header = ("dim", "batch", "document", "plan", "asked", "pieces", "bound", "unshared")
    print(("{:>9}" * len(header)).format(*header))
    table = []
    for head_dim in head_dims:
        heads = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=head_dim)
        tiling = Tiling(rows=tuple(tiles_for(head_dim)))
        for batch in (8, 16, 32, 64):
            for prefix in (1000, 10_000):
                moved, bound, unshared = document_bytes(
                    batch=batch, prefix=prefix, suffix=200, heads=heads, tiling=tiling
                )
                row = {
                    "head_dim": head_dim,
                    "batch": batch,
                    "prefix": prefix,
                    "plan_mb": moved.total / 1e6,
                    "asked_mb": moved.kv_asked / 1e6,
                    "pieces_mb": moved.pieces / 1e6,
                    "bound_mb": bound / 1e6,
                    "unshared_mb": unshared / 1e6,
                }
                table.append(row)
                print(
                    "".join(f"{v:>9}" if isinstance(v, int) else f"{v:>9.1f}" for v in row.values())
                )
    return table


_MIXED = {
    # name: new tokens, tokens of the document, tokens of one's own, one document for all?
    "20 questions of 40 tokens": ([40] * 20, 10_000, 40, True),
    "32 decodes, one document": ([1] * 32, 10_000, 200, True),
    "32 decodes, 32 documents": ([1] * 32, 10_000, 200, False),
    "512-token chunk, 32 decodes": ([512, *[1] * 32], 10_000, 600, True),
    "512-token chunk, 32 chats": ([512, *[1] * 32], 0, 1000, False),
    "512-token chunk, 32 documents": ([512, *[1] * 32], 10_000, 600, False),
}
_STOCK_TILE = 128  # rows of SGLang's Triton extend kernel on sm_80 and sm_90, per query head


def _mixed_table() -> list[dict[str, Any]]:
    print("\nPrefill and mixed batches, one layer (32 query heads, 8 KV heads, dim 128, bf16).")
    print("Scores in millions of (row, key), empty rows of tiles included; stock: a tile of 128")
    print("rows for each request and query head. Tiles: programs' pieces of work.")
    print("ms: of an H200 by the picker's model; beside Triton's kernel, and one that packs heads")
    print(
        f"{'batch':<30}{'KV MB':>8}{'unshared':>10}{'tiles':>7}{'stock':>7}"
        f"{'scores':>9}{'stock':>9}{'ms':>8}{'Triton':>8}{'packed':>8}"
    )
    heads = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=128)
    table = []
    for name, (new, prefix, own, is_one) in _MIXED.items():
        documents = [np.full(prefix, 0 if is_one else index) for index in range(len(new))]
        requests = [Shared(namespace=None, tokens=tokens, length=prefix) for tokens in documents]
        num_queries = np.array(new)
        seq_lens = np.full(len(new), prefix + own)
        groups, lengths = groups_of(requests), {"num_queries": num_queries, "seq_lens": seq_lens}
        plan = make_plan(groups, **lengths, heads=heads, tiling=Tiling())
        triton_s, ours_s = mixed_times_s(
            groups, plan, **lengths, heads=heads, device=DeviceModel().beside("triton")
        )
        packed_s, _ = mixed_times_s(groups, plan, **lengths, heads=heads, device=DeviceModel())
        tiles = -(-num_queries // _STOCK_TILE)
        row = {
            "batch": name,
            "kv_mb": bytes_moved(plan, heads).kv / 1e6,
            "unshared_mb": int(seq_lens.sum()) * heads.kv_bytes_per_token / 1e6,
            "tiles": len(plan.items) * heads.num_kv_heads,
            "stock_tiles": int(tiles.sum()) * heads.num_q_heads,
            "scores": scores_computed(plan, heads) / 1e6,
            "stock_scores": int((tiles * _STOCK_TILE * seq_lens).sum()) * heads.num_q_heads / 1e6,
            "ms": ours_s * 1e3,
            "triton_ms": triton_s * 1e3,
            "packed_ms": packed_s * 1e3,
        }
        table.append(row)
        print(
            f"{name:<30}{row['kv_mb']:>8.0f}{row['unshared_mb']:>10.0f}"
            f"{row['tiles']:>7}{row['stock_tiles']:>7}"
            f"{row['scores']:>9.0f}{row['stock_scores']:>9.0f}"
            f"{row['ms']:>8.3f}{row['triton_ms']:>8.3f}{row['packed_ms']:>8.3f}"
        )
    return table


if __name__ == "__main__":
    main()
