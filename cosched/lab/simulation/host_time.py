"""Host time in virtual time: ``--host-time none|measured|FACTOR``.

The overlap scheduler prepares the next iteration and processes the results of the last one while
the device runs; host time beyond that is idle time of the device (`virtual`). HTTP, tokenizer and
detokenizer are other processes and not included; copies of inputs and kernel launches are a
constant of the cost models (`cosched.lab.cost_models.cost_model.OVERLAPPED`)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from operator import mul
from typing import Protocol

from cosched.errors import ConfigError
from cosched.policies import PolicyEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of the host.

    num_running   requests with a slot; of a result: requests in its batch
    num_prefills  requests of the batch with prompt tokens
    num_waiting   requests in the queue
    """

    num_running: int
    num_prefills: int
    num_waiting: int


class HostTime(Protocol):
    @property
    def after_wait_s(self) -> float:
        """From the end of a wait for the last moment to the launch, without `launch_s` [s]."""
        ...

    def launch_s(self, load: Load) -> float:
        """Receive requests, plan and build a batch [s]."""
        ...

    def result_s(self, load: Load) -> float:
        """Process the result of a batch [s]."""
        ...

    def left_out(self) -> contextlib.AbstractContextManager[None]:
        """Context for work of the simulation itself."""
        ...


class NoHostTime:
    """A host that takes no time, except for a constant after each wait for the last moment."""

    after_wait_s = 0.006
    """Mean time of scheduling on a slow machine (docs/results/host_time.md)."""

    def launch_s(self, load: Load) -> float:
        return 0.0

    def result_s(self, load: Load) -> float:
        return 0.0

    def left_out(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Measured:
    """Wall time of this run."""

    after_wait_s = 0.0

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_s: float | None = None

    def launch_s(self, load: Load) -> float:
        return self._lap_s()

    def result_s(self, load: Load) -> float:
        return self._lap_s()

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        began_s = self._clock()
        yield
        if self._began_s is not None:
            self._began_s += self._clock() - began_s

    def _lap_s(self) -> float:
        now_s = self._clock()
        began_s = now_s if self._began_s is None else self._began_s
        self._began_s = now_s
        return now_s - began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Coefficients of host time, which is linear [s]; all are at least 0.

    each               of every iteration
    running            for each running request
    prefilling         of a batch with prefills
    prefill            for each of these
    waiting            for each waiting request
    waiting_prefilling  the same, of a batch with prefills
    """

    each: float = 0.0
    running: float = 0.0
    prefilling: float = 0.0
    prefill: float = 0.0
    waiting: float = 0.0
    waiting_prefilling: float = 0.0

    @staticmethod
    def factors(load: Load) -> tuple[float, ...]:
        """Of the terms, in order."""
        prefilling = load.num_prefills > 0
        waiting = load.num_waiting
        return 1, load.num_running, prefilling, load.num_prefills, waiting, prefilling * waiting

    def seconds(self, load: Load) -> float:
        seconds: float = sum(map(mul, astuple(self), self.factors(load)))
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Host time of a kind of scheduling times a factor."""

    launch: Terms
    result: Terms
    factor: float = 1.0
    after_wait_s: float = 0.0

    def launch_s(self, load: Load) -> float:
        return self.factor * self.launch.seconds(load)

    def result_s(self, load: Load) -> float:
        return self.factor * self.result.seconds(load)

    def left_out(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


MODELS = {
    "fcfs": Model(
        launch=Terms(
            each=132e-6,
            running=2.4e-6,
            prefilling=722e-6,
            prefill=243e-6,
            waiting_prefilling=0.76e-6,
        ),
        result=Terms(each=43e-6, running=9.9e-6, prefilling=352e-6, prefill=267e-6),
    ),
    "priority": Model(
        launch=Terms(
            running=7.1e-6,
            prefilling=1074e-6,
            prefill=243e-6,
            waiting=0.73e-6,
            waiting_prefilling=2.26e-6,
        ),
        result=Terms(running=13.3e-6, prefilling=979e-6, prefill=207e-6),
    ),
    "planned": Model(
        launch=Terms(each=1302e-6, running=4.0e-6, prefilling=2301e-6, prefill=659e-6),
        result=Terms(each=754e-6, running=13.3e-6, prefill=323e-6),
    ),
}
"""By kind of scheduling: stock, stock priority, and policies that plan (`hygen` and `cosched`).
Fitted by `scripts/fit_host_time.py` of commit e746876 (seed 0, SGLang 0.5.23, November 2026) to 600
iterations at each of 50, 200 and 500 request slots, on two shared virtual cores (AMD EPYC). The
lower decile of the thread's time is fitted, because other processes only make it longer. Terms
below a nanosecond, and the waiting requests of a result, are left out."""


def kind_of(entry: PolicyEntry) -> str:
    """The key in `MODELS`."""
    if entry.make is not None:
        return "planned"
    return "priority" if entry.name == "priority" else "fcfs"


def read_host_time(text: str) -> str:
    """A valid setting of `host_time`, else ConfigError."""
    if text in ("none", "measured"):
        return text
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor <= 100:
        raise ConfigError(
            f"host time {text!r} is neither none nor measured nor a factor above 0 and at most 100"
        )
    return f"{factor:g}"


def host_time(setting: str, entry: PolicyEntry) -> HostTime:
    """Host time under a policy."""
    if setting == "none":
        return NoHostTime()
    if setting == "measured":
        return Measured()
    return replace(MODELS[kind_of(entry)], factor=float(setting))
