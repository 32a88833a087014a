"""The measured window of a run, distributions, and confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cosched.errors import ConfigError
from cosched.lab.metrics.records import Floats, IterationLog, RequestRecord

_DIGITS = 6
_PERCENTILES = (50, 90, 95, 99)
_SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """``[start_s, end_s)`` on the run's clock."""

    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s <= self.end_s < math.inf):
            raise ConfigError(f"no measurement window: [{self.start_s}, {self.end_s}) s")

    @classmethod
    def covering(cls, records: Iterable[RequestRecord], iterations: IterationLog) -> Window:
        """The whole run, its last event included."""
        records = list(records)
        starts = [r.arrival_s for r in records]
        if len(iterations):
            starts.append(float(iterations.column("start_s").min()))
        if not starts:
            return cls(start_s=0.0, end_s=0.0)
        # Half-open: the end is just above the last event.
        end_s = math.nextafter(last_event_s(records, iterations), math.inf)
        return cls(start_s=min(starts), end_s=end_s)

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def per_s(self, amount: float | None) -> float | None:
        """`amount` per second of the window; None for an empty window."""
        return None if amount is None or self.length_s < _SHORTEST_S else amount / self.length_s

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.end_s

    def holds(self, times_s: Floats) -> npt.NDArray[np.bool_]:
        """True for each time inside."""
        inside: npt.NDArray[np.bool_] = (times_s >= self.start_s) & (times_s < self.end_s)
        return inside

    def overlap(self, starts_s: Floats, ends_s: Floats) -> Floats:
        """Length of the part of each interval that is inside [s]."""
        length = np.minimum(ends_s, self.end_s) - np.maximum(starts_s, self.start_s)
        inside: Floats = np.maximum(length, 0.0)
        return inside


def last_event_s(records: Iterable[RequestRecord], iterations: IterationLog) -> float:
    """Time of the last known event [s]; 0 without any."""
    times = [
        t
        for r in records
        for t in (r.arrival_s, r.first_token_s, r.finish_s, *(r.token_times or ())[-1:])
        if t is not None
    ]
    if len(iterations):
        times.append(float(iterations.end_s.max()))
    return max(times, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of `num_samples` values; all None without samples. Percentiles interpolate linearly between
    the two nearest ranks, as NumPy and the benchmarks of SGLang and vLLM do."""

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
        # Sorted first: neither sum nor percentile then depends on the order of the samples.
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
    """A dataclass as plain data for JSON. Floats are rounded to six significant digits, so that
    equal runs on different CPUs give equal bytes."""
    if is_dataclass(value):
        return {f.name: to_dict(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(each) for key, each in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantile 0.975 of Student's t with 1, 2, ... degrees of freedom."""

MOST_VALUES = len(_T_975) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """half_width: of the 95 % interval about the mean; None for a single value."""

    mean: float
    half_width: float | None


def interval_of(values: Sequence[float | None]) -> Interval | None:
    """Student's t interval of independent runs; None if one of them has no value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    if len(known) == 1:
        return Interval(mean=known[0], half_width=None)
    t = _T_975[len(known) - 2]
    half_width = t * statistics.stdev(known) / math.sqrt(len(known))
    return Interval(mean=statistics.fmean(known), half_width=half_width)


def ratio(amount: float | None, of: float | None) -> float | None:
    return None if amount is None or not of else amount / of
