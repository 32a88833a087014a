"""The two-class benchmark: online and offline requests on one replica, scenario by scenario.

    python -m cosched.bench run --online azure-like --online-rate 2.5 --offline documents
    python -m cosched.bench yardstick --data-dir DIR
    python -m cosched.bench knee --online azure-like --online-rate 2.5
    python -m cosched.bench tolerance --online azure-like --online-rate 2 --offline documents
    python -m cosched.bench robustness --online azure-like --online-rate 2 --offline documents
    python -m cosched.bench days --load rates.csv --peak 2.5 --online azure-like --offline documents
    python -m cosched.bench live --base-url http://127.0.0.1:30000 --online azure-like ...
    python -m cosched.bench fidelity
    python -m cosched.bench compare a.json b.json

`run` takes scenarios side by side on one workload in virtual time: online alone (s0), offline
alone under stock orders, both uncontrolled (s1), gateways with a static cap and with AIMD, stock
priority scheduling, and cosched's policies; NAME-tuned is a baseline at its best. `knee` finds the
highest online rate that still meets the SLO, to state a load as a share of it. `tolerance` finds
what offline work a given growth of an online latency buys, `robustness` what a wrong predictor
costs, `days` how much offline work days of chat leave room for. Every command prints a table and,
as its last line, one JSON object.

How long it takes (docs/simulation.md): longest are the scenarios in which everything waits, and the
searches for a baseline's best setting, of 6 to 100 simulations each. `run` and `yardstick` say
what is done and what is left.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.progress import Progress

from cosched.benchmark.compare import compare_files
from cosched.benchmark.days import plot_days, print_days, read_load, run_days
from cosched.benchmark.fidelity import FidelityCase, run_fidelity
from cosched.benchmark.live import VOCAB_SIZE, LiveTarget, measure_live, print_live
from cosched.benchmark.report import markdown_table, write_plots
from cosched.benchmark.robustness import (
    ERRORS,
    plot_robustness,
    print_robustness,
    rows_of,
    run_robustness,
)
from cosched.benchmark.suite import ALL_SCENARIOS, SuiteResult, known_scenario, run_suite
from cosched.benchmark.tolerance import (
    METRICS,
    TOLERANCES,
    plot_tolerances,
    print_tolerances,
    sweep_tolerances,
)
from cosched.benchmark.tuned import TUNINGS
from cosched.benchmark.yardstick import MOST_DURATION_S, run_yardstick, yardstick_page
from cosched.command_line import (
    JsonOption,
    Kind,
    NewFile,
    NewFolder,
    OldFile,
    Parser,
    Part,
    Seconds,
    Share,
    add_command,
    checked,
    existing_file,
    number,
    run_async,
    run_command,
    save_output,
    whole,
)
from cosched.config import Config
from cosched.demo_model import ensure_demo_model
from cosched.errors import ConfigError
from cosched.files import write_whole
from cosched.kv.config import EVICTION_ORDERS
from cosched.metrics.figure import check_can_draw
from cosched.metrics.interval import MOST_VALUES
from cosched.metrics.plots import write_run_plots
from cosched.metrics.records import write_records
from cosched.metrics.table import print_table
from cosched.policy.registry import known_policy
from cosched.simulation.find import find
from cosched.simulation.machine import Machine
from cosched.simulation.options import SEED, add_run_options, run_spec_of
from cosched.simulation.run import RunSpec, WorkloadSpec, load_requests
from cosched.simulation.scenario import SCENARIOS, OfflineClient, scenario
from cosched.simulation.store import ResultStore
from cosched_traces.resize import rescale_lengths
from cosched_traces.transform import rescale_think_times
from cosched_traces.workload import TraceRequest, Workload

__all__ = ["main"]


def _shares(text: str) -> tuple[float, ...]:
    """Percentages as shares."""
    percent = number(at_least=0, at_most=1000)
    return tuple(percent(part.strip()) / 100 for part in _names(text))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def _scenarios(text: str) -> tuple[str, ...]:
    return tuple(checked(known_scenario)(name) for name in _names(text))


def _policies(text: str) -> tuple[str, ...]:
    return tuple(checked(known_policy)(name) for name in _names(text))


def _percents(shares: Sequence[float]) -> str:
    return "default: " + ",".join(f"{100 * share:g}" for share in shares)


_OF_METRICS = f"as in the goals of `cosched.profile slo` (default: {','.join(METRICS)})"
_GROWTH = f"growth allowed ({_percents(TOLERANCES)})"
_SPREAD = _percents(ERRORS)

Policy = Annotated[str, Kind(checked(known_policy), "NAME")]
Factor = Annotated[float, Kind(None, "X")]
Rate = Annotated[float, Kind(None, "REQ/S")]


# The options of each command, which is called as its class. What several have comes first.


class _Simulations(JsonOption):
    """
    jobs   simulations at a time
    quiet  no progress
    """

    jobs: int = 2
    quiet: bool = False


class _Kept(_Simulations):
    """
    results  keep each run's result there and do not run again what is there: an interrupted
             comparison goes on, a new policy is added to old ones. A result of one of cosched's
             policies counts as long as its code is the same; empty the folder after a change to
             the simulation itself
    """

    results: NewFolder | None = None


class _Compared(_Kept):
    """
    scenarios  also policies of yours as module:Class, and NAME/ORDER for one that evicts KV by
               another order (docs/kv_memory.md), such as hygen/lru or priority/priority (default:
               all)
    seeds      run everything with so many seeds, from --seed on, and show the mean and its 95 %
               interval
    """

    scenarios: Annotated[tuple[str, ...], Kind(_scenarios, "A,B,…")] = ALL_SCENARIOS
    seeds: Annotated[int, Kind(whole(at_least=1, at_most=MOST_VALUES), "N")] = 1


class Run(_Compared):
    """Scenarios side by side on one workload.

    plot  write the pictures there
    """

    plot: NewFolder | None = None


class Yardstick(_Compared):
    """The table every policy is held against (docs/yardstick.md).

    write  write the page there
    """

    write: NewFile | None = None


class Knee(_Simulations):
    """The highest online rate that meets the SLO.

    State a load as a share of this rate; practitioners run bursts at 0.88.

    attainment  of the online requests that must meet their targets
    share       load to state
    """

    attainment: Share = 0.99
    share: Share = 0.88


class _Sweep(_Kept):
    """
    plot  write the picture there
    """

    plot: NewFile | None = None


class Tolerance(_Sweep):
    """Offline work for a tolerance of the online latency: hygen and hygen-throttled.

    For each metric and tolerance the largest latency budget of hygen and the largest offline rate
    of hygen-throttled that keep the metric within the tolerance above the online requests alone
    (HyGen's Fig. 3 and 4).

    precision  relative, of the values found
    """

    metrics: Annotated[tuple[str, ...], Kind(_names, "A,B,…", help=_OF_METRICS)] = METRICS
    tolerances: Annotated[tuple[float, ...], Kind(_shares, "%,%,…", help=_GROWTH)] = TOLERANCES
    precision: Part = 0.05


class Robustness(_Sweep):
    """Policies with an ever worse predictor.

    Every prediction of a plan is multiplied by a random factor of mean 1 (docs/predict.md);
    errors are its standard deviations. With --slower also on a GPU that becomes so much slower
    once it has worked for --slower-after.

    scenarios  default: the server's default policy
    """

    scenarios: Annotated[tuple[str, ...], Kind(_policies, "A,B,…")] = (Config().policy,)
    errors: Annotated[tuple[float, ...], Kind(_shares, "%,%,…", help=_SPREAD)] = ERRORS


class Days(_Sweep, kw_only=True):
    """Offline work beside days of chat, from their rate (Echo §5.4).

    Simulates --policy alone with the offline set and beside a few rates of online requests,
    --duration each, and reads the rest off between them for every window of --load.

    load    rates of the online requests: CSV, gzipped or not, with columns t_s and rate_rps
    peak    rate of the busiest window, to which the load is scaled
    points  rates that are simulated
    """

    load: OldFile
    peak: Rate
    points: Annotated[int, Kind(whole(at_least=2), "N")] = 6
    policy: Policy = Config().policy


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


class Fidelity(JsonOption):
    """A live CPU server against its own simulation.

    Serves the demo model, measures its iterations, and runs one workload live and in virtual time;
    with a cache that holds and with one that thrashes.

    size  of the model
    """

    size: Annotated[str, Kind(choices=["tiny", "demo"])] = "demo"
    duration: Seconds = 60.0
    online_rate: Rate = 1.0
    policy: Annotated[Policy, Kind(None, None, "--policy", "--cosched-policy")] = "sarathi"
    seed: Annotated[int, Kind(SEED)] = 0


class Compare(JsonOption):
    """Results of earlier runs side by side.

    Files hold the last line of `run`. Ratios are to s0 of the first file.
    """


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known = "\n".join(f"  {name:<20}{SCENARIOS[name].summary}" for name in SCENARIOS)
    tuned = ", ".join(name for name in TUNINGS if name not in SCENARIOS)
    scenarios = f"Scenarios:\n{known}\n  {tuned}: at their best settings"
    orders = f"Orders of eviction:\n  {', '.join(EVICTION_ORDERS)}"
    add_run_options(add_command(commands, Run, _run, description=f"{scenarios}\n\n{orders}"))
    yardstick = add_command(commands, Yardstick, _yardstick)
    add_run_options(yardstick, slo_of_rows="; some rows have their own")
    yardstick.set_defaults(duration_s=MOST_DURATION_S)
    for options, execute in (
        (Knee, _knee),
        (Tolerance, _tolerance),
        (Robustness, _robustness),
        (Days, _days),
        (Live, _live),
    ):
        add_run_options(add_command(commands, options, execute))
    add_command(commands, Fidelity, _fidelity)
    compare = add_command(commands, Compare, lambda arguments: compare_files(arguments.files))
    compare.add_argument("files", nargs="+", type=existing_file, metavar="FILE")
    return parser


def _store(arguments: argparse.Namespace) -> ResultStore | None:
    return None if arguments.results is None else ResultStore(arguments.results)


def _how(arguments: argparse.Namespace) -> dict[str, Any]:
    """How simulations are run, where they are kept."""
    return {"num_jobs": arguments.jobs, "quiet": arguments.quiet, "store": _store(arguments)}


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong."""
    run_command(build_parser().parse_args(argv))


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    base = run_spec_of(arguments, scenario("s1"))
    if arguments.plot is not None:
        check_can_draw()
    suite = run_suite(base, arguments.scenarios, num_seeds=arguments.seeds, **_how(arguments))
    _show(suite)
    save_output(arguments, arguments.plot, lambda folder: write_plots(folder, suite))
    return {"scenarios": suite.to_dict()}


def _show(suite: SuiteResult) -> None:
    print_table(
        {row.name: row.summary for row in suite.rows.values()},
        baseline="s0" if "s0" in suite.rows else None,
    )
    if len(next(iter(suite.seeds.values()))) > 1:
        print(f"over {_say_seeds(suite)}:\n\n{markdown_table(suite.rows, suite.seeds)}")


def _say_seeds(suite: SuiteResult) -> str:
    seeds = [row.result.spec.seed for row in next(iter(suite.seeds.values()))]
    return f"seeds {seeds[0]} to {seeds[-1]}, mean and 95 % interval"


def _yardstick(arguments: argparse.Namespace) -> dict[str, Any]:
    suites = run_yardstick(arguments, names=arguments.scenarios, **_how(arguments))
    for name, suite in suites.items():
        print(f"\n{name}\n\n{markdown_table(suite.rows, suite.seeds)}")
    save_output(
        arguments,
        arguments.write,
        lambda path: write_whole(path, yardstick_page(arguments, suites)),
    )
    return {"workloads": {name: suite.to_dict() for name, suite in suites.items()}}


def _knee(arguments: argparse.Namespace) -> dict[str, Any]:
    answer = find(
        "max-online-rate",
        run_spec_of(arguments, scenario("s0")),
        attainment=arguments.attainment,
        num_jobs=arguments.jobs,
        quiet=arguments.quiet,
    )
    print(answer.sentence())
    load = None if answer.value is None else arguments.share * answer.value
    if load is not None:
        print(f"{arguments.share:.0%} of it: {load:.3g} req/s")
    return {**answer.to_dict(), "share": arguments.share, "load": load}


def _both_classes(arguments: argparse.Namespace) -> RunSpec:
    base = run_spec_of(arguments, scenario("s1"))
    if base.online is None or base.offline is None:
        raise ConfigError("the sweep needs both classes: name --online and --offline")
    if arguments.plot is not None:
        check_can_draw()
    return base


def _tolerance(arguments: argparse.Namespace) -> dict[str, Any]:
    base = _both_classes(arguments)
    with tempfile.TemporaryDirectory(prefix="cosched-results-") as folder:
        sweep = sweep_tolerances(
            base,
            arguments.metrics,
            arguments.tolerances,
            precision=arguments.precision,
            **(_how(arguments) | {"store": _store(arguments) or ResultStore(Path(folder))}),
        )
    print_tolerances(sweep)
    save_output(arguments, arguments.plot, lambda path: plot_tolerances(sweep, path))
    return {"spec": base.describe(), **sweep.to_dict()}


def _robustness(arguments: argparse.Namespace) -> dict[str, Any]:
    base = _both_classes(arguments)
    robustness = run_robustness(base, arguments.scenarios, arguments.errors, **_how(arguments))
    print_robustness(robustness)
    save_output(arguments, arguments.plot, lambda path: plot_robustness(robustness, path))
    return {"spec": base.describe(), "rows": rows_of(robustness)}


def _days(arguments: argparse.Namespace) -> dict[str, Any]:
    base = replace(_both_classes(arguments), scenario=scenario(arguments.policy))
    days = run_days(
        base,
        read_load(arguments.load).scaled(arguments.peak),
        num_points=arguments.points,
        **_how(arguments),
    )
    print_days(days)
    save_output(arguments, arguments.plot, lambda path: plot_days(days, path))
    return {"spec": base.describe(), **days.to_dict()}


def _live(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.plot is not None:
        check_can_draw()
    entry = replace(
        scenario("s1"), name=arguments.scenario, client=OfflineClient(arguments.offline_client)
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
        lambda folder: write_run_plots(
            folder,
            records=result.records,
            window=result.summary.window,
            default_slo=spec.slo,
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


def _fidelity(arguments: argparse.Namespace) -> dict[str, Any]:
    model = ensure_demo_model(size=arguments.size, dtype="float32")
    holds = FidelityCase(
        name="the cache holds",
        model_path=str(model),
        machine=Machine(
            kv_tokens=60_000, chunk_tokens=256, max_running_requests=16, context_length=32_768
        ),
        policy=arguments.policy,
        online=WorkloadSpec(name="alpaca", rate=arguments.online_rate),
        duration_s=arguments.duration,
        seed=arguments.seed,
    )
    thrashes = replace(
        holds, name="the cache thrashes", machine=replace(holds.machine, kv_tokens=12_000)
    )
    results = []
    for case in (holds, thrashes):
        result = run_fidelity(case, show=lambda text: print(text, file=sys.stderr, flush=True))
        print(f"\n{case.name}: {case.machine.kv_tokens} KV tokens")
        for name, value in result.items():
            if isinstance(value, dict):
                print(f"  {name:<18}{_shown(value)}")
        results.append(result)
    return {"fidelity": results, "load_average": os.getloadavg()[0]}


def _shown(value: Mapping[str, float | None]) -> str:
    def number(x: float | None, form: str) -> str:
        return "-" if x is None else format(x, form)

    live, simulated = number(value["live"], ".4g"), number(value["simulated"], ".4g")
    error = number(value["error"], "+.1%")
    return f"live {live:>10}   simulated {simulated:>10}   error {error:>8}"


if __name__ == "__main__":
    main()
