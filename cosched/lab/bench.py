"""Experiments: online and offline requests on one replica, side by side under several policies.

`suite` runs an experiment in virtual time: a file with a grid of scenarios, settings and seeds
(`cosched.lab.suite`), and writes its page of results. `check` repeats the cheap rows of such a page
and names those that no longer hold. `run` compares settings on one workload. Every command prints a
table and, as its last line, one JSON object. `cosched trial` measures live servers.

    cosched bench suite quick
    cosched bench suite yardstick --scenarios 'h100-8b/*' --data-dir DIR --write yardstick.md
    cosched bench check quick
    cosched bench run --settings s0,hygen,cosched --online azure-like --offline documents

How long it takes: docs/simulation.md.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from cosched.cli import (
    Count,
    JsonOption,
    Names,
    NewFile,
    NewFolder,
    OldFile,
    new_app,
    run,
    whole,
)
from cosched.errors import ConfigError, CoschedError
from cosched.files import write_whole
from cosched.lab.benchmark.progress import progress_of_runs
from cosched.lab.metrics.figure import check_can_draw
from cosched.lab.metrics.stats import MOST_VALUES
from cosched.lab.page import Key, Page, cells_of, chosen_cell, plot_results, read_page, stale_cells
from cosched.lab.simulation.options import DataDir, RunOptions, data_dir_of, run_spec_of
from cosched.lab.simulation.result_store import ResultStore
from cosched.lab.simulation.run import RunResult
from cosched.lab.simulation.setting import SETTINGS, setting_of
from cosched.lab.suite import Outcome, Row, num_runs, rows_of, run_rows
from cosched.lab.suite_file import (
    SuiteFile,
    SuiteScenario,
    SuiteSetting,
    read_suite,
    suite_names,
)
from cosched.policies import EVICTION_NAMES
from cosched.versions import versions

RUN_COLUMNS = (
    *("both met %", "TTFT p50 s", "TTFT p99 s", "TPOT p50 ms", "TPOT p99 ms", "job done s"),
    *("mean completion s", "work/s", "of bound %", "offline tokens/s", "offline hit %"),
    "preemptions",
)
"""Columns of the table of `run`."""

RUN_SETTINGS = ("s0", "s1", "priority", "hygen", "cosched")

RESULTS = Path("out/results")

app = new_app("bench", __doc__)
main = partial(run, "bench")

Seeds = Annotated[int, whole(1, MOST_VALUES)]


@dataclass(kw_only=True)
class _Simulations(JsonOption):
    jobs: Count = 2
    """simulations at a time"""
    quiet: bool = False
    """no progress"""

    def run_rows(
        self,
        rows: Sequence[Row],
        *,
        store: ResultStore | None,
        keep: dict[str, RunResult] | None = None,
        on_row: Callable[[Row, tuple[Outcome, ...]], object] = lambda row, outcomes: None,
    ) -> list[tuple[Outcome, ...]]:
        """keep: gets the result of each row, of its first seed. on_row: of `run_rows`."""
        total = num_runs(rows)
        label = type(self).__name__.lower()
        with progress_of_runs(label, total=total, quiet=self.quiet) as show:

            def on_run(name: str, result: RunResult) -> None:
                show(name, result)
                if keep is not None and result.spec.seed == rows[0].specs[0].seed:
                    keep[name] = result

            return run_rows(rows, num_jobs=self.jobs, store=store, on_run=on_run, on_row=on_row)


@dataclass(kw_only=True)
class _OfSuite(_Simulations):
    scenarios: Names = ()
    """only these scenarios, by name or pattern, such as h100*"""
    settings: Names = ()
    """only these settings"""


@app.command
@dataclass(kw_only=True)
class Suite(_OfSuite):
    """Run an experiment: a grid of scenarios, settings and seeds from a file."""

    suite: Annotated[str | None, Parameter(metavar="NAME|FILE")] = field(
        default=None, kw_only=False
    )
    """a suite of --list, or a file"""
    seeds: Seeds | None = None
    """number of seeds, in place of the suite's"""
    results: NewFolder = RESULTS
    """keep each run's result in this folder, and do not repeat the run while the code that made it
    is unchanged: an interrupted command continues"""
    data_dir: DataDir = None
    """folder with traces and kernel tables; default: $COSCHED_DATA; without one the workloads are
    generated and the cost model is a roofline"""
    write: NewFile | None = None
    """write the page of results; rows of the page that this command does not run stay"""
    missing: bool = False
    """run only rows that the page of --write has not, whatever code the others were made by"""
    plot: NewFile | None = None
    """draw each column against the option that the scenarios vary; the page of --write shows it"""
    list: bool = False
    """list the suites"""

    def __call__(self) -> int:
        if self.list:
            for name in suite_names():
                print(f"{name:<16}{read_suite(name).title}")
            return self.finish({"suites": suite_names()})
        if self.suite is None:
            raise ConfigError("name a suite, or --list")
        if self.plot is not None:
            check_can_draw()
        suite = read_suite(self.suite)
        rows = rows_of(
            suite,
            scenarios=self.scenarios,
            settings=self.settings,
            num_seeds=self.seeds,
            data_dir=data_dir_of(self.data_dir),
        )
        is_there = self.write is not None and self.write.exists()
        page = read_page(self.write) if self.write is not None and is_there else Page()
        if self.missing:
            rows = [row for row in rows if Key.of(row) not in page.rows]
        text = partial(page.text, suite, self._command(self.suite), self._picture())
        commit = {"commit": versions()["commit"] or ""}
        made: dict[Key, dict[str, str]] = {}

        def on_row(row: Row, outcomes: tuple[Outcome, ...]) -> None:
            cells = cells_of(suite.measured, outcomes, spread=suite.spread)
            if row.chosen:
                cells["chosen"] = chosen_cell(row.chosen)
            made[Key.of(row)] = page.rows[Key.of(row)] = cells | commit
            self.save(self.write, lambda path: write_whole(path, text()))

        outcomes = self.run_rows(rows, store=ResultStore(self.results), on_row=on_row)
        if sys.stdout.isatty():
            for name in dict.fromkeys(row.scenario for row in rows):
                print(f"{name}: {suite.grid[name].title}")
                Page(made).print(suite, name)
        else:
            print(Page(made).text(suite, self._command(self.suite)))
        self.save(self.write, lambda path: write_whole(path, text()))
        self.save(self.plot, lambda path: page.plot(suite, path))
        return self.finish(
            {
                "suite": self.suite,
                "rows": [
                    {
                        **Key.of(row)._asdict(),
                        "cells": made[Key.of(row)],
                        "runs": [_described(one) for one in some],
                    }
                    for row, some in zip(rows, outcomes, strict=True)
                ],
            }
        )

    def _command(self, suite: str) -> str:
        """The command that makes the whole page."""
        words = ["python", "-m", "cosched.bench", "suite", suite]
        if data_dir_of(self.data_dir) is not None:
            words += ["--data-dir", "DIR"]
        words += ["--write", str(self.write or "FILE")]
        return shlex.join([*words, *(["--plot", str(self.plot)] if self.plot is not None else [])])

    def _picture(self) -> str | None:
        """The drawing of --plot, as seen from the page of --write."""
        if self.plot is None or self.write is None:
            return None
        return os.path.relpath(self.plot, self.write.parent)


def _described(one: Outcome) -> Mapping[str, Any]:
    return {"spec": one.spec.describe(), "summary": one.summary.to_dict(with_host=False)}


@app.command
@dataclass(kw_only=True)
class Check(_OfSuite):
    """Repeat the cheap rows of a page of results, and name those that no longer hold.

    The exit code is 1 if one does not hold.
    """

    suite: Annotated[str, Parameter(metavar="NAME|FILE")] = field(kw_only=False)
    """a suite of `suite --list`, or a file"""
    page: OldFile | None = None
    """default: the suite's page in docs/results"""

    def __call__(self) -> int:
        suite = read_suite(self.suite)
        path = self.page or Path("docs/results") / f"{Path(self.suite).stem}.md"
        page = read_page(path)
        rows = [
            row
            for row in rows_of(suite, scenarios=self.scenarios, settings=self.settings)
            if row.is_cheap and Key.of(row) in page.rows
        ]
        if not rows:
            raise ConfigError(f"{path} has no cheap row of the suite")
        outcomes = self.run_rows(rows, store=None)
        stale = [
            cell
            for row, some in zip(rows, outcomes, strict=True)
            for cell in stale_cells(
                page, Key.of(row), cells_of(suite.measured, some, spread=suite.spread)
            )
        ]
        if stale:
            raise StaleResultsError("\n".join([f"{path} no longer holds:", *map(str, stale)]))
        print(f"{path}: {len(rows)} rows hold")
        return self.finish({"suite": self.suite, "num_rows": len(rows)})


class StaleResultsError(CoschedError):
    """Recorded results that the code no longer gives."""

    exit_code = 1


@app.command(
    help_epilogue="Settings:\n\n"
    + "\n".join(f"* {name}: {entry.summary}" for name, entry in SETTINGS.items())
    + f"\n\nOrders of eviction: {', '.join(EVICTION_NAMES)}."
)
@dataclass(kw_only=True)
class Run(_Simulations):
    """Compare settings on one workload."""

    settings: Annotated[Names, Parameter(name=("--settings", "--scenarios"))] = RUN_SETTINGS
    """policies, your own as module:Class too, and the settings below; NAME/ORDER for one that
    evicts KV in another order (docs/architecture.md), such as hygen/lru"""
    seeds: Seeds = 1
    """number of seeds, from --seed on: the table shows means and their 95 % intervals"""
    results: NewFolder = RESULTS
    """keep each run's result there, and do not repeat the run while the code is unchanged"""
    plot: NewFolder | None = None
    """write plots to this folder"""
    run: Annotated[RunOptions, Parameter(name="*")] = field(default_factory=RunOptions)

    def __call__(self) -> int:
        base = run_spec_of(self.run, setting_of("s1"))
        settings = [setting_of(name) for name in self.settings]
        if self.plot is not None:
            check_can_draw()
        seeds = range(base.seed, base.seed + self.seeds)
        rows = [
            Row(
                scenario="run",
                value=None,
                setting=setting.name,
                is_cheap=False,
                specs=tuple(replace(base, setting=setting, seed=seed) for seed in seeds),
            )
            for setting in settings
        ]
        suite = SuiteFile(
            title="",
            about="",
            columns=RUN_COLUMNS,
            scenarios={"run": SuiteScenario()},
            settings={setting.name: SuiteSetting() for setting in settings},
        )
        drawn: dict[str, RunResult] = {}
        outcomes = self.run_rows(
            rows,
            store=ResultStore(self.results),
            keep=drawn if self.plot is not None else None,
        )
        cells = {
            Key.of(row): cells_of(suite.columns, some)
            for row, some in zip(rows, outcomes, strict=True)
        }
        if sys.stdout.isatty():
            Page(cells).print(suite, "run")
        else:
            print(Page(cells).table(suite, "run"))
        self.save(self.plot, lambda folder: plot_results(folder, drawn))
        return self.finish(
            {
                "scenarios": {
                    row.setting: {
                        "scenario": row.setting,
                        "attainment": some[0].summary.online.attainment.joint.ratio,
                        "offline_tokens_per_s": some[0].summary.offline.tokens_per_s,
                        "cells": cells[Key.of(row)],
                        "end_s": some[0].end_s,
                        **_described(some[0]),
                    }
                    for row, some in zip(rows, outcomes, strict=True)
                }
            }
        )
