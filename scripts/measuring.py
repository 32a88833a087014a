"""What the measurements of this folder share: their options, runs side by side, tables, the last
line."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cosched.benchmark.progress import progress_of_runs
from cosched.command_line import Parser, add_json_option, run_command
from cosched.simulation.options import SEED
from cosched.simulation.parallel import call_all, execute_named
from cosched.simulation.run import RunResult, RunSpec
from cosched.simulation.store import ResultStore

__all__ = ["calls_of", "end", "parser_of", "resident_bytes", "runs_of", "show", "show_rows"]

Row = Mapping[str, Any]


def parser_of(script: str, text: str | None, *, jobs: int | None = None) -> argparse.ArgumentParser:
    """A parser with what every measurement has. jobs: how many runs at a time, where there are any;
    None: no such option."""
    parser = Parser(prog=Path(script).name, description=text)
    parser.add_argument("--seed", type=SEED, default=0, help="(%(default)s)")
    if jobs is not None:
        parser.add_argument("--jobs", type=int, default=jobs, help="runs at a time (%(default)s)")
    add_json_option(parser)
    return parser


def end(
    parser: argparse.ArgumentParser, execute: Callable[[argparse.Namespace], Mapping[str, Any]]
) -> None:
    """Measure, and print the last line: what `execute` returns, versions and options. Exits with
    one sentence where that fails."""
    arguments = parser.parse_args()
    arguments.execute = execute
    run_command(arguments, packages=["numpy"], with_config=True)


def calls_of(
    measure: Callable[..., Row], args: argparse.Namespace, cases: Iterable[tuple[Any, ...]]
) -> list[Row]:
    """`measure(args, *case)` of all cases, each in a process of its own."""
    options = argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "execute"})
    calls = [(options, *case) for case in cases]
    runs = call_all(measure, calls, num_jobs=args.jobs)
    done = track(runs, description="runs", total=len(calls), console=Console(file=sys.stderr))
    return [row for _, row in sorted(done, key=itemgetter(0))]


def runs_of(
    label: str,
    specs: Sequence[RunSpec],
    *,
    num_jobs: int,
    store: ResultStore | None,
    quiet: bool = False,
) -> list[RunResult]:
    """Results in the order of the specs."""
    with progress_of_runs(label, total=len(specs), quiet=quiet) as on_run:
        results = execute_named(
            dict(enumerate(specs)),
            num_jobs=num_jobs,
            store=store,
            on_run=lambda _, result: on_run(result.spec.scenario.name, result),
        )
    return list(results.values())


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not hide what is allocated next
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(value: Any) -> str:
    """A cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def show_rows(rows: Sequence[Row], *, title: str | None = None) -> None:
    """Rows of the same names as a table."""
    table = Table(title=title, box=None)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(show, row.values()))
    Console(width=220).print(table)
