"""Arrival times: rate curves, and point processes that follow them.

Arrivals of a process with mean gap 1 are mapped through the integral of the rate, so that requests
per minute follow the curve and gaps within a minute have the given coefficient of variation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cosched_traces.errors import WorkloadError
from cosched_traces.seeds import rng_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Requests per second, constant within each step.

    step_s   length of a step [s]
    rates    one rate a step [req/s]
    """

    step_s: float
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates or self.step_s <= 0 or min(self.rates) < 0 or max(self.rates) <= 0:
            raise WorkloadError("a rate curve needs steps of positive length and rates above 0")

    @property
    def duration_s(self) -> float:
        return self.step_s * len(self.rates)

    @property
    def mean(self) -> float:
        return math.fsum(self.rates) / len(self.rates)

    def scaled_to(self, mean: float) -> RateCurve:
        factor = mean / self.mean
        return RateCurve(step_s=self.step_s, rates=tuple(rate * factor for rate in self.rates))


def constant_rate(rate: float, *, duration_s: float) -> RateCurve:
    return RateCurve(step_s=duration_s, rates=(rate,))


def diurnal_rate(
    mean_rate: float,
    *,
    duration_s: float,
    day_s: float = 86_400.0,
    peak_to_trough: float = 4.0,
    peak_at_s: float = 13 * 3600.0,
    step_s: float = 10.0,
) -> RateCurve:
    """The tide of a day (Echo §2.2: peak 12:00-14:00, low 04:00-06:00) as a cosine.

    rate(t) ∝ 1 + a·cos(2π·(t - peak)/day) with a = (r - 1)/(r + 1), r = peak_to_trough; scaled so
    that the curve's mean over `duration_s` is `mean_rate`. t = 0 is midnight; `peak_at_s` is a time
    of a day of 86,400 s. A smaller `day_s` runs the day faster, `peak_at_s` with it.
    Deviation: Echo prints no ratio that could be read; 4 is our assumption.
    """
    if peak_to_trough < 1:
        raise WorkloadError(f"peak_to_trough {peak_to_trough} is below 1")
    depth = (peak_to_trough - 1) / (peak_to_trough + 1)
    times, step_s = _steps(duration_s, step_s)
    phase = 2 * math.pi * (times / day_s - peak_at_s / 86_400.0)
    rates = 1 + depth * np.cos(phase)
    return RateCurve(step_s=step_s, rates=tuple(rates.tolist())).scaled_to(mean_rate)


def correlated_rate(
    mean_rate: float,
    *,
    duration_s: float,
    seed: int,
    cv: float = 0.22,
    correlation: float = 0.83,
    step_s: float = 60.0,
) -> RateCurve:
    """A rate that varies from minute to minute, as in the Azure conversation trace of 2023.

    The log of each step's rate is a first-order autoregression: log r' = c·log r + noise, with c =
    `correlation` and a stationary spread that gives the rates the coefficient of variation `cv`.
    The defaults are the trace's own: over its 58 whole minutes cv 0.22 (191-507 requests a
    minute, mean 333), correlation of neighbouring minutes 0.83. Scaled to the mean asked for.
    """
    rng = rng_of(seed, "correlated-rate")
    spread = math.sqrt(math.log(1 + cv**2))
    times, step_s = _steps(duration_s, step_s)
    noise = rng.normal(size=len(times))
    logs = [spread * noise[0]]
    for value in noise[1:]:
        logs.append(correlation * logs[-1] + spread * math.sqrt(1 - correlation**2) * value)
    rates = tuple(np.exp(logs).tolist())
    return RateCurve(step_s=step_s, rates=rates).scaled_to(mean_rate)


def with_bursts(
    curve: RateCurve,
    *,
    seed: int,
    factor: float = 3.0,
    burst_s: float = 120.0,
    ramp_s: float = 60.0,
    every_s: float = 1200.0,
) -> RateCurve:
    """Bursts on a curve: rates vary by 3x within minutes (HyGen §2).

    One burst at a random place in each stretch of `every_s`: the rate rises over `ramp_s` to
    `factor` times the curve, stays for `burst_s` and falls over `ramp_s`. The mean is kept.
    """
    length_s = burst_s + 2 * ramp_s
    if every_s < length_s or factor < 1:
        raise WorkloadError(f"bursts of {length_s} s do not fit every {every_s} s")
    rng = rng_of(seed, "bursts")
    times, step_s = _steps(curve.duration_s, min(curve.step_s, max(ramp_s, 1.0) / 6, 10.0))
    old = np.minimum((times // curve.step_s).astype(np.int64), len(curve.rates) - 1)
    starts = np.arange(0.0, curve.duration_s, every_s)
    starts += rng.uniform(0, every_s - length_s, size=len(starts))
    shape = np.zeros(len(times))
    for start in starts:
        corners = np.cumsum([start, ramp_s, burst_s, ramp_s])
        shape = np.maximum(shape, np.interp(times, corners, (0.0, 1.0, 1.0, 0.0)))
    rates = np.asarray(curve.rates)[old] * (1 + (factor - 1) * shape)
    return RateCurve(step_s=step_s, rates=tuple(rates.tolist())).scaled_to(curve.mean)


def arrival_times(curve: RateCurve, *, seed: int, cv: float = 1.0) -> tuple[float, ...]:
    """Sorted arrival times in ``[0, duration)`` that follow the curve.

    cv   coefficient of variation of the gaps: 1 a Poisson process, 0 fixed intervals, else a Gamma
         process with shape 1/cv² (cv > 1: requests come in clusters)
    """
    if cv < 0:
        raise WorkloadError(f"cv {cv} is negative")
    area = np.concatenate([[0.0], np.cumsum(np.asarray(curve.rates) * curve.step_s)])
    edges = np.arange(len(area)) * curve.step_s
    rng = rng_of(seed, "arrivals")
    units = np.empty(0)
    last = 0.0
    while last < area[-1]:
        size = int(area[-1] - last) + 64
        gaps = np.ones(size) if cv == 0 else rng.gamma(1 / cv**2, cv**2, size=size)
        units = np.concatenate([units, last + np.cumsum(gaps)])
        last = float(units[-1])
    if cv == 0:
        units = units - 1  # the first request arrives at 0
    times = np.interp(units[units < area[-1]], area, edges)
    return tuple(times[times < curve.duration_s].tolist())


def _steps(duration_s: float, step_s: float) -> tuple[npt.NDArray[np.float64], float]:
    """Starts of equal steps that cover the duration exactly, and their length: `step_s` or a little
    less."""
    if duration_s <= 0 or step_s <= 0:
        raise WorkloadError(f"duration {duration_s} s in steps of {step_s} s covers nothing")
    num_steps = math.ceil(duration_s / step_s - 1e-9)
    step_s = duration_s / num_steps
    return np.arange(num_steps, dtype=np.float64) * step_s, step_s
