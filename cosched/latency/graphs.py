"""The sizes with a CUDA graph: a batch runs in the next larger one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GraphSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Sizes with a CUDA graph, ascending.

    prefill  tokens of iterations with a prefill
    decode   requests of decode-only iterations
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
