"""Choose the options of a server by simulation, one knob after another.

Each knob is tried at a few values, with the best values of the others so far. A value replaces the
current one only if it serves more offline work by `LEAST_GAIN` at no more harm to online requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec

from cosched.lab.simulation.run import RunResult, RunSpec
from cosched.schedule.base import Budgets

LEAST_GAIN = 0.01
"""Relative gain in offline work that is worth a change."""

TOLERANCE = 0.01
"""Allowed loss of the attainment of online requests alone."""


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


K = TypeVar("K")


def best_of(tried: Mapping[K, Tried], *, current: K | None = None) -> K:
    """The key of the run with the most offline work among those within `TOLERANCE` of the
    attainment of online requests alone; without such a run, that with the highest attainment. Of
    equals the first. current: the others must be better by `LEAST_GAIN`."""

    def rank(key: K) -> tuple[float, float]:
        one = tried[key]
        lacking = math.inf  # of a run that gave up
        if not one.gave_up:
            lacking = max((one.baseline_attainment or 0.0) - (one.attainment or 0.0), 0.0)
        rate = one.offline_tokens_per_s or 0.0
        if current is not None and key != current:
            rate /= 1 + LEAST_GAIN
        return -lacking if lacking > TOLERANCE else 0.0, rate

    return max(tried, key=rank)


def most_misses(alone: RunResult) -> int:
    """The most misses of a good run. alone: online requests alone."""
    attainment = alone.summary.online.attainment.joint
    num_decided = attainment.num_met + attainment.num_missed
    return attainment.num_missed + int(TOLERANCE * num_decided)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """An option to choose.

    values  that are tried beside the current one
    flag    of SGLang; empty: a key of `Budgets`
    """

    name: str
    text: str
    values: tuple[float, ...]
    flag: str = ""

    def of(self, spec: RunSpec) -> float:
        """Its value in a run."""
        if self.name == "chunk_tokens":
            return float(spec.machine.chunk())
        if self.flag:
            return float(getattr(spec.machine, self.name))
        return float(getattr(budgets_of(spec), self.name))

    def set(self, spec: RunSpec, value: float) -> RunSpec:
        """The same run with another value."""
        if self.flag:
            sizes: dict[str, Any] = {self.name: int(value)}
            return replace(spec, machine=replace(spec.machine, **sizes))
        given: dict[str, Any] = dict(dict(spec.config).get("budgets", {}))
        given[self.name] = value
        return spec.configured(budgets=given)

    def say(self, value: float) -> str:
        return f"{self.name} {value:g}"


def budgets_of(spec: RunSpec) -> Budgets:
    return msgspec.convert(dict(dict(spec.config).get("budgets", {})), Budgets)


KNOBS: Mapping[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            name="chunk_tokens",
            text="--chunked-prefill-size of SGLang: most prompt tokens of an iteration",
            values=(512, 1024, 2048, 4096, 8192),
            flag="--chunked-prefill-size",
        ),
        Knob(
            name="max_running_requests",
            text="--max-running-requests of SGLang: how many run at once, of both classes",
            values=(64, 128, 256, 512),
            flag="--max-running-requests",
        ),
        Knob(
            name="aim",
            text="budgets.aim: share of the TPOT target that offline work may use up",
            values=(0.9, 0.97, 0.995),
        ),
        Knob(
            name="ttft_aim",
            text="budgets.ttft_aim: share of the TTFT target within which prefills shall end",
            values=(0.85, 0.95, 1.0),
        ),
        Knob(
            name="burst",
            text="budgets.burst: most time of an iteration with both classes [TPOT targets]",
            values=(1.0, 1.5, 2.0, 3.0),
        ),
        Knob(
            name="idle_share",
            text="budgets.idle_share: most time of one without online requests [TTFT targets]",
            values=(0.15, 0.3, 0.6),
        ),
        Knob(
            name="crowded_share",
            text="budgets.crowded_share: of the KV memory, before iterations get shorter",
            values=(0.1, 0.2, 0.4),
        ),
    )
}
"""In the order of trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """tried: the runs of each knob by value. spec: with the best value of each."""

    spec: RunSpec
    tried: Mapping[str, Mapping[float, Tried]] = field(default_factory=dict)


def sweep(
    spec: RunSpec,
    knobs: Sequence[Knob],
    run: Callable[[Mapping[str, RunSpec]], Mapping[str, Tried]],
) -> Swept:
    """`run` runs specifications side by side, by name."""
    first = run({"as it is": spec})["as it is"]
    tried: dict[str, dict[float, Tried]] = {}
    for knob in knobs:
        now = knob.of(spec)
        others = [value for value in knob.values if value != now]
        results = run({knob.say(value): knob.set(spec, value) for value in others})
        known = {now: first} | {value: results[knob.say(value)] for value in others}
        tried[knob.name] = dict(sorted(known.items()))
        best = best_of({now: first, **known}, current=now)
        if best != now:
            spec, first = knob.set(spec, best), known[best]
    return Swept(spec=spec, tried=tried)
