"""The part of a run that is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cosched.errors import ConfigError
from cosched.lab.metrics.records import Floats, IterationLog, RequestRecord

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
        # Half-open: the end lies just above the last event.
        end_s = math.nextafter(last_event_s(records, iterations), math.inf)
        return cls(start_s=min(starts), end_s=end_s)

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def per_s(self, amount: float | None) -> float | None:
        """What was done in the window, as a rate; None when the window is too short for one."""
        return None if amount is None or self.length_s < _SHORTEST_S else amount / self.length_s

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.end_s

    def holds(self, times_s: Floats) -> npt.NDArray[np.bool_]:
        """Which of the times are inside."""
        inside: npt.NDArray[np.bool_] = (times_s >= self.start_s) & (times_s < self.end_s)
        return inside

    def overlap(self, starts_s: Floats, ends_s: Floats) -> Floats:
        """How much of each interval is inside [s]."""
        length = np.minimum(ends_s, self.end_s) - np.maximum(starts_s, self.start_s)
        inside: Floats = np.maximum(length, 0.0)
        return inside


def last_event_s(records: Iterable[RequestRecord], iterations: IterationLog) -> float:
    """When the last thing that is known of happened [s]; 0 when nothing did."""
    return max(_ends(records, iterations), default=0.0)


def _ends(records: Iterable[RequestRecord], iterations: IterationLog) -> Iterator[float]:
    for r in records:
        yield from (t for t in (r.arrival_s, r.first_token_s, r.finish_s) if t is not None)
        if r.token_times:
            yield r.token_times[-1]
    if len(iterations):
        yield float(iterations.end_s.max())
