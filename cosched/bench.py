"""Experiments: online and offline requests on one replica, side by side under several policies.

    python -m cosched.bench suite quick
    python -m cosched.bench suite yardstick --scenarios i,iii --data-dir DIR --write yardstick.md
    python -m cosched.bench check quick
    python -m cosched.bench run --settings s0,hygen,cosched --online azure-like --offline documents
    python -m cosched.bench live --base-url http://127.0.0.1:30000 --online azure-like ...
    python -m cosched.bench compare a.json b.json

`suite` runs an experiment in virtual time: a file with a grid of scenarios, settings and seeds
(`cosched.lab.suite`), and writes its page of results. `check` repeats the cheap rows of such a page
and says which of them no longer hold. `run` compares settings on one workload, `live` measures a
running server, `compare` shows results of `run` and `live` side by side. Every command prints a
table and, as its last line, one JSON object.

How long it takes: docs/simulation.md.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.progress import Progress

from cosched.command_line import (
    JsonOption,
    Kind,
    NewFile,
    NewFolder,
    Parser,
    add_command,
    checked,
    existing_file,
    run_async,
    run_command,
    save_output,
    whole,
)
from cosched.errors import ConfigError, CoschedError
from cosched.files import write_whole
from cosched.lab.benchmark.compare import compare_files
from cosched.lab.benchmark.live import VOCAB_SIZE, LiveTarget, measure_live, print_live
from cosched.lab.benchmark.progress import progress_of_runs
from cosched.lab.metrics import plots
from cosched.lab.metrics.figure import check_can_draw
from cosched.lab.metrics.records import write_records
from cosched.lab.metrics.stats import MOST_VALUES
from cosched.lab.page import Key, Page, cells_of, plot_results, read_page, stale_cells
from cosched.lab.simulation.options import add_run_options, data_dir_of, run_spec_of
from cosched.lab.simulation.run import RunResult, load_requests
from cosched.lab.simulation.setting import SETTINGS, OfflineClient, setting_of
from cosched.lab.simulation.store import ResultStore
from cosched.lab.suite import (
    Outcome,
    Row,
    SuiteFile,
    SuiteScenario,
    SuiteSetting,
    read_suite,
    rows_of,
    run_rows,
    suite_names,
)
from cosched.memory.config import EVICTION_ORDERS
from cosched.versions import versions
from cosched_traces.resize import rescale_lengths
from cosched_traces.transform import rescale_think_times
from cosched_traces.workload import TraceRequest, Workload

RUN_COLUMNS = (
    *("both met %", "TTFT p50 s", "TTFT p99 s", "TPOT p50 ms", "TPOT p99 ms", "job done s"),
    *("mean completion s", "work/s", "of bound %", "offline tokens/s", "offline hit %"),
    "preemptions",
)
"""Of the table of `run`."""

RESULTS = Path("out/results")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def _settings(text: str) -> tuple[str, ...]:
    return tuple(checked(setting_of)(name).name for name in _names(text))


Names = Annotated[tuple[str, ...], Kind(_names, "A,B,…")]
Factor = Annotated[float, Kind(None, "X")]
Seeds = Annotated[int, Kind(whole(at_least=1, at_most=MOST_VALUES), "N")]


# The options of each command, which is called as its class. What several have comes first.


class _Simulations(JsonOption):
    """
    jobs   simulations at a time
    quiet  no progress
    """

    jobs: Annotated[int, Kind(whole(at_least=1), "N")] = 2
    quiet: bool = False


class _OfSuite(_Simulations):
    """
    scenarios  only these
    settings   only these
    """

    scenarios: Names = ()
    settings: Names = ()


class Suite(_OfSuite):
    """An experiment: a grid of scenarios, settings and seeds from a file.

    seeds      number of seeds, in place of the suite's
    results    keep each run's result there and do not run it again while the code that made it is
               the same: an interrupted command continues
    data_dir   folder with traces and kernel tables (default: $COSCHED_DATA); without one the
               workloads are generated and the cost model is a roofline
    write      write the page of results there; rows that it has and this command does not run stay
    plot       draw each column against the option that the scenarios vary
    list       list the suites
    """

    seeds: Seeds | None = None
    results: NewFolder = RESULTS
    data_dir: Annotated[Path, Kind(Path, "DIR")] | None = None
    write: NewFile | None = None
    plot: NewFile | None = None
    list: bool = False


class Check(_OfSuite):
    """Repeat the cheap rows of a page of results, and name those that no longer hold.

    Ends with 1 where one does not.

    page  default: that of docs/results
    """

    page: Annotated[Path, Kind(existing_file, "FILE")] | None = None


class Run(_Simulations):
    """Settings side by side on one workload.

    settings  policies, yours as module:Class too, and the names below; NAME/ORDER for one that
              evicts KV by another order (docs/kv_memory.md), such as hygen/lru
    seeds     number of seeds, from --seed on: the table shows means and their 95 % intervals
    results   keep each run's result there, and do not run it again while the code is the same
    plot      write the pictures there
    """

    settings: Annotated[tuple[str, ...], Kind(_settings, "A,B,…", "--settings", "--scenarios")] = (
        "s0",
        "s1",
        "priority",
        "hygen",
        "cosched",
    )
    seeds: Seeds = 1
    results: NewFolder = RESULTS
    plot: NewFolder | None = None


class Live(JsonOption, kw_only=True):
    """One scenario against a running server: stock SGLang, cosched, vLLM.

    Online requests come open-loop at their times; offline ones as --offline-client says. A turn of
    a session is sent when the answer before it has come and been thought about, with that answer in
    its prompt. The server's own policy schedules; name it with --scenario for the table.

    scenario        row of the table
    vocab_size      prompts made of token ids stay below it
    offline_client  cap: a fixed number of offline requests in flight; aimd: a gateway that halves
                    or raises that number by the online requests that miss a target; all: all at
                    once, or in waves
    concurrency     offline requests in flight, with aimd at most
    no_priority     do not send `priority`: for servers that refuse it
    length_scale    all prompts and outputs times X, for small models
    think_scale     times between the turns of a session times X
    records         write one JSON line per request there
    plot            write the pictures there
    """

    base_url: Annotated[str, Kind(None, "URL")]
    served_model: Annotated[str, Kind(None, "NAME")] = "default"
    api_key: Annotated[str, Kind(None, "KEY")] | None = None
    scenario: Annotated[str, Kind(None, "NAME")] = "live"
    vocab_size: Annotated[int, Kind(whole(at_least=20), "N")] = VOCAB_SIZE
    offline_client: Annotated[str, Kind(choices=[one.value for one in OfflineClient])] = "cap"
    concurrency: int = 64
    no_priority: bool = False
    length_scale: Factor = 1.0
    think_scale: Factor = 1.0
    records: NewFile | None = None
    plot: NewFolder | None = None


class Compare(JsonOption):
    """Results of earlier runs side by side.

    Files hold the last line of `run` or `live`. Ratios are to s0 of the first file.
    """


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    suite = add_command(commands, Suite, _suite)
    suite.add_argument("suite", nargs="?", metavar="NAME|FILE", help="a suite of --list, or a file")
    check = add_command(commands, Check, _check)
    check.add_argument("suite", metavar="NAME|FILE", help="a suite of `suite --list`, or a file")
    known = "\n".join(f"  {name:<20}{SETTINGS[name].summary}" for name in SETTINGS)
    orders = f"Orders of eviction:\n  {', '.join(EVICTION_ORDERS)}"
    run = add_command(commands, Run, _run, description=f"Settings:\n{known}\n\n{orders}")
    live = add_command(commands, Live, _live)
    for command in (run, live):
        add_run_options(command)
    compare = add_command(commands, Compare, lambda arguments: compare_files(arguments.files))
    compare.add_argument("files", nargs="+", type=existing_file, metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong."""
    run_command(build_parser().parse_args(argv))


def _suite(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.list:
        for name in suite_names():
            print(f"{name:<16}{read_suite(name).title}")
        return {"suites": suite_names()}
    if arguments.suite is None:
        raise ConfigError("name a suite, or --list")
    if arguments.plot is not None:
        check_can_draw()
    suite = read_suite(arguments.suite)
    rows = rows_of(
        suite,
        scenarios=arguments.scenarios,
        settings=arguments.settings,
        num_seeds=arguments.seeds,
        data_dir=data_dir_of(arguments),
    )
    outcomes = _run_rows(arguments, rows, store=ResultStore(arguments.results))
    write = arguments.write
    page = read_page(write) if write is not None and write.exists() else Page()
    commit = {"commit": versions()["commit"] or ""}
    made = {}
    for row, some in zip(rows, outcomes, strict=True):
        made[Key.of(row)] = cells_of(suite.columns, some) | commit
    page.rows |= made
    command = _command(arguments, suite_of=arguments.suite)
    print(Page(made).text(suite, command))
    save_output(arguments, write, lambda path: write_whole(path, page.text(suite, command)))
    save_output(arguments, arguments.plot, lambda path: page.plot(suite, path))
    return {
        "suite": arguments.suite,
        "rows": [
            {
                **key._asdict(),
                "cells": made[key],
                "runs": [
                    {"spec": one.spec.describe(), "summary": one.summary.to_dict(with_host=False)}
                    for one in some
                ],
            }
            for key, some in zip(made, outcomes, strict=True)
        ],
    }


def _command(arguments: argparse.Namespace, *, suite_of: str) -> str:
    """The command that makes the whole page."""
    words = ["python", "-m", "cosched.bench", "suite", suite_of]
    if data_dir_of(arguments) is not None:
        words += ["--data-dir", "DIR"]
    return shlex.join([*words, "--write", str(arguments.write or "FILE")])


def _run_rows(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    *,
    store: ResultStore | None,
    keep: dict[str, RunResult] | None = None,
) -> list[tuple[Outcome, ...]]:
    """keep: gets the result of each row, of its first seed."""
    total = sum(len(row.specs) for row in rows)
    with progress_of_runs(arguments.command, total=total, quiet=arguments.quiet) as show:

        def on_run(name: str, result: RunResult) -> None:
            show(name, result)
            if keep is not None and result.spec.seed == rows[0].specs[0].seed:
                keep[name] = result

        return run_rows(rows, num_jobs=arguments.jobs, store=store, on_run=on_run)


def _check(arguments: argparse.Namespace) -> dict[str, Any]:
    suite = read_suite(arguments.suite)
    path = arguments.page or Path("docs/results") / f"{Path(arguments.suite).stem}.md"
    page = read_page(path)
    rows = [
        row
        for row in rows_of(suite, scenarios=arguments.scenarios, settings=arguments.settings)
        if row.is_cheap and Key.of(row) in page.rows
    ]
    if not rows:
        raise ConfigError(f"{path} has no cheap row of the suite")
    outcomes = _run_rows(arguments, rows, store=None)
    stale = [
        cell
        for row, some in zip(rows, outcomes, strict=True)
        for cell in stale_cells(page, Key.of(row), cells_of(suite.columns, some))
    ]
    if stale:
        raise StaleResultsError("\n".join([f"{path} no longer holds:", *map(str, stale)]))
    print(f"{path}: {len(rows)} rows hold")
    return {"suite": arguments.suite, "num_rows": len(rows)}


class StaleResultsError(CoschedError):
    """Recorded results that the code no longer gives."""

    exit_code = 1


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    base = run_spec_of(arguments, setting_of("s1"))
    if arguments.plot is not None:
        check_can_draw()
    seeds = range(base.seed, base.seed + arguments.seeds)
    rows = [
        Row(
            scenario="run",
            value=None,
            setting=name,
            is_cheap=False,
            specs=tuple(replace(base, setting=setting_of(name), seed=seed) for seed in seeds),
        )
        for name in arguments.settings
    ]
    suite = SuiteFile(
        title="",
        about="",
        columns=RUN_COLUMNS,
        scenarios={"run": SuiteScenario()},
        settings={name: SuiteSetting() for name in arguments.settings},
    )
    drawn: dict[str, RunResult] = {}
    outcomes = _run_rows(
        arguments,
        rows,
        store=ResultStore(arguments.results),
        keep=drawn if arguments.plot is not None else None,
    )
    cells = {
        Key.of(row): cells_of(suite.columns, some) for row, some in zip(rows, outcomes, strict=True)
    }
    print(Page(cells).table(suite, "run"))
    save_output(arguments, arguments.plot, lambda folder: plot_results(folder, drawn))
    return {
        "scenarios": {
            row.setting: {
                "scenario": row.setting,
                "attainment": some[0].summary.online.attainment.joint.ratio,
                "offline_tokens_per_s": some[0].summary.offline.tokens_per_s,
                "cells": cells[Key.of(row)],
                "spec": some[0].spec.describe(),
                "end_s": some[0].end_s,
                "summary": some[0].summary.to_dict(with_host=False),
            }
            for row, some in zip(rows, outcomes, strict=True)
        }
    }


def _live(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.plot is not None:
        check_can_draw()
    entry = replace(
        setting_of("s1"), name=arguments.scenario, client=OfflineClient(arguments.offline_client)
    )
    spec = replace(
        run_spec_of(arguments, entry),
        cap=arguments.concurrency,
        max_concurrency=arguments.concurrency,
    )
    target = LiveTarget(
        base_url=arguments.base_url,
        model=arguments.served_model,
        vocab_size=arguments.vocab_size,
        send_priority=not arguments.no_priority,
        api_key=arguments.api_key,
    )
    online, offline = (_scaled(requests, arguments) for requests in load_requests(spec))
    with Progress(disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(arguments.scenario, total=spec.end_s)
        result = run_async(
            measure_live(
                target,
                spec,
                online,
                offline,
                on_progress=lambda progress: bar.update(task, completed=progress.now_s),
            )
        )
    print_live([result])
    save_output(arguments, arguments.records, lambda path: write_records(result.records, path))
    save_output(
        arguments,
        arguments.plot,
        lambda folder: plots.write_run_plots(
            folder,
            plots.Run(records=result.records, window=result.summary.window, default_slo=spec.slo),
        ),
    )
    return {"scenarios": {arguments.scenario: {**result.to_row(), "base_url": arguments.base_url}}}


def _scaled(
    requests: Sequence[TraceRequest], arguments: argparse.Namespace
) -> Sequence[TraceRequest]:
    workload = Workload(name="live", requests=tuple(requests))
    if arguments.length_scale != 1:
        scale = arguments.length_scale
        workload = rescale_lengths(workload, prompt=scale, output=scale)
    return rescale_think_times(workload, arguments.think_scale).requests


if __name__ == "__main__":
    main()
