"""A sweep over the settings of a run, one dial after another: a few values of each, of which the
best stays.

The best run serves the most offline work while as many online requests meet their targets as
without offline work, within `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from cosched.lab.metrics.summary import Summary
from cosched.lab.simulation.run import RunResult

K = TypeVar("K")
P = TypeVar("P")
V = TypeVar("V")

LEAST_GAIN = 0.01
"""Relative gain in offline work that is worth a change."""

TOLERANCE = 0.01
"""Allowed loss of the attainment of online requests alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A run, and that of its online requests alone."""

    result: RunResult
    alone: Summary

    @property
    def attainment(self) -> float | None:
        return self.result.summary.online.attainment.joint.ratio

    @property
    def baseline_attainment(self) -> float | None:
        return self.alone.online.attainment.joint.ratio

    @property
    def offline_tokens_per_s(self) -> float | None:
        return self.result.summary.offline.tokens_per_s

    @property
    def gave_up(self) -> bool:
        return self.result.gave_up

    def figures(self) -> dict[str, Any]:
        """Of the output, in seconds."""
        online = self.result.summary.online
        return {
            "attainment": self.attainment,
            "attainment_alone": self.baseline_attainment,
            "offline_tokens_per_s": self.offline_tokens_per_s,
            "ttft_s": {"p50": online.ttft_s.p50, "p99": online.ttft_s.p99},
            "tpot_s": {"p50": online.tpot_s.p50, "p99": online.tpot_s.p99},
            "seed": self.result.spec.seed,
        }


def best_of(tried: Mapping[K, Tried], *, current: K | None = None) -> K:
    """The key of the run with the most offline work among those within `TOLERANCE` of the
    attainment of online requests alone; without such a run, that with the highest attainment. Of
    equals the first. current: the others must be better by `LEAST_GAIN`."""

    def rank(key: K) -> tuple[float, float]:
        one = tried[key]
        lacking = max((one.baseline_attainment or 0.0) - (one.attainment or 0.0), 0.0)
        if one.gave_up:  # what it came to until then: more if it held out longer
            lacking += TOLERANCE
        rate = one.offline_tokens_per_s or 0.0
        if current is not None and key != current:
            rate /= 1 + LEAST_GAIN
        return -lacking if lacking > TOLERANCE else 0.0, rate

    return max(tried, key=rank)


def most_misses(alone: Summary) -> int:
    """The most misses of a good run. alone: online requests alone."""
    attainment = alone.online.attainment.joint
    num_decided = attainment.num_met + attainment.num_missed
    return attainment.num_missed + int(TOLERANCE * num_decided)


class Dial(Protocol[P, V]):
    """One setting of a point P, such as the specification of a run. values: that are tried beside
    the current one."""

    @property
    def name(self) -> str: ...

    @property
    def values(self) -> Sequence[V]: ...

    def of(self, point: P) -> V: ...

    def set(self, point: P, value: V) -> P:
        """The same point with another value."""
        ...

    def say(self, value: V) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept(Generic[P]):
    """best: with the best value of each dial. tried: the runs of each dial by value."""

    best: P
    tried: Mapping[str, Mapping[Any, Tried]] = field(default_factory=dict)


def sweep(
    start: P,
    dials: Sequence[Dial[P, Any]],
    run: Callable[[Mapping[str, P]], Mapping[str, Tried]],
) -> Swept[P]:
    """`run` runs points side by side, by name."""
    best = start
    first = run({"as it is": best})["as it is"]
    tried: dict[str, dict[Any, Tried]] = {}
    for dial in dials:
        now = dial.of(best)
        others = [value for value in dial.values if value != now]
        results = run({dial.say(value): dial.set(best, value) for value in others})
        known = {now: first} | {value: results[dial.say(value)] for value in others}
        tried[dial.name] = dict(sorted(known.items()))
        chosen = best_of(known, current=now)
        if chosen != now:
            best, first = dial.set(best, chosen), known[chosen]
    return Swept(best=best, tried=tried)
