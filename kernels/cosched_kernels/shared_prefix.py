"""The Triton kernels: attention of work items, and the weighing of a token's pieces.

`attend_items` works off pairs of item and KV head, in a grid that does not depend on the batch;
`reduce_pieces` combines what the items of a token found by log-sum-exp, as FlashDecoding does with
its splits ("Flash-Decoding for long-context inference", Dao et al., 2023) and Cascade Inference
with the levels of a shared prefix (Ye et al., 2024). Plain-torch functions of the same names and
arguments are in `cosched_kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cosched_kernels.buffers import PlanTensors
from cosched_kernels.interpret import launch
from cosched_kernels.triton_kernels import attend_items_kernel, reduce_pieces_kernel

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one height of tiles is compiled and launched.

    block_n  KV tokens per step of the inner loop
    per_sm   programs for each multiprocessor: as many as registers and shared memory leave room for
    """

    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int


_TILES = {
    16: Tile(block_n=64, num_warps=4, num_stages=3, per_sm=4),
    64: Tile(block_n=64, num_warps=4, num_stages=3, per_sm=2),
    128: Tile(block_n=64, num_warps=8, num_stages=3, per_sm=1),
}
_LARGE_HEAD_TILES = {
    # With four warps it spills on sm_80 for e5m2.
    16: Tile(block_n=32, num_warps=8, num_stages=3, per_sm=2),
    64: Tile(block_n=32, num_warps=8, num_stages=3, per_sm=1),
}


def tiles_for(head_dim: int) -> Mapping[int, Tile]:
    """Heights of tiles [query rows] for a head size. Chosen with
    ``python -m cosched_kernels.compile_table``: none of them spills."""
    return _TILES if head_dim <= 128 else _LARGE_HEAD_TILES


def attend_constants(
    tile_rows: int, *, num_kv_heads: int, group: int, head_dim: int, is_float32: bool
) -> dict[str, Any]:
    """What `attend_items_kernel` is compiled for."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _power_of_two(head_dim),
        "BLOCK_M": tile_rows,
        "BLOCK_N": tiles_for(head_dim)[tile_rows].block_n,
        # TF32 only where it is asked for; 16-bit types know no difference.
        "PRECISION": "ieee" if is_float32 else "tf32",
    }


def reduce_constants(*, num_heads: int, head_dim: int) -> dict[str, Any]:
    """What `reduce_pieces_kernel` is compiled for."""
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _power_of_two(head_dim),
        "BLOCK_H": min(16, _power_of_two(num_heads)),
    }


def attend_items(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor,
    plan: PlanTensors,
    req_to_token: torch.Tensor,
    pool_rows: torch.Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Attention of every item of a plan: into `out` where it is a token's only one, else into the
    plan's pieces, for `reduce_pieces`.

    q, out        [tokens, q heads, head dim]; the last dimension contiguous, as of all of these
    k, v          [slots, kv heads, head dim], float16, bfloat16, float32 or float8
    req_to_token  [rows, positions] int32: the KV slot of each position of a request
    pool_rows     [requests]: the row of each request of the batch
    scale         of the scores, before the softmax
    k_scale, v_scale  what float8 keys and values are multiplied by
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    tiles = tiles_for(head_dim)
    for height, rows in enumerate(plan.rows):
        if not plan.launches[height]:
            continue
        launch(
            attend_items_kernel,
            (plan.num_programs * tiles[rows].per_sm,),
            q,
            k,
            v,
            out,
            plan.pieces,
            plan.weights,
            req_to_token,
            pool_rows,
            plan.items,
            plan.starts,
            plan.token_order,
            plan.bases,
            scale * k_scale * _LOG2_E,
            v_scale,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *out.stride()[:2],
            req_to_token.stride(0),
            HEIGHT=height,
            **attend_constants(
                rows,
                num_kv_heads=num_kv_heads,
                group=num_heads // num_kv_heads,
                head_dim=head_dim,
                is_float32=q.dtype == torch.float32,
            ),
            num_warps=tiles[rows].num_warps,
            num_stages=tiles[rows].num_stages,
        )


def reduce_pieces(*, out: torch.Tensor, plan: PlanTensors) -> None:
    """Weigh the pieces of every token that has several: into `out` [tokens, q heads, head dim]."""
    num_heads, head_dim = out.shape[1:]
    launch(
        reduce_pieces_kernel,
        (plan.num_programs * 4,),
        plan.pieces,
        plan.weights,
        out,
        plan.token_order,
        plan.bases,
        plan.num_tokens,
        *out.stride()[:2],
        **reduce_constants(num_heads=num_heads, head_dim=head_dim),
        num_warps=4,
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
