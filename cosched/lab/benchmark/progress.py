"""Progress of runs."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cosched.lab.simulation.run import RunResult


@contextmanager
def progress_of_runs(
    label: str, *, total: int | None = None, quiet: bool
) -> Iterator[Callable[[str, RunResult], None]]:
    """A function to call with the name and the result of each finished run: it shows a bar on a
    terminal, else a line on stderr. total: runs; None: not known."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        disable=quiet or not sys.stderr.isatty(),
    )
    numbers = itertools.count(1)
    with bar:
        task = bar.add_task(label or "runs", total=total)

        def on_run(name: str, result: RunResult) -> None:
            bar.update(task, advance=1, description=f"{label} {name} done")
            if bar.disable and not quiet:
                of = "" if total is None else f" of {total}"
                print(
                    f"{label} {next(numbers)}{of} {name}: "
                    f"{result.end_s:.0f} s in {result.wall_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

        yield on_run


def virtual_time_bar(*, quiet: bool) -> Progress:
    """A progress bar of seconds of virtual time; none without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} s of virtual time"),
        TimeRemainingColumn(),
        disable=quiet or not sys.stderr.isatty(),
    )


_LOG_EVERY_S = 10.0


def live_bars() -> Progress:
    """For the phases of a live measurement (`phase_bar`)."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
        disable=not console.is_terminal,
    )


def phase_bar(bars: Progress, name: str, *, total_s: float) -> Callable[[str, float], None]:
    """Shows what a phase does and its elapsed time [s]: a bar on a terminal; in a log a line at the
    start of each of its stages, and one every 10 s."""
    task = bars.add_task(name, text="", total=total_s)
    is_log = not bars.console.is_terminal
    last_stage, next_s = "", 0.0

    def show(text: str, done_s: float) -> None:
        nonlocal last_stage, next_s
        stage, now_s = text.partition(":")[0], time.monotonic()
        done_s = min(max(0.0, done_s), total_s)
        if is_log and (stage != last_stage or now_s >= next_s):
            last_stage, next_s = stage, now_s + _LOG_EVERY_S
            print(f"{name}: {text} ({done_s:.0f} of {total_s:.0f} s)", file=sys.stderr, flush=True)
        bars.update(task, completed=done_s, text=text)

    return show
