"""A plan on the device: tensors made for one iteration, or at fixed addresses for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cosched_kernels.plan import ITEM_FIELDS, HeadShape, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTensors:
    """What the kernels read of a `Plan`, and where they put pieces.

    items, starts, token_order, bases  those of the plan; behind its end there may be anything
    num_tokens    [1] int32
    pieces        [pieces, q heads, head dim]: what each split of a token's KV gave, normalised
    weights       [pieces, q heads] float32: log2 of the sum behind it
    rows          heights of tiles
    launches      for each height, whether any item may be of it
    num_programs  multiprocessors of the device; all grids follow from it, whatever the batch
    """

    items: torch.Tensor
    starts: torch.Tensor
    token_order: torch.Tensor
    bases: torch.Tensor
    num_tokens: torch.Tensor
    pieces: torch.Tensor
    weights: torch.Tensor
    rows: tuple[int, ...]
    launches: tuple[bool, ...]
    num_programs: int


def upload(
    plan: Plan,
    heads: HeadShape,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_programs: int,
) -> PlanTensors:
    """A plan in tensors of just its size. No synchronisation: the copies wait on the host only for
    page-locked memory, which PyTorch hands out again once they are done.

    dtype  of queries and outputs, and so of pieces
    """
    return PlanTensors(
        items=to_device(plan.items, device),
        starts=to_device(plan.starts, device),
        token_order=to_device(plan.token_order, device),
        bases=to_device(plan.bases, device),
        num_tokens=to_device(np.array([plan.num_tokens], dtype=np.int32), device),
        pieces=torch.empty(
            (plan.num_pieces, heads.num_q_heads, heads.head_dim), dtype=dtype, device=device
        ),
        weights=torch.empty(
            (plan.num_pieces, heads.num_q_heads), dtype=torch.float32, device=device
        ),
        rows=plan.rows,
        launches=tuple(bool(n) for n in np.diff(plan.starts)),
        num_programs=num_programs,
    )


class FixedBuffers:
    """Room for the plans of decode batches, always at the same addresses: a CUDA graph captured
    over `tensors` runs whichever plan was loaded last. A height without items ends at once."""

    def __init__(
        self,
        heads: HeadShape,
        *,
        rows: tuple[int, ...],
        max_tokens: int,
        max_items: int,
        max_pieces: int,
        device: torch.device | str,
        dtype: torch.dtype,
        num_programs: int,
    ) -> None:
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tensors = PlanTensors(
            items=integers(max_items, len(ITEM_FIELDS)),
            starts=integers(len(rows) + 1),
            token_order=integers(max_tokens),
            bases=integers(max_tokens + 1),
            num_tokens=integers(1),
            pieces=torch.zeros(
                (max_pieces, heads.num_q_heads, heads.head_dim), dtype=dtype, device=device
            ),
            weights=torch.zeros(
                (max_pieces, heads.num_q_heads), dtype=torch.float32, device=device
            ),
            rows=rows,
            launches=(True,) * len(rows),
            num_programs=num_programs,
        )

    def fits(self, plan: Plan) -> bool:
        tensors = self.tensors
        return (
            plan.rows == tensors.rows
            and plan.num_tokens <= len(tensors.token_order)
            and len(plan.items) <= len(tensors.items)
            and plan.num_pieces <= len(tensors.pieces)
        )

    def load(self, plan: Plan) -> None:
        """Have the kernels run another plan from now on; it must fit."""
        assert self.fits(plan), f"{plan.num_tokens=} {len(plan.items)=} {plan.num_pieces=}"
        tensors = self.tensors
        num_tokens = np.array([plan.num_tokens], dtype=np.int32)
        for values, buffer in (
            (plan.items, tensors.items),
            (plan.starts, tensors.starts),
            (plan.token_order, tensors.token_order),
            (plan.bases, tensors.bases),
            (num_tokens, tensors.num_tokens),
        ):
            buffer[: len(values)].copy_(_on_host(values, buffer.device), non_blocking=True)

    def clear(self) -> None:
        """No work at all."""
        self.tensors.starts.zero_()
        self.tensors.num_tokens.zero_()


def _on_host(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(values: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """A copy, for which the host does not wait."""
    device = torch.device(device)
    return _on_host(values, device).to(device, non_blocking=True, copy=True)
