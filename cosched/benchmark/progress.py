"""What a command shows while its runs are under way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cosched.simulation.run import RunResult

__all__ = ["progress_of_runs"]


@contextmanager
def progress_of_runs(
    label: str, *, total: int | None, quiet: bool
) -> Iterator[Callable[[str, RunResult], None]]:
    """Gives a function to call with the name and the result of each run that is done: a bar on a
    terminal, else a line on stderr. `total` None: not known."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        disable=quiet or not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(label or "runs", total=total)

        def on_run(name: str, result: RunResult) -> None:
            bar.update(task, advance=1)
            if bar.disable and not quiet:
                print(
                    f"{label} {name}: {result.end_s:.0f} s in {result.wall_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

        yield on_run
