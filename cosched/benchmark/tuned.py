"""Baselines at their best.

A comparison with a competitor's defaults shows only that they were not tuned. So each baseline is
also shown at the setting of its own that serves most offline work for this workload, among those
that keep the attainment of the online requests within a point of what these reach alone; where
none does, at the one with the highest attainment. All are searched alike (`tune`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from cosched.simulation.run import RunResult, RunSpec
from cosched.simulation.scenario import SCENARIOS, scenario
from cosched.simulation.search import last_good, values_between

__all__ = [
    "CEILING",
    "TUNINGS",
    "Setting",
    "Tried",
    "Tuning",
    "best_of",
    "highest_rate",
    "is_searched",
    "most_misses",
    "tune",
]

CEILING = "offline-fcfs"
"""The scenario that serves the offline set in the order of arrival, as HyGen* does, without online
requests: a higher rate than its own would throttle nothing."""

CHUNK_TOKENS = (*range(256, 1025, 64), 2048, 4096, 8192)
"""``--chunked-prefill-size``."""

TOLERANCE = 0.01
"""Of online-only attainment."""

AMOUNT_TOLERANCE = 0.1
"""Relative precision of a rate or a cap."""

SPAN = 30.0
"""The highest rate that is searched over the lowest."""

_FEW = (256, 512, 1024, 8192)
"""Another setting of mixed chunks is left out when one is good and none of these is with it; where
none at all is good, which of these is nearest is told by whole runs."""

_NUM_BAD = 2
"""Larger chunks are not tried once so many in a row missed what smaller ones kept: an iteration
only becomes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is varied; None: as the machine or the policy has it. amount: of `Tuning.amount`."""

    chunk_tokens: int | None = None
    mixed_chunk: bool | None = None
    schedule_policy: str | None = None
    amount: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        parts = (
            self.chunk_tokens and str(self.chunk_tokens),
            self.mixed_chunk and "mixed",
            self.schedule_policy,
            self.amount and f"{self.amount:g} {self.unit}",
        )
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A baseline and what of it is searched.

    scenario  that it is
    chunks    whether chunk sizes are; else the machine's
    mixed     settings of mixed chunks; None: as the policy wants it
    orders    of ``--schedule-policy``: the first, and others to try at the best setting
    unit      of the amount of offline work that is let in; empty: none is
    """

    scenario: str
    chunks: bool = True
    mixed: tuple[bool | None, ...] = (None,)
    orders: tuple[str | None, ...] = (None,)
    unit: str = ""

    def amounts(self, base: RunSpec, highest_rate: float) -> Sequence[float | None]:
        """Ascending. highest_rate: that of `CEILING` [1/s]."""
        match self.unit:
            case "in flight":
                cap = float(base.max_concurrency)
                return values_between(1.0, cap, tolerance=AMOUNT_TOLERANCE, is_integer=True)
            case "req/s" if "offline_rate" not in dict(base.config):
                low = highest_rate / SPAN
                return values_between(low, highest_rate, tolerance=AMOUNT_TOLERANCE, digits=3)
        return [None]

    @property
    def num_runs(self) -> int:
        """About as many are tried."""
        num_chunks = len(CHUNK_TOKENS) // 2 if self.chunks else 1
        return len(self.mixed) * num_chunks * (2 if self.unit else 1) + (7 if self.unit else 0)

    def spec(self, base: RunSpec, setting: Setting) -> RunSpec:
        given: dict[str, Any] = {
            "chunk_tokens": setting.chunk_tokens,
            "mixed_chunk": setting.mixed_chunk,
            "schedule_policy": setting.schedule_policy,
        }
        machine = replace(base.machine, **{k: v for k, v in given.items() if v is not None})
        spec = replace(base, scenario=scenario(self.scenario), machine=machine)
        if setting.amount is None:
            return spec
        if self.unit == "in flight":
            return replace(spec, cap=int(setting.amount))
        return spec.configured(offline_rate=setting.amount)


TUNINGS: Mapping[str, Tuning] = {
    # `lof` (longest output first) is the only other order that SGLang has beside priorities.
    "priority-tuned": Tuning(scenario="priority", mixed=(True, False), orders=("fcfs", "lof")),
    "cap-tuned": Tuning(scenario="cap", mixed=(True, False), unit="in flight"),
    "aimd-tuned": Tuning(scenario="aimd", mixed=(True, False)),
    "sarathi-tuned": Tuning(scenario="sarathi"),
    "hygen-throttled": Tuning(scenario="hygen-throttled", chunks=False, unit="req/s"),
    "hygen-throttled-tuned": Tuning(scenario="hygen-throttled", unit="req/s"),
}
"""By the name of the row. `hygen-throttled` is nothing without a rate (HyGen §5.1)."""


def is_searched(name: str, base: RunSpec) -> bool:
    """Whether a row is a search on this workload: both classes are there, and something is left
    to choose."""
    has_both = base.online is not None and base.offline is not None
    is_given = "offline_rate" in dict(base.config)
    return has_both and name in TUNINGS and not (name in SCENARIOS and is_given)


class Tried(Protocol):
    """A run and what it is compared with."""

    @property
    def attainment(self) -> float | None: ...

    @property
    def baseline_attainment(self) -> float | None: ...

    @property
    def offline_tokens_per_s(self) -> float | None: ...

    @property
    def gave_up(self) -> bool: ...


T = TypeVar("T", bound=Tried)
K = TypeVar("K")


def most_misses(alone: RunResult) -> int:
    """With how many a run may still be good. alone: online requests alone."""
    attainment = alone.summary.online.attainment.joint
    num_decided = attainment.num_met + attainment.num_missed
    return attainment.num_missed + int(TOLERANCE * num_decided)


def _lacking(tried: Tried) -> float:
    """Of the attainment; of a run that gave up nothing is known but that it is too much."""
    if tried.gave_up:
        return math.inf
    return max((tried.baseline_attainment or 0.0) - (tried.attainment or 0.0), 0.0)


def _rank(tried: Tried) -> tuple[float, float]:
    lacking = _lacking(tried)
    return -lacking if lacking > TOLERANCE else 0.0, tried.offline_tokens_per_s or 0.0


def best_of(tried: Mapping[K, Tried]) -> K:
    """Of a sweep that is not empty: the key of the best, of equals the first."""
    return max(tried, key=lambda key: _rank(tried[key]))


def tune(
    tuning: Tuning,
    amounts: Sequence[float | None],
    run: Callable[[Sequence[Setting], bool], Sequence[T]],
    *,
    num_at_once: int = 1,
) -> dict[Setting, T]:
    """Every setting that was tried; `best_of` them is the answer. `run` runs some side by side, and
    may let them give up where its second argument says so.

    Chunk sizes ascend. At the first of them the most offline work is searched that is good. A
    larger chunk must bear as much, or more: otherwise it cannot be the best.
    """
    tried: dict[Setting, T] = {}

    def are_good(settings: Sequence[Setting]) -> list[bool]:
        new = [setting for setting in settings if setting not in tried]
        if new:
            tried.update(zip(new, run(new, True), strict=True))
        return [_lacking(tried[setting]) <= TOLERANCE for setting in settings]

    for mixed in tuning.mixed:
        shapes = [
            Setting(
                chunk_tokens=chunk,
                mixed_chunk=mixed,
                schedule_policy=tuning.orders[0],
                unit=tuning.unit,
            )
            for chunk in (CHUNK_TOKENS if tuning.chunks else (None,))
        ]
        few = [replace(s, amount=amounts[0]) for s in shapes if s.chunk_tokens in _FEW]
        if tried and any(_lacking(run) <= TOLERANCE for run in tried.values()):
            if few and not any(are_good(few)):
                continue
        most: int | None = None  # amount that a smaller chunk was good at
        num_bad = 0
        while shapes and num_bad < _NUM_BAD:
            if len(amounts) == 1:
                now, shapes = shapes[:num_at_once], shapes[num_at_once:]
                settings = [replace(shape, amount=amounts[0]) for shape in now]
                for is_good in are_good(settings):
                    most = 0 if is_good else most
                    num_bad = 0 if is_good or most is None else num_bad + 1
                continue
            shape = shapes.pop(0)
            first = 0 if most is None else most
            ladder = [replace(shape, amount=amount) for amount in amounts[first:]]
            if most is None:
                found = last_good(ladder, are_good, num_at_once=num_at_once)
            elif all(are_good(ladder[:2])) and ladder[1:]:
                found = last_good(ladder[1:], are_good, num_at_once=num_at_once)
            else:
                found = ladder[0] if all(are_good(ladder[:1])) else None
            if found is not None:
                most = first + ladder.index(found)
            num_bad = 0 if found is not None or most is None else num_bad + 1
    if all(_lacking(one) > TOLERANCE for one in tried.values()):
        few = [s for s in tried if s.chunk_tokens in (None, *_FEW) and s.amount == amounts[0]]
        tried.update(zip(few, run(few, False), strict=True))
    best = best_of(tried)
    are_good([replace(best, schedule_policy=order) for order in tuning.orders[1:]])
    return tried


def highest_rate(alone: RunResult) -> float:
    """Offline requests per second of a run of `CEILING`; at least one in the run."""
    return max(alone.summary.offline.requests_per_s or 0.0, 1 / alone.end_s)
