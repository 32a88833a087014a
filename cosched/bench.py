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
from typing import Any

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
from cosched.benchmark.yardstick import run_yardstick, yardstick_page
from cosched.command_line import (
    Parser,
    add_json_option,
    add_version_option,
    checked,
    existing_file,
    number,
    output_file,
    output_folder,
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
from cosched.simulation.options import (
    SEED,
    add_run_options,
    run_spec_of,
)
from cosched.simulation.run import RunSpec, WorkloadSpec, load_requests
from cosched.simulation.scenario import SCENARIOS, OfflineClient, scenario
from cosched.simulation.store import ResultStore
from cosched_traces.resize import rescale_lengths
from cosched_traces.transform import rescale_think_times
from cosched_traces.workload import TraceRequest, Workload

__all__ = ["main"]


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.bench", description=__doc__)
    add_version_option(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_yardstick(commands)
    _add_knee(commands)
    _add_tolerance(commands)
    _add_robustness(commands)
    _add_days(commands)
    _add_live(commands)
    _add_fidelity(commands)
    _add_compare(commands)
    return parser


def _add_run(commands: Any) -> None:
    known = "\n".join(f"  {name:<20}{SCENARIOS[name].summary}" for name in SCENARIOS)
    parser = commands.add_parser(
        "run",
        help="scenarios side by side on one workload",
        description=f"Scenarios:\n{known}\n  "
        f"{', '.join(name for name in TUNINGS if name not in SCENARIOS)}: at their best settings",
    )
    parser.add_argument(
        "--scenarios",
        type=_scenarios,
        default=ALL_SCENARIOS,
        metavar="A,B,…",
        help="also policies of yours as module:Class, and NAME/ORDER for one that evicts KV by "
        f"another order ({', '.join(EVICTION_ORDERS)}; docs/kv_memory.md), such as hygen/lru or "
        "priority/priority (default: all)",
    )
    add_run_options(parser)
    _add_common(parser)
    _add_results(parser)
    _add_seeds(parser)
    parser.add_argument(
        "--plot", type=output_folder, metavar="DIR", help="write the pictures there"
    )
    parser.set_defaults(execute=_run)


def _add_yardstick(commands: Any) -> None:
    parser = commands.add_parser(
        "yardstick",
        help="the table every policy is held against (docs/yardstick.md)",
    )
    add_run_options(parser, slo_of_rows="; some rows have their own")
    _add_common(parser)
    _add_results(parser)
    _add_seeds(parser)
    parser.add_argument(
        "--scenarios", type=_scenarios, default=ALL_SCENARIOS, metavar="A,B,…", help="default: all"
    )
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the page there")
    parser.set_defaults(execute=_yardstick)


def _add_knee(commands: Any) -> None:
    parser = commands.add_parser(
        "knee",
        help="the highest online rate that meets the SLO",
        description="State a load as a share of this rate; practitioners run bursts at 0.88.",
    )
    add_run_options(parser)
    _add_common(parser)
    parser.add_argument(
        "--attainment",
        type=number(above=0, at_most=1),
        default=0.99,
        metavar="SHARE",
        help="of the online requests that must meet their targets (default: %(default)s)",
    )
    parser.add_argument(
        "--share",
        type=number(above=0, at_most=1),
        default=0.88,
        help="load to state (default: %(default)s)",
    )
    parser.set_defaults(execute=_knee)


def _add_tolerance(commands: Any) -> None:
    parser = commands.add_parser(
        "tolerance",
        help="offline work for a tolerance of the online latency: hygen and hygen-throttled",
        description="For each metric and tolerance the largest latency budget of hygen and the "
        "largest offline rate of hygen-throttled that keep the metric within the tolerance above "
        "the online requests alone (HyGen's Fig. 3 and 4).",
    )
    parser.add_argument(
        "--metrics",
        type=_names,
        default=METRICS,
        metavar="A,B,…",
        help=f"as in the goals of `cosched.profile slo` (default: {','.join(METRICS)})",
    )
    parser.add_argument(
        "--tolerances",
        type=_shares,
        default=TOLERANCES,
        metavar="%,%,…",
        help=f"growth allowed (default: {','.join(f'{100 * t:g}' for t in TOLERANCES)})",
    )
    parser.add_argument(
        "--precision",
        type=number(above=0, below=1),
        default=0.05,
        metavar="SHARE",
        help="relative, of the values found (default: %(default)s)",
    )
    _add_sweep(parser)
    parser.set_defaults(execute=_tolerance)


def _add_robustness(commands: Any) -> None:
    parser = commands.add_parser(
        "robustness",
        help="policies with an ever worse predictor",
        description="Every prediction of a plan is multiplied by a random factor of mean 1 "
        "(docs/predictors.md); errors are its standard deviations. With --slower also on a GPU "
        "that becomes so much slower once it has worked for --slower-after.",
    )
    parser.add_argument(
        "--scenarios",
        type=_policies,
        default=(Config().policy,),
        metavar="A,B,…",
        help=f"default: {Config().policy}",
    )
    parser.add_argument(
        "--errors",
        type=_shares,
        default=ERRORS,
        metavar="%,%,…",
        help=f"default: {','.join(f'{100 * error:g}' for error in ERRORS)}",
    )
    _add_sweep(parser)
    parser.set_defaults(execute=_robustness)


def _add_days(commands: Any) -> None:
    parser = commands.add_parser(
        "days",
        help="offline work beside days of chat, from their rate (Echo §5.4)",
        description="Simulates --policy alone with the offline set and beside a few rates of "
        "online requests, --duration each, and reads the rest off between them for every window "
        "of --load.",
    )
    parser.add_argument(
        "--load",
        type=existing_file,
        required=True,
        metavar="FILE",
        help="rates of the online requests: CSV, gzipped or not, with columns t_s and rate_rps",
    )
    parser.add_argument(
        "--peak",
        type=number(above=0),
        required=True,
        metavar="REQ/S",
        help="rate of the busiest window, to which the load is scaled",
    )
    parser.add_argument(
        "--points",
        type=whole(at_least=2),
        default=6,
        metavar="N",
        help="rates that are simulated (default: %(default)s)",
    )
    parser.add_argument(
        "--policy", type=checked(known_policy), default=Config().policy, metavar="NAME"
    )
    _add_sweep(parser)
    parser.set_defaults(execute=_days)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    _add_common(parser)
    _add_results(parser)
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="write the picture there")


def _add_live(commands: Any) -> None:
    parser = commands.add_parser(
        "live",
        help="one scenario against a running server: stock SGLang, cosched, vLLM",
        description="Online requests come open-loop at their times; offline ones as "
        "--offline-client says. A turn of a session is sent when the answer before it has come and "
        "been thought about, with that answer in its prompt. The server's own policy schedules; "
        "name it with --scenario for the table.",
    )
    parser.add_argument("--base-url", required=True, metavar="URL")
    parser.add_argument("--served-model", default="default", metavar="NAME")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--scenario", default="live", metavar="NAME", help="row of the table")
    parser.add_argument(
        "--vocab-size",
        type=whole(at_least=20),
        default=VOCAB_SIZE,
        metavar="N",
        help="prompts made of token ids stay below it (default: %(default)s)",
    )
    parser.add_argument(
        "--offline-client",
        choices=[client.value for client in OfflineClient],
        default=OfflineClient.CAP.value,
        help="cap: a fixed number of offline requests in flight; aimd: a gateway that halves or "
        "raises that number by the online requests that miss a target; all: all at once, or in "
        "waves (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=whole(at_least=1),
        default=64,
        help="offline requests in flight, with aimd at most (default: %(default)s)",
    )
    parser.add_argument(
        "--no-priority",
        action="store_true",
        help="do not send `priority`: for servers that refuse it",
    )
    parser.add_argument(
        "--length-scale",
        type=number(above=0),
        default=1.0,
        metavar="X",
        help="all prompts and outputs times X, for small models (default: %(default)g)",
    )
    parser.add_argument(
        "--think-scale",
        type=number(above=0),
        default=1.0,
        metavar="X",
        help="times between the turns of a session times X (default: %(default)g)",
    )
    add_run_options(parser)
    parser.add_argument(
        "--records", type=output_file, metavar="FILE", help="write one JSON line per request there"
    )
    parser.add_argument(
        "--plot", type=output_folder, metavar="DIR", help="write the pictures there"
    )
    add_json_option(parser)
    parser.set_defaults(execute=_live)


def _add_fidelity(commands: Any) -> None:
    parser = commands.add_parser(
        "fidelity",
        help="a live CPU server against its own simulation",
        description="Serves the demo model, measures its iterations, and runs one workload live "
        "and in virtual time; with a cache that holds and with one that thrashes.",
    )
    parser.add_argument("--size", choices=["tiny", "demo"], default="demo", help="of the model")
    parser.add_argument("--duration", type=number(above=0), default=60.0, metavar="S")
    parser.add_argument("--online-rate", type=number(above=0), default=1.0, metavar="REQ/S")
    parser.add_argument(
        "--policy", "--cosched-policy", type=checked(known_policy), default="sarathi"
    )
    parser.add_argument("--seed", type=SEED, default=0)
    add_json_option(parser)
    parser.set_defaults(execute=_fidelity)


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="results of earlier runs side by side",
        description="Files hold the last line of `run`. Ratios are to s0 of the first file.",
    )
    parser.add_argument("files", nargs="+", type=existing_file, metavar="FILE")
    add_json_option(parser)
    parser.set_defaults(execute=lambda arguments: compare_files(arguments.files))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=whole(at_least=1),
        default=2,
        help="simulations at a time (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_json_option(parser)


def _add_seeds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds",
        type=whole(at_least=1, at_most=MOST_VALUES),
        default=1,
        metavar="N",
        help="run everything with so many seeds, from --seed on, and show the mean and its 95 %% "
        "interval (default: %(default)s)",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results",
        type=output_folder,
        metavar="DIR",
        help="keep each run's result there and do not run again what is there: an interrupted "
        "comparison goes on, a new policy is added to old ones. A result of one of cosched's "
        "policies counts as long as its code is the same; empty the folder after a change to the "
        "simulation itself",
    )


def _store(arguments: argparse.Namespace) -> ResultStore | None:
    return None if arguments.results is None else ResultStore(arguments.results)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong."""
    run_command(build_parser().parse_args(argv))


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    base = run_spec_of(arguments, scenario("s1"))
    if arguments.plot is not None:
        check_can_draw()
    suite = run_suite(
        base,
        arguments.scenarios,
        num_jobs=arguments.jobs,
        num_seeds=arguments.seeds,
        quiet=arguments.quiet,
        store=_store(arguments),
    )
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
    suites = run_yardstick(
        arguments,
        num_jobs=arguments.jobs,
        quiet=arguments.quiet,
        names=arguments.scenarios,
        store=_store(arguments),
    )
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
            num_jobs=arguments.jobs,
            quiet=arguments.quiet,
            store=_store(arguments) or ResultStore(Path(folder)),
        )
    print_tolerances(sweep)
    save_output(arguments, arguments.plot, lambda path: plot_tolerances(sweep, path))
    return {"spec": base.describe(), **sweep.to_dict()}


def _robustness(arguments: argparse.Namespace) -> dict[str, Any]:
    base = _both_classes(arguments)
    robustness = run_robustness(
        base,
        arguments.scenarios,
        arguments.errors,
        num_jobs=arguments.jobs,
        quiet=arguments.quiet,
        store=_store(arguments),
    )
    print_robustness(robustness)
    save_output(arguments, arguments.plot, lambda path: plot_robustness(robustness, path))
    return {"spec": base.describe(), "rows": rows_of(robustness)}


def _days(arguments: argparse.Namespace) -> dict[str, Any]:
    base = replace(_both_classes(arguments), scenario=scenario(arguments.policy))
    days = run_days(
        base,
        read_load(arguments.load).scaled(arguments.peak),
        num_points=arguments.points,
        num_jobs=arguments.jobs,
        quiet=arguments.quiet,
        store=_store(arguments),
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
