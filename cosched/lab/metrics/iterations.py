"""Metrics of the iterations of a run: durations, KV memory, host time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cosched.core.request import RequestClass
from cosched.lab.metrics.records import Floats, IterationLog
from cosched.lab.metrics.stats import Distribution, Window, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSummary:
    """The iterations that ended in the window.

    prediction_error_ratio  |predicted - measured| / measured; its mean is HyGen's MAPE
    """

    num_iterations: int
    busy_ratio: float | None
    duration_s: Distribution
    num_tokens: Distribution
    prediction_error_ratio: Distribution
    underpredicted_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShare:
    """Shares of the KV capacity: mean over busy time, and maximum."""

    mean_ratio: float | None = None
    max_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSummary:
    capacity_tokens: int | None = None
    online: KvShare = KvShare()
    offline: KvShare = KvShare()
    cached: KvShare = KvShare()
    free: KvShare = KvShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """Host time; differs between runs of the same simulation."""

    planning_s: Distribution
    planning_total_s: float | None


class IterationMetrics:
    """The iterations of a run inside the window."""

    def __init__(self, log: IterationLog, window: Window) -> None:
        self._log = log
        self._window = window
        self._starts, self._ends = log.column("start_s"), log.end_s
        self._ended = window.holds(self._ends)
        self._overlap = window.overlap(self._starts, self._ends)

    def _ended_column(self, name: str) -> Floats:
        return self._log.column(name)[self._ended]

    def computed_tokens(self, request_class: RequestClass) -> int | None:
        """Tokens that the iterations of the window computed for a class; None: not known."""
        if not len(self._log):
            return None
        name = request_class.value
        prefill = self._ended_column(f"num_{name}_prefill_tokens")
        decodes = self._ended_column(f"num_{name}_decodes")
        return int(prefill.sum() + decodes.sum())

    def summary(self) -> IterationSummary:
        durations = self._ended_column("duration_s")
        predicted = self._ended_column("predicted_s")
        asked = ~np.isnan(predicted) & (durations > 0)
        errors = predicted[asked] / durations[asked] - 1
        num_tokens = sum(
            self._ended_column(f"num_{name}")
            for name in (
                "online_prefill_tokens",
                "offline_prefill_tokens",
                "online_decodes",
                "offline_decodes",
            )
        )
        busy_s = float(self._overlap.sum()) if len(self._log) else None
        return IterationSummary(
            num_iterations=len(durations),
            busy_ratio=self._window.per_s(busy_s),
            duration_s=Distribution.of(durations),
            num_tokens=Distribution.of(np.asarray(num_tokens)),
            prediction_error_ratio=Distribution.of(np.abs(errors)),
            underpredicted_ratio=ratio(int((errors < 0).sum()), len(errors)),
        )

    def kv(self) -> KvSummary:
        names = ("online", "offline", "cached", "free")
        inside = self._overlap > 0
        weights = self._overlap[inside]
        tokens = {name: self._log.column(f"kv_{name}_tokens")[inside] for name in names}
        totals = np.sum(list(tokens.values()), axis=0)
        if not (len(weights) and totals.all()):
            return KvSummary()
        shares = {name: tokens[name] / totals for name in names}
        return KvSummary(
            capacity_tokens=int(totals.max()),
            **{
                name: KvShare(
                    mean_ratio=float(np.average(share, weights=weights)),
                    max_ratio=float(share.max()),
                )
                for name, share in shares.items()
            },
        )

    def host(self) -> HostSummary:
        planning = self._ended_column("planning_s")
        planning = planning[~np.isnan(planning)]
        return HostSummary(
            planning_s=Distribution.of(planning),
            planning_total_s=float(planning.sum()) if len(planning) else None,
        )
