"""How wrong predictions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["ErrorSummary", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Relative errors, predicted / measured - 1 (0-1). bias: their mean; the rest: absolute."""

    num_points: int
    bias: float
    mean: float
    p50: float
    p99: float


def summarise(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Relative error of predictions; there must be some."""
    relative = np.asarray(predicted) / np.asarray(measured) - 1
    size = np.abs(relative)
    return ErrorSummary(
        num_points=len(relative),
        bias=float(relative.mean()),
        mean=float(size.mean()),
        p50=float(np.median(size)),
        p99=float(np.quantile(size, 0.99)),
    )
