"""How a job shows that it gets on: a bar for people, plain lines for logs."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["Meter", "Reporter", "Snapshot", "make_reporter"]

_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a job stands. `num_done` includes the failed lines and those of earlier calls."""

    num_lines: int
    num_done: int
    num_failed: int
    trouble: str | None = None


class Meter:
    """Lines per second over the last minute, so that the ETA forgets how the job began."""

    def __init__(self, *, now_s: float, num_done: int) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now_s, num_done)])

    def rate(self, *, now_s: float, num_done: int) -> float:
        """Add a sample; lines per second since the oldest one kept."""
        self._samples.append((now_s, num_done))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()
        began_s, began_done = self._samples[0]
        return (num_done - began_done) / (now_s - began_s) if now_s > began_s else 0.0


class Reporter(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_reporter(*, every_s: float, num_done: int) -> Reporter:
    """A bar when stderr is a terminal, else one line every `every_s` seconds."""
    meter = Meter(now_s=time.monotonic(), num_done=num_done)
    return Bar(meter) if sys.stderr.isatty() else PlainLines(meter, every_s=every_s)


class Bar:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self._task = self._progress.add_task("", text="starting", total=None)

    def show(self, snapshot: Snapshot) -> None:
        rate = self._meter.rate(now_s=time.monotonic(), num_done=snapshot.num_done)
        self._progress.update(
            self._task,
            total=snapshot.num_lines,
            completed=snapshot.num_done,
            text=_text(snapshot, rate),
        )

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class PlainLines:
    def __init__(self, meter: Meter, *, every_s: float) -> None:
        self._meter = meter
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s

    def show(self, snapshot: Snapshot) -> None:
        now_s = time.monotonic()
        rate = self._meter.rate(now_s=now_s, num_done=snapshot.num_done)
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            print(f"run_batch: {_text(snapshot, rate)}", file=sys.stderr, flush=True)

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


def _text(snapshot: Snapshot, rate: float) -> str:
    share = snapshot.num_done / snapshot.num_lines if snapshot.num_lines else 1.0
    eta = _duration((snapshot.num_lines - snapshot.num_done) / rate) if rate > 0 else "unknown"
    text = (
        f"{snapshot.num_done}/{snapshot.num_lines} lines ({share:.1%}), "
        f"{snapshot.num_failed} failed, {rate:.1f} lines/s, ETA {eta}"
    )
    return f"{text}; {snapshot.trouble}" if snapshot.trouble else text


def _duration(seconds: float) -> str:
    minutes, left_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left_s:02}"
