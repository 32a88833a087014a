"""What a command shows while its runs are under way."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cosched.lab.simulation.run import RunResult

_AT_ONCE_S = 0.1
"""A result that follows so soon was kept from an earlier call: it says nothing of the others."""


@contextmanager
def progress_of_runs(
    label: str, *, total: int | None, quiet: bool, is_estimate: bool = False
) -> Iterator[Callable[[str, RunResult], None]]:
    """Gives a function to call with the name and the result of each run that is done: a bar on a
    terminal, else a line on stderr. `total` None: not known; `is_estimate`: a few more or fewer."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        disable=quiet or not sys.stderr.isatty(),
    )
    began_s = last_s = time.monotonic()
    num_done = num_run = 0
    about = "about " if is_estimate else ""
    with bar:
        task = bar.add_task(label or "runs", total=total, left="")

        def on_run(name: str, result: RunResult) -> None:
            nonlocal num_done, num_run, last_s
            now_s = time.monotonic()
            num_done += 1
            num_run += now_s - last_s > _AT_ONCE_S
            last_s = now_s
            num_left = 0 if total is None else total - num_done
            left = time_left(num_run, num_left, elapsed_s=now_s - began_s)
            bar.update(task, advance=1, left=left, description=f"{label} {name} done")
            if bar.disable and not quiet:
                count = f"{num_done}" if total is None else f"{num_done} of {about}{total}"
                print(
                    f"{label} {count} {name}: {result.end_s:.0f} s in {result.wall_s:.0f} s"
                    + (f"; {left}" if left else ""),
                    file=sys.stderr,
                    flush=True,
                )

        yield on_run


def time_left(num_run: int, num_left: int, *, elapsed_s: float) -> str:
    """As though the rest took as long per run; empty where that is not known, or nothing is left.

    Runs differ by a factor of ten and the slowest end last, so it is no more than an order of size.
    """
    if num_left <= 0 or num_run <= 0:
        return ""
    left_s = elapsed_s * num_left / num_run
    if left_s < 90:
        return f"about {max(5, round(left_s / 5) * 5)} s left"
    return f"about {left_s / 60:.0f} min left"


def virtual_time_bar(*, quiet: bool) -> Progress:
    """A progress bar of seconds of virtual time; none without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} s of virtual time"),
        TimeRemainingColumn(),
        disable=quiet or not sys.stderr.isatty(),
    )
