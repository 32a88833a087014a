"""What a call prints: its progress while it runs, then a table and one line of JSON."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from cosched.batch.jsonl.batch_api import RemoteBatch
from cosched.batch.jsonl.client import Trouble
from cosched.cli import print_for_programs
from cosched.versions import versions

_RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a job. `num_done` includes the failed lines and lines of earlier calls;
    `num_tokens`, of prompts and answers, is of this call. `num_begun`: how much of the lines in
    flight is generated, in lines. `left_s`: what the server expects [s]; None: it does not say."""

    num_lines: int
    num_done: int
    num_failed: int
    num_in_flight: int = 0
    num_begun: float = 0.0
    num_tokens: int = 0
    left_s: float | None = None
    trouble: Trouble | None = None

    @property
    def progress(self) -> float:
        """Lines that are done, and the parts of those in flight."""
        return min(self.num_done + self.num_begun, float(self.num_lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second, over the last minute. left_s: None as long as too few lines are done."""

    lines_per_s: float
    tokens_per_s: float
    left_s: float | None


class Meter:
    """Rates over the last minute, so that the time left does not depend on the start of the job.

    Answers come in bunches, the first ones late. So the time left is known only once as many lines
    are done as are in flight at a time.
    """

    def __init__(self, *, now_s: float, num_done: int) -> None:
        self._began_done = num_done
        self._most_in_flight = 0
        self._samples: deque[tuple[float, int, int]] = deque([(now_s, num_done, 0)])

    def rates(self, snapshot: Snapshot, *, now_s: float) -> Rates:
        """Add a sample; rates since the oldest one kept."""
        self._samples.append((now_s, snapshot.num_done, snapshot.num_tokens))
        self._most_in_flight = max(self._most_in_flight, snapshot.num_in_flight)
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - _RATE_WINDOW_S:
            self._samples.popleft()
        began_s, began_done, began_tokens = self._samples[0]
        seconds = now_s - began_s
        lines_per_s = (snapshot.num_done - began_done) / seconds if seconds > 0 else 0.0
        is_known = snapshot.num_done - self._began_done >= max(self._most_in_flight, 1)
        left = snapshot.num_lines - snapshot.num_done
        return Rates(
            lines_per_s=lines_per_s,
            tokens_per_s=(snapshot.num_tokens - began_tokens) / seconds if seconds > 0 else 0.0,
            left_s=left / lines_per_s if is_known and lines_per_s > 0 else None,
        )


class Reporter:
    """On stderr: a bar on a terminal, otherwise one line every `every_s` seconds."""

    def __init__(self, *, every_s: float, num_done: int) -> None:
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s
        self._meter = Meter(now_s=time.monotonic(), num_done=num_done)
        self._printed_reason: str | None = None
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
                refresh_per_second=2,
            )
            self._task = self._bar.add_task("", text="starting", total=None)

    def show(self, snapshot: Snapshot) -> None:
        now_s = time.monotonic()
        text = _progress_text(snapshot, self._meter.rates(snapshot, now_s=now_s))
        reason = None if snapshot.trouble is None else snapshot.trouble.reason
        if self._bar is not None:
            # Above the bar, which is cut at the width of the terminal.
            if reason is not None and reason != self._printed_reason:
                self._bar.console.print(f"run_batch: {reason}", markup=False)
            self._printed_reason = reason
            self._bar.update(
                self._task, total=snapshot.num_lines, completed=snapshot.progress, text=text
            )
        elif now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            text += f": {reason}" if reason is not None else ""
            print(f"run_batch: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _progress_text(snapshot: Snapshot, rates: Rates) -> str:
    share = snapshot.progress / snapshot.num_lines if snapshot.num_lines else 1.0
    parts = [f"{snapshot.num_done}/{snapshot.num_lines} lines ({share:.1%})"]
    if snapshot.num_failed:
        parts.append(f"{snapshot.num_failed} failed")
    parts.append(f"{snapshot.num_in_flight} in flight")
    if rates.lines_per_s > 0:
        parts.append(f"{rates.lines_per_s:.3g} lines/s, {rates.tokens_per_s:,.0f} tokens/s")
    left_s = rates.left_s if snapshot.left_s is None else snapshot.left_s
    if left_s is not None:
        parts.append(f"about {_duration(left_s)} left")
    text = ", ".join(parts)
    if (trouble := snapshot.trouble) is not None:
        text += f"; no answer for {trouble.waited_s:.0f} s of at most {trouble.limit_s:g}"
    return text


def _duration(seconds: float) -> str:
    for unit, length_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


def print_report(
    *, exit_code: int, message: str | None, config: dict[str, Any], results: dict[str, Any]
) -> None:
    table = Table("run_batch", "", show_header=False)
    counts = results["counts"]
    # If a run failed before it had an answer, the message is enough. A validation has no answers.
    if exit_code == 0 or counts.get("answered", 1) or counts.get("failed"):
        for name, value in _rows(results):
            table.add_row(name, value)
    # Linux counts in kB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    entry = {
        "program": "run_batch",
        "exit_code": exit_code,
        "message": message,
        "config": config,
        "versions": versions("httpx"),
        **results,
        "peak_rss_mib": round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1),
    }
    try:
        if table.row_count:
            Console(file=sys.stdout).print(table)
        print_for_programs(msgspec.json.encode(entry).decode())
    except OSError as error:  # for example, stdout is a file on a full disk
        print(f"run_batch: cannot write the report: {error.strerror}", file=sys.stderr, flush=True)


def print_batches(
    found: Sequence[RemoteBatch], *, is_fetched: Callable[[RemoteBatch], bool]
) -> None:
    """A table of the batches of a job, then one line of JSON."""
    names = ["batch", "status", "lines", "answered", "failed", "ETA"]
    names.append("risk of missing the deadline")
    table = Table(*(Column(name, overflow="fold") for name in names))  # no id is cut off
    for one in found:
        counts, forecast = one.request_counts, one.cosched
        eta = risk = ""
        if forecast is not None:
            if forecast.finish_s is not None:
                eta = f"{forecast.finish_s:,.0f} s"
            elif forecast.state != "measured":  # a batch with all its results has no forecast
                eta = forecast.state
            risk = "" if forecast.miss_chance is None else f"{forecast.miss_chance:.1%}"
        table.add_row(
            one.id,
            one.status + ", fetched" * is_fetched(one),
            *(f"{count:,}" for count in (counts.total, counts.completed, counts.failed)),
            eta,
            risk,
        )
    Console(file=sys.stdout).print(table)
    entries = [{**msgspec.to_builtins(one), "is_fetched": is_fetched(one)} for one in found]
    print_for_programs(msgspec.json.encode({"program": "run_batch", "batches": entries}).decode())


def _rows(results: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in results.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            rows += _rows(value, prefix=f"{name}: ")
        else:
            rows.append((name, f"{value:,}" if isinstance(value, int | float) else str(value)))
    return rows
