"""What an engine's iterations take, and how much offline work its online requests bear.

    python -m cosched.profile measure --write FILE --virtual [machine options]
    python -m cosched.profile measure --write FILE --model-path MODEL [any SGLang flag]
    python -m cosched.profile slo --slo "p99_ttft<=1000ms" --slo "p99_tbt<=+5%" \\
        --online azure-like --online-rate 2 --offline documents
    python -m cosched.profile slo --slo "p99_tbt<=40ms" --online demo-chat --offline demo-job \\
        --duration 60 --model-path MODEL -- [any SGLang flag]

`measure` drives an engine through designed batches, fits the latency predictor and writes a
profile, with which a policy starts (`--latency-model`) and a simulation can run (`--profile`).
`slo` searches the largest latency budget, or rate of offline requests, with which a workload meets
its goals (HyGen's SLO-aware profiler), in virtual time or, with a model, on servers of its own.
Each prints a table and, as its last line,
one JSON object.

How long it takes: `measure --virtual` some 20 s, a live engine of two CPU cores some minutes (400
batches, 3 times each); `slo` about eight simulations, each as long as `cosched.simulate` takes, or
as many servers that are started, warmed up and loaded for --duration.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # first: makes SGLang importable

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cosched.command_line import (
    Count,
    JsonOption,
    Kind,
    NewFile,
    Parser,
    Part,
    add_command,
    add_options,
    introduction,
    run_command,
    save_output,
    whole,
)
from cosched.config import Config, configured
from cosched.core.batch import BatchShape, BatchTotals
from cosched.engine.arguments import bind_cpu_threads, check_arguments, engine_arguments
from cosched.errors import ConfigError, choices
from cosched.files import write_whole
from cosched.lab.benchmark.live import VOCAB_SIZE, LiveResult
from cosched.lab.benchmark.own_server import OwnServers, leave_a_core_free
from cosched.lab.cost_models.base import PrefixReads
from cosched.lab.cost_models.specs import GPUS
from cosched.lab.metrics.goals import Goal, parse_goal
from cosched.lab.profiling.design import design_rounds
from cosched.lab.simulation.options import (
    SEED,
    add_machine_options,
    add_run_options,
    cost_of,
    data_dir_of,
    machine_of,
    run_spec_of,
)
from cosched.lab.simulation.run import RunSpec, config_of, cost_model_of, engine_flags, identity_of
from cosched.lab.simulation.setting import OfflineClient, setting_of
from cosched.lab.simulation.slo_search import SEARCHES, Ran, SloAnswer, find_largest, search_largest
from cosched.predict.fitted import FittedPredictor, GraphSizes, fit_predictor, summarise
from cosched.predict.profile_file import EngineIdentity, MeasuredPoint, Profile
from cosched.versions import versions

PREDICTOR = "cosched"
"""The predictor that a profile holds."""

_POLICY = "sarathi"
"""Any policy that plans does: a script takes its place."""


class Measure(JsonOption, kw_only=True):
    """Measure an engine, fit the predictor, write a profile.

    The engine is the modelled GPU of a simulation (--virtual and machine options), or one in this
    process (--model-path and any SGLang flag).

    write        the profile
    virtual      measure the modelled GPU, in virtual time
    batches      batches to measure; fewer than 100 fit poorly
    repeats      times each batch runs; the median counts, and batches whose repeats differ by more
                 than a tenth are repeated once more, then discarded
    max_context  longest context measured (default: as the engine allows)
    held_out     of the batches, to tell the error from
    quiet        no progress bar
    """

    write: NewFile
    virtual: bool = False
    batches: Count = 400
    repeats: Count = 3
    max_context: Annotated[int, Kind(None, "TOKENS")] | None = None
    held_out: Part = 0.25
    seed: Annotated[int, Kind(SEED)] = 0
    quiet: bool = False


class Slo(JsonOption, kw_only=True):
    """The largest budget or offline rate with which a workload meets its goals.

    goals      a goal; several may be named, and all are met at once
    low        lower end of the range
    high       upper end of the range
    tolerance  stop when the value is known to this relative precision
    jobs       simulations at a time
    write      write a COSCHED_CONFIG with the value there
    quiet      no progress bar
    """

    goals: Annotated[list[str], Kind(None, "GOAL", "--slo", action="append")]
    search: Annotated[str, Kind(choices=sorted(SEARCHES))] = "budget"
    low: Annotated[float, Kind(None, "X")] | None = None
    high: Annotated[float, Kind(None, "X")] | None = None
    tolerance: Part = 0.05
    jobs: int = 1
    write: NewFile | None = None
    quiet: bool = False


class LiveServers(msgspec.Struct):
    """With a model each value is tried on a server that is started here with it, as it is served:
    SGLang's flags follow --, and the options of the machine say nothing.

    model_path   search on live servers of this model
    concurrency  offline requests in flight
    vocab_size   prompts made of token ids stay below it
    server_log   output of the last server
    """

    model_path: Annotated[str, Kind(None, "MODEL")] | None = None
    concurrency: Count = 64
    vocab_size: Annotated[int, Kind(whole(at_least=20), "N")] = VOCAB_SIZE
    server_log: NewFile = Path("cosched-server.log")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.profile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    machine = _machine_parser().format_help().partition("\n\n")[2]
    add_command(commands, Measure, _measure, epilog=f"With --virtual also:\n\n{machine}")
    searches = "\n".join(
        f"  {name:<14}{s.summary} ({s.key}, {s.unit}; policy {s.policy})"
        for name, s in SEARCHES.items()
    )
    slo = add_command(commands, Slo, _slo, description=f"Searches:\n{searches}\n\n{_GOALS}")
    add_options(slo.add_argument_group("live", introduction(LiveServers)), LiveServers)
    add_run_options(slo)
    return parser


_GOALS = """\
Goals: STATISTIC_METRIC<=LIMIT with mean, p50, p90, p95 or p99 of ttft, tpot, tbt or e2e
of the online requests; the limit in ms or s, or as +5% above the online requests alone
under stock scheduling; and attainment>=99% of the targets --slo-ttft and --slo-tpot, or
attainment>=-1%, at most 1 point below the online requests alone."""


def _machine_parser() -> argparse.ArgumentParser:
    """The options that `--virtual` adds. They are not SGLang's, though some are called alike."""
    parser = Parser(prog="python -m cosched.profile measure", usage="", add_help=False)
    add_machine_options(parser)
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder with kernel tables (default: $COSCHED_DATA)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong, with 130 when interrupted."""
    parser = build_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    own, server_flags = given, []
    if given[:1] == ["slo"] and "--" in given:
        cut = given.index("--")
        own, server_flags = given[:cut], given[cut + 1 :]
    arguments, rest = parser.parse_known_args(own)
    if arguments.command != "measure" and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.server_flags = server_flags
    arguments.rest = rest
    run_command(arguments)


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    engine = _virtual_engine if arguments.virtual else _live_engine
    with engine(arguments) as (local, identity, graphs):
        points, about = _measured_points(arguments, local)
    held_out = _errors(arguments, points, graphs)
    predictor = _fitted(points, graphs)
    profile = Profile(
        points=points, engine=identity, predictor=predictor, held_out=held_out, about=about
    )
    save_output(arguments, arguments.write, profile.save)
    print(f"{len(points)} batches of {identity.model} on {identity.device} in {arguments.write}")
    return {
        "file": str(arguments.write),
        "engine": asdict(identity),
        "num_points": len(points),
        "held_out": held_out,
        "about": about,
    }


_Engine = tuple[Any, EngineIdentity, GraphSizes | None]


@contextlib.contextmanager
def _virtual_engine(arguments: argparse.Namespace) -> Iterator[_Engine]:
    machine = _machine_parser().parse_args(arguments.rest)
    data_dir = data_dir_of(machine)
    from cosched.lab.simulation.virtual import VirtualEngine

    spec = RunSpec(
        setting=setting_of(_POLICY),
        machine=machine_of(machine),
        cost=cost_of(machine),
        seed=arguments.seed,
        data_dir=str(data_dir) if data_dir else None,
    )
    cost_model = cost_model_of(spec)
    with (
        configured(config_of(spec)),
        VirtualEngine(
            flags=engine_flags(spec),
            cost_model=cost_model,
            prefix_reads=PrefixReads(spec.cost.prefix_reads),
        ) as engine,
    ):
        yield engine.local, identity_of(spec), cost_model.graph_sizes


@contextlib.contextmanager
def _live_engine(arguments: argparse.Namespace) -> Iterator[_Engine]:
    given = [flag.partition("=")[0] for flag in arguments.rest]
    if "--gpu" in given:
        raise ConfigError(
            f"--gpu names a modelled GPU ({choices(GPUS)}) and goes with --virtual; a live engine "
            "is named by --model-path and SGLang's flags"
        )
    if "--model-path" not in given and "--model" not in given:
        raise ConfigError("nothing to measure: name --virtual, or --model-path and SGLang's flags")
    from sglang.srt.server_args import prepare_server_args

    from cosched.engine import identity
    from cosched.engine.port import graph_sizes_of
    from cosched.engine.port.local import LocalEngine

    config = Config(policy=_POLICY)
    flags = engine_arguments(arguments.rest, config, mixed_chunk=True)
    if "--log-level" not in given:
        flags += ["--log-level", "warning"]
    server_args = prepare_server_args(flags)
    check_arguments(server_args, config)
    if server_args.tp_size > 1 or server_args.dp_size > 1:
        raise ConfigError(
            f"--tp {server_args.tp_size} --dp {server_args.dp_size}: one process runs one rank; "
            "measure with one, or let the server learn while it runs"
        )
    bind_cpu_threads(flags, os.environ)
    if not cosched.bootstrap.has_cuda():
        # torch read the variable before it was set.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with configured(config), LocalEngine(flags) as local:
        scheduler = local.scheduler
        found = identity.identity_of(scheduler.server_args, scheduler.model_config)
        yield local, found, graph_sizes_of(scheduler)


def _measured_points(
    arguments: argparse.Namespace, local: Any
) -> tuple[tuple[MeasuredPoint, ...], dict[str, Any]]:
    from cosched.lab.profiling.measure import limits_of, measure_rounds

    limits = limits_of(local.scheduler, max_context=arguments.max_context)
    rounds = design_rounds(limits, num_batches=arguments.batches, seed=arguments.seed)
    with _progress(quiet=arguments.quiet) as bar:
        task = bar.add_task("iterations", total=arguments.batches * arguments.repeats)
        measured = measure_rounds(
            local,
            rounds,
            repeats=arguments.repeats,
            seed=arguments.seed,
            on_iteration=lambda: bar.update(task, advance=1),
        )
    for count, why in (
        (measured.num_discarded, "whose repeats differ too much"),
        (measured.num_not_run, "that the engine did not run as designed"),
    ):
        if count:
            print(f"discarded {count} of {arguments.batches} batches {why}", file=sys.stderr)
    return measured.points, {
        "versions": versions(),
        "seed": arguments.seed,
        "num_batches": arguments.batches,
        "num_repeats": arguments.repeats,
        "num_discarded": measured.num_discarded,
        "num_not_run": measured.num_not_run,
        "limits": asdict(limits),
    }


def _errors(
    arguments: argparse.Namespace, points: Sequence[MeasuredPoint], graphs: GraphSizes | None
) -> dict[str, Any]:
    """What the profile says of its predictor: relative errors on held-out points, by kind of batch
    and of "all". Prints them. ConfigError if there are too few points to hold some out."""
    order = np.random.default_rng(arguments.seed).permutation(len(points)).tolist()
    num_held_out = round(len(points) * arguments.held_out)
    if not 0 < num_held_out < len(points):
        raise ConfigError(f"{len(points)} batches are too few to hold some out")
    held_out = [points[i] for i in order[:num_held_out]]
    try:
        predictor = _fitted([points[i] for i in order[num_held_out:]], graphs)
    except ConfigError as too_few:
        print(f"error unknown: {too_few}")
        return {"num_points": num_held_out, "errors": {PREDICTOR: {"not_fitted": str(too_few)}}}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for point in held_out:
        pair = predictor.predict_s(BatchTotals.of(point.batch)), point.seconds
        for kind in (kind_of(point.batch), "all"):
            pairs.setdefault(kind, []).append(pair)
    errors = {kind: summarise(*zip(*of_kind, strict=True)) for kind, of_kind in pairs.items()}
    print(f"error on {num_held_out} of {len(points)} batches, fitted to the others: mean, p99 [%]")
    for kind, error in sorted(errors.items()):
        print(f"{kind:<16}{100 * error.mean:>9.2f}{100 * error.p99:>7.1f}")
    by_kind = {kind: asdict(error) for kind, error in errors.items()}
    return {"num_points": num_held_out, "errors": {PREDICTOR: by_kind}}


def kind_of(batch: BatchShape) -> str:
    """Which of the four kinds of designed batches this is."""
    if not batch.prefills:
        return "decode"
    if batch.decodes:
        return "mixed"
    return "cached prefill" if any(p.num_cached for p in batch.prefills) else "prefill"


def _fitted(points: Sequence[MeasuredPoint], graphs: GraphSizes | None) -> FittedPredictor:
    batches, seconds = [p.batch for p in points], [p.seconds for p in points]
    return fit_predictor(PREDICTOR, batches, seconds, graphs=graphs)


def _slo(arguments: argparse.Namespace) -> dict[str, Any]:
    goals = [parse_goal(text) for text in arguments.goals]
    wanted = SEARCHES[arguments.search]
    spec = run_spec_of(arguments, setting_of(wanted.policy))
    if arguments.server_flags and arguments.model_path is None:
        raise ConfigError("flags after -- are for live servers; name --model-path too")
    limits = {name: getattr(arguments, name) for name in ("low", "high", "tolerance")}
    with _progress(quiet=arguments.quiet) as bar:
        task = bar.add_task("runs", total=None)

        def on_run(what: str, result: Ran) -> None:
            bar.update(task, advance=1, description=f"tried {what}")

        if arguments.model_path is None:
            answer = find_largest(
                arguments.search, spec, goals, num_jobs=arguments.jobs, on_run=on_run, **limits
            )
        else:
            answer = _search_live(arguments, spec, goals, on_run=on_run, **limits)
    _show(answer, goals)
    if answer.value is not None:
        config = msgspec.structs.replace(config_of(spec), **{wanted.key: answer.value})
        save_output(
            arguments, arguments.write, lambda path: write_whole(path, config.to_json() + "\n")
        )
    live = None
    if arguments.model_path is not None:
        live = {
            "model": Path(arguments.model_path).name,
            "server_flags": arguments.server_flags,
            "concurrency": arguments.concurrency,
        }
    return {"spec": spec.describe(), "live": live, **answer.to_dict()}


def _search_live(
    arguments: argparse.Namespace,
    spec: RunSpec,
    goals: Sequence[Goal],
    *,
    on_run: Callable[[str, LiveResult], None],
    **limits: Any,
) -> SloAnswer:
    leave_a_core_free()
    spec = replace(
        spec,
        setting=replace(spec.setting, client=OfflineClient.CAP),
        cap=arguments.concurrency,
    )
    servers = OwnServers(
        model_path=arguments.model_path,
        flags=arguments.server_flags,
        vocab_size=arguments.vocab_size,
    )

    def tried(what: str, result: LiveResult) -> None:
        on_run(what, result)
        reached = [(goal, goal.measure(result.summary, result.records)) for goal in goals]
        shown = "; ".join(f"{goal.text}: {_amount(goal, value)}" for goal, value in reached)
        # At once: a search that ends early has lasted long.
        for line in (shown, *result.notes()):
            print(f"{what}: {line}", file=sys.stderr, flush=True)

    return search_largest(
        arguments.search,
        spec,
        goals,
        run_all=lambda specs: servers.run_all(specs, log_path=arguments.server_log),
        on_run=tried,
        **limits,
    )


def _show(answer: SloAnswer, goals: Sequence[Goal]) -> None:
    """Every value tried and what it reached, then the answer."""
    titles = [f"{answer.unit:>10}", *(f"{goal.text:>20}" for goal in goals)]
    print("".join(titles) + f"{'offline tokens/s':>20}")
    limits = [_amount(goal, bound) for goal, bound in zip(goals, answer.bounds, strict=True)]
    print(f"{'limit':>10}" + "".join(f"{limit:>20}" for limit in limits))
    if answer.baseline is not None:
        alone = [_amount(goal, x) for goal, x in zip(goals, answer.baseline, strict=True)]
        print(f"{'alone':>10}" + "".join(f"{x:>20}" for x in alone))
    for probe in answer.probes:
        reached = [_amount(goal, x) for goal, x in zip(goals, probe.reached, strict=True)]
        tokens = probe.offline_tokens_per_s
        print(
            f"{probe.value:>10g}"
            + "".join(f"{x:>20}" for x in reached)
            + f"{'-' if tokens is None else f'{tokens:.0f}':>20}"
            + ("" if probe.is_good else "  misses")
        )
    if answer.value is None:
        print(f"no {answer.key} in the range meets all goals")
    else:
        print(f"largest {answer.key} that meets all goals: {answer.value:g}")


def _amount(goal: Goal, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if goal.statistic is None else f"{value * 1e3:.1f} ms"


def _progress(*, quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=quiet or not sys.stderr.isatty(),
    )


if __name__ == "__main__":
    main()
