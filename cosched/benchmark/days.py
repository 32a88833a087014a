"""How much offline work days of chat leave room for (Echo §5.4, step 2).

A day takes hours to simulate, so the rate of offline tokens is simulated at a few rates of the
online requests, and read off between them for every window of the days. Within a window the
arrivals are those of the online workload; what one window leaves to the next is not seen.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cosched.benchmark.progress import progress_of_runs
from cosched.errors import ConfigError
from cosched.metrics.plots_sweep import Panel, plot_panels
from cosched.metrics.table import markdown_rows, shown
from cosched.simulation.parallel import execute_named
from cosched.simulation.run import RunSpec
from cosched.simulation.store import ResultStore

__all__ = [
    "Day",
    "Days",
    "Load",
    "Point",
    "day_by_day",
    "plot_days",
    "print_days",
    "read_load",
    "run_days",
]

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rates of online requests, a window after the other.

    times_s    when each window begins
    rates      of its online requests [1/s]
    num_holes  windows without any request, which are gaps in a busy service's record: left out
    """

    times_s: tuple[float, ...]
    rates: tuple[float, ...]
    num_holes: int = 0

    def scaled(self, peak: float) -> Load:
        """The same with `peak` requests per second in the busiest window."""
        factor = peak / max(self.rates)
        return replace(self, rates=tuple(rate * factor for rate in self.rates))


def read_load(path: Path) -> Load:
    """From a CSV file, gzipped or not, with the columns ``t_s`` [s] and ``rate_rps`` [1/s].
    ConfigError names what is wrong with it."""
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        rows = [(float(r["t_s"]), float(r["rate_rps"])) for r in csv.DictReader(io.StringIO(text))]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{path} has no column {error}; it needs t_s and rate_rps") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a row that is no number: {error}") from error
    kept = sorted((t, rate) for t, rate in rows if rate > 0)
    if not kept:
        raise ConfigError(f"{path} has no window with online requests")
    times, rates = zip(*kept, strict=True)
    return Load(times_s=times, rates=rates, num_holes=len(rows) - len(kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was simulated at one rate of online requests [1/s]."""

    online_rate: float
    attainment: float | None
    offline_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """Means over a day; 0 stands for all of them.

    attainment  of the day's online requests; None where none was simulated
    """

    day: int
    online_rate: float
    attainment: float | None
    offline_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Days:
    """points  by rate; the first is offline requests alone
    days    each mean over the day's windows
    """

    load: Load
    points: tuple[Point, ...]
    days: tuple[Day, ...]

    @property
    def total(self) -> Day:
        """Over all days."""
        return _mean(0, self.load.rates, self.points)

    def to_dict(self) -> dict[str, Any]:
        return {
            "points": [asdict(point) for point in self.points],
            "days": [asdict(day) for day in self.days],
            "total": asdict(self.total),
            "share_of_alone": self.total.offline_tokens_per_s / self.points[0].offline_tokens_per_s,
            "num_windows": len(self.load.rates),
            "num_holes": self.load.num_holes,
        }


def _at(rates: Sequence[float], points: Sequence[Point]) -> tuple[Any, Any]:
    """(attainment, offline tokens/s) at each rate, read off between the points."""
    x = [point.online_rate for point in points]
    served = np.interp(rates, x, [point.offline_tokens_per_s for point in points])
    judged = [point for point in points if point.attainment is not None]
    if not judged:
        return None, served
    met = np.interp(rates, [p.online_rate for p in judged], [p.attainment or 0.0 for p in judged])
    return met, served


def _mean(day: int, rates: Sequence[float], points: Sequence[Point]) -> Day:
    met, served = _at(rates, points)
    return Day(
        day=day,
        online_rate=float(np.mean(rates)),
        attainment=None if met is None else float(np.average(met, weights=rates)),
        offline_tokens_per_s=float(np.mean(served)),
    )


def day_by_day(load: Load, points: Sequence[Point]) -> tuple[Day, ...]:
    """Day 1 begins at the time 0 of the load."""
    by_day: dict[int, list[float]] = {}
    for time_s, rate in zip(load.times_s, load.rates, strict=True):
        by_day.setdefault(int(time_s // DAY_S) + 1, []).append(rate)
    return tuple(_mean(day, rates, points) for day, rates in by_day.items())


def run_days(
    base: RunSpec,
    load: Load,
    *,
    num_points: int,
    num_jobs: int,
    quiet: bool,
    store: ResultStore | None,
) -> Days:
    """Simulate offline requests alone and beside `num_points` rates up to the load's highest."""
    assert base.online is not None, "there are online requests"
    highest = max(load.rates)
    rates = [highest * (1 + i) / num_points for i in range(num_points)]
    specs = {0.0: replace(base, scenario=replace(base.scenario, has_online=False))}
    specs |= {rate: replace(base, online=replace(base.online, rate=rate)) for rate in rates}
    with progress_of_runs("days", total=len(specs), quiet=quiet) as on_run:
        results = execute_named(
            specs,
            num_jobs=num_jobs,
            store=store,
            on_run=lambda rate, result: on_run(f"{rate:.3g} req/s", result),
        )
    known = tuple(
        Point(
            online_rate=rate,
            attainment=result.summary.online.attainment.joint.ratio,
            offline_tokens_per_s=result.summary.offline.tokens_per_s or 0.0,
        )
        for rate, result in results.items()
    )
    return Days(load=load, points=known, days=day_by_day(load, known))


def print_days(days: Days) -> None:
    headers = ("online req/s", "both met %", "offline tok/s")
    print(markdown_rows(headers, map(_cells, days.points)))
    rows = (
        (f"{day.day}", *_cells(day), f"{day.offline_tokens_per_s * DAY_S / 1e6:,.0f}")
        for day in days.days
    )
    of_days = ("day", f"mean {headers[0]}", *headers[1:], "million offline tokens")
    print(markdown_rows(of_days, rows))
    total = days.total
    alone = days.points[0].offline_tokens_per_s
    print(
        f"Over all: {total.offline_tokens_per_s:,.0f} offline tokens/s beside "
        f"{total.online_rate:.3g} online requests/s, {total.offline_tokens_per_s / alone:.0%} of "
        "what the machine serves of them alone; both targets met "
        f"{shown(total.attainment, '.1f', 100)} %. "
        f"{days.load.num_holes} of {days.load.num_holes + len(days.load.rates)} windows are holes."
    )


def _cells(of: Point | Day) -> tuple[str, ...]:
    met = shown(of.attainment, ".1f", 100)
    return f"{of.online_rate:.3g}", met, f"{of.offline_tokens_per_s:,.0f}"


def plot_days(days: Days, path: Path) -> Path:
    """Online requests and offline tokens over time. Needs matplotlib."""
    _, served = _at(days.load.rates, days.points)
    at = [time_s / DAY_S for time_s in days.load.times_s]

    def panel(title: str, y: str, values: Sequence[float]) -> Panel:
        return Panel(title=title, x="day", y=y, lines={y: list(zip(at, values, strict=True))})

    return plot_panels(
        [
            [
                panel("Online requests", "online req/s", days.load.rates),
                panel("Offline work beside them", "offline tokens/s", list(served)),
            ]
        ],
        path,
    )
