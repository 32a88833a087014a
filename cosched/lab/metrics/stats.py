"""Distributions, and numbers as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from cosched.lab.metrics.records import Floats

_DIGITS = 6
_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of `num_samples` values; all None when there are none.

    Percentiles interpolate linearly between the two nearest ranks: NumPy's default, which the
    benchmarks of SGLang and vLLM use too.
    """

    num_samples: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float] | Floats) -> Distribution:
        if len(samples) == 0:
            return EMPTY
        # Sorted first, so that neither sum nor percentile depends on the order of the samples.
        values = np.sort(np.asarray(samples, dtype=np.float64))
        p50, p90, p95, p99 = (float(p) for p in np.percentile(values, _PERCENTILES))
        return cls(
            num_samples=len(values),
            mean=float(values.mean()),
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            max=float(values[-1]),
        )


EMPTY = Distribution(num_samples=0)


def to_dict(value: Any) -> Any:
    """A dataclass as plain data for JSON; floats keep six significant digits.

    Rounding makes the bytes of two runs equal where their last bits differ, as they do when
    another CPU adds up in another order.
    """
    if is_dataclass(value):
        return {f.name: to_dict(getattr(value, f.name)) for f in fields(value)}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
