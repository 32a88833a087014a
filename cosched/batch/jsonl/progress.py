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

from cosched.batch.jsonl.client import Trouble

_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a job stands. `num_done` includes the failed lines and those of earlier calls;
    `num_tokens`, of prompts and answers, is of this call."""

    num_lines: int
    num_done: int
    num_failed: int
    num_under_way: int = 0
    num_tokens: int = 0
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second, over the last minute. left_s: None while too little is known to say."""

    lines_per_s: float
    tokens_per_s: float
    left_s: float | None


class Meter:
    """Rates over the last minute, so that the time left forgets how the job began.

    Answers come in bunches, the first ones late: as many requests as are under way at a time must
    have been answered before the rate says anything about the rest.
    """

    def __init__(self, *, now_s: float, num_done: int) -> None:
        self._began_done = num_done
        self._most_under_way = 0
        self._samples: deque[tuple[float, int, int]] = deque([(now_s, num_done, 0)])

    def rates(self, snapshot: Snapshot, *, now_s: float) -> Rates:
        """Add a sample; rates since the oldest one kept."""
        self._samples.append((now_s, snapshot.num_done, snapshot.num_tokens))
        self._most_under_way = max(self._most_under_way, snapshot.num_under_way)
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()
        began_s, began_done, began_tokens = self._samples[0]
        seconds = now_s - began_s
        num_lines = snapshot.num_done - began_done
        lines_per_s = num_lines / seconds if seconds > 0 else 0.0
        is_known = snapshot.num_done - self._began_done >= max(self._most_under_way, 1)
        return Rates(
            lines_per_s=lines_per_s,
            tokens_per_s=(snapshot.num_tokens - began_tokens) / seconds if seconds > 0 else 0.0,
            left_s=(
                (snapshot.num_lines - snapshot.num_done) / lines_per_s
                if is_known and lines_per_s > 0
                else None
            ),
        )


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
        self._told: str | None = None

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.trouble is None:
            self._told = None
        elif snapshot.trouble.reason != self._told:
            # Above the bar, which is cut at the width of the terminal.
            self._told = snapshot.trouble.reason
            self._progress.console.print(
                f"run_batch: {self._told}", soft_wrap=True, markup=False, highlight=False
            )
        rates = self._meter.rates(snapshot, now_s=time.monotonic())
        self._progress.update(
            self._task,
            total=snapshot.num_lines,
            completed=snapshot.num_done,
            text=_text(snapshot, rates),
        )

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class PlainLines:
    def __init__(self, meter: Meter, *, every_s: float) -> None:
        self._meter = meter
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s

    def show(self, snapshot: Snapshot) -> None:
        now_s = time.monotonic()
        rates = self._meter.rates(snapshot, now_s=now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            text = _text(snapshot, rates)
            if snapshot.trouble is not None:
                text += f": {snapshot.trouble.reason}"
            print(f"run_batch: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _text(snapshot: Snapshot, rates: Rates) -> str:
    share = snapshot.num_done / snapshot.num_lines if snapshot.num_lines else 1.0
    parts = [f"{snapshot.num_done}/{snapshot.num_lines} lines ({share:.1%})"]
    if snapshot.num_failed:
        parts.append(f"{snapshot.num_failed} failed")
    parts.append(f"{snapshot.num_under_way} under way")
    if rates.lines_per_s > 0:
        parts.append(f"{rates.lines_per_s:.3g} lines/s, {rates.tokens_per_s:,.0f} tokens/s")
    if rates.left_s is not None:
        parts.append(f"about {_duration(rates.left_s)} left")
    text = ", ".join(parts)
    if snapshot.trouble is not None:
        trouble = snapshot.trouble
        text += f"; no answer for {trouble.waited_s:.0f} s of at most {trouble.limit_s:g}"
    return text


def _duration(seconds: float) -> str:
    """As exact as an estimate can be."""
    for unit, length_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(1, round(seconds))} s"
