"""Paged KV allocation without a GPU.

SGLang allocates pages with two Triton kernels, also on its CPU engine, where Triton has no driver:
``--page-size`` above 1 fails there. These are the same two functions in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install"]


class _Launchable:
    """Looks like a Triton kernel: ``kernel[grid](*arguments)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    batch_size_upper: int,
    page_size: int,
) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    alloc_extend_naive(
        prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device
    )


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    batch_size_upper: int,
    page_size: int,
) -> None:
    """Each request's next slot: the one after its last, or the first of a new page when its last
    page is full. seq_lens [batch] count the new token."""
    starts_page = (seq_lens - 1) % page_size == 0
    rank = torch.cumsum(starts_page, 0) - 1
    num_new = int(starts_page.sum())
    if num_new > len(free_pages):
        return  # the caller sees the shortage and allocates nothing
    out_indices.copy_(last_loc + 1)
    out_indices[starts_page] = free_pages[rank[starts_page]] * page_size


def install() -> None:
    """Replace the kernels in SGLang's paged allocator. Idempotent."""
    from sglang.srt.mem_cache.allocator import paged

    replacements: dict[str, Any] = {
        "alloc_extend_kernel": _Launchable(_alloc_extend),
        "alloc_decode_kernel": _Launchable(_alloc_decode),
    }
    for name, kernel in replacements.items():
        assert hasattr(paged, name), f"sglang's paged allocator has no {name}"
        setattr(paged, name, kernel)
