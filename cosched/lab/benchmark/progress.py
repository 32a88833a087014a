"""Progress of runs."""

from __future__ import annotations

import itertools
import sys
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


@contextmanager
def progress_of_runs(
    label: str, *, total: int, quiet: bool
) -> Iterator[Callable[[str, RunResult], None]]:
    """A function to call with the name and the result of each finished run: it shows a bar on a
    terminal, else a line on stderr."""
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
                print(
                    f"{label} {next(numbers)} of {total} {name}: "
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
