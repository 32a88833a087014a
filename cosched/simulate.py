"""Run SGLang's scheduler through a trace in virtual time, on a simulated GPU.

    python -m cosched.simulate --online azure-like --online-rate 2.5 --offline documents \\
        --duration 600

The scheduler is the production one, stock or with a cosched policy; only the model's forward pass
is replaced by a cost model, and the clock is virtual. The last line of the output is one JSON
object with configuration, versions and results; two runs with the same arguments print the same.

How long it takes: docs/simulation.md.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from cosched.command_line import (
    JsonOption,
    Kind,
    NewFile,
    NewFolder,
    Parser,
    Part,
    Share,
    add_options,
    checked,
    run_command,
    save_output,
    virtual_time_bar,
)
from cosched.config import Config
from cosched.errors import ConfigError
from cosched.lab.metrics.figure import check_can_draw
from cosched.lab.metrics.plots import Run, write_run_plots
from cosched.lab.metrics.records import write_records, write_rows
from cosched.lab.metrics.stats import Window
from cosched.lab.metrics.table import print_table
from cosched.lab.simulation.find import QUESTIONS, find
from cosched.lab.simulation.options import (
    add_run_options,
    run_spec_of,
)
from cosched.lab.simulation.run import RunResult, RunSpec, execute
from cosched.lab.simulation.setting import Setting, with_eviction
from cosched.memory.config import ENGINE_ORDERS, EVICTION_ORDERS
from cosched.policies import known_policy, policy_entry, policy_names, without_tolerance

_POLICIES = (
    f"who schedules: {', '.join(policy_names())}, or one of yours as module:Class; sglang and "
    "priority are stock (default: %(default)s)"
)
_ORDERS = (
    f"which KV goes first: {', '.join(EVICTION_ORDERS)} (docs/kv_memory.md); of stock scheduling "
    f"{', '.join(ENGINE_ORDERS)} (default: kv.eviction of --cosched-config, or the policy's own, "
    "value for most; of stock scheduling SGLang's)"
)


class Scheduling(msgspec.Struct):
    """Who schedules, and what of the KV goes first."""

    policy: Annotated[
        str, Kind(checked(known_policy), "NAME", "--policy", "--cosched-policy", help=_POLICIES)
    ] = Config().policy
    kv_eviction: (
        Annotated[str, Kind(None, "NAME", "--kv-eviction", "--cosched-kv-eviction", help=_ORDERS)]
        | None
    ) = None


class Output(JsonOption):
    """
    plot          write the pictures there
    records       write one JSON line per request there
    kv_log        write one JSON line per second there: who has the KV memory, and what was evicted
    decision_log  write every decision there, for python -m cosched.explain
    quiet         no progress bar
    """

    plot: NewFolder | None = None
    records: NewFile | None = None
    kv_log: NewFile | None = None
    decision_log: NewFile | None = None
    quiet: bool = False


class Capacity(msgspec.Struct):
    """
    find        search for the least or the most that meets the SLO instead of one run
    attainment  share of online requests that must meet their targets
    tolerance   stop when the answer is known to this relative precision
    jobs        simulations at a time
    """

    find: Annotated[str, Kind(choices=sorted(QUESTIONS))] | None = None
    attainment: Share = 0.9
    tolerance: Part = 0.05
    jobs: int = 2


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.simulate", description=__doc__)
    add_options(parser, Scheduling)
    add_run_options(parser)
    add_options(parser.add_argument_group("output"), Output)
    add_options(parser.add_argument_group("capacity questions (Echo §5.4)"), Capacity)
    parser.set_defaults(execute=_execute)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong."""
    run_command(build_parser().parse_args(argv))


def _execute(arguments: argparse.Namespace) -> dict[str, Any]:
    setting = Setting(
        name=arguments.policy,
        summary="",
        policy=arguments.policy,
        has_online=arguments.online is not None,
        has_offline=arguments.offline is not None,
    )
    if arguments.kv_eviction is not None:
        setting = with_eviction(setting, arguments.kv_eviction)
    spec = run_spec_of(arguments, setting)
    if "tolerance" in dict(spec.config) and not policy_entry(setting.policy).tolerates:
        raise ConfigError(without_tolerance(setting.policy))
    for option in ("decision_log", "kv_log", "plot", "records"):
        if arguments.find and getattr(arguments, option):
            raise ConfigError(f"--{option.replace('_', '-')} is of one run; --find makes many")
    if arguments.plot is not None:
        check_can_draw()
    return _find(arguments, spec) if arguments.find else _run(arguments, spec)


def _run(arguments: argparse.Namespace, spec: RunSpec) -> dict[str, Any]:
    result = _with_progress(spec, arguments)
    print_table({spec.setting.name: result.summary})
    speed = result.end_s / result.wall_s if result.wall_s else 0.0
    print(
        f"{len(result.iterations)} iterations, {result.end_s:.0f} s of virtual time in "
        f"{result.wall_s:.1f} s: {speed:.0f} times real time",
        file=sys.stderr,
    )
    if result.end_s < spec.end_s:
        num_offline = result.summary.offline.num_finished
        print(
            f"It ended at {result.end_s:.0f} of {spec.end_s:.0f} s: all {num_offline} offline "
            "requests were finished. More of them (--offline-requests) make a longer run.",
            file=sys.stderr,
        )
    save_output(arguments, arguments.records, lambda path: write_records(result.records, path))
    save_output(arguments, arguments.kv_log, lambda path: write_rows(result.kv, path))
    save_output(
        arguments,
        arguments.plot,
        lambda folder: write_run_plots(
            folder,
            Run(
                records=result.records,
                iterations=result.iterations,
                kv=result.kv,
                window=Window(start_s=0.0, end_s=result.end_s),
                default_slo=spec.slo,
            ),
        ),
    )
    return result.to_dict()


def _with_progress(spec: RunSpec, arguments: argparse.Namespace) -> RunResult:
    with virtual_time_bar(is_quiet=arguments.quiet) as bar:
        task = bar.add_task(spec.setting.name, total=spec.duration_s)
        return execute(
            spec,
            on_progress=lambda now_s: bar.update(task, completed=now_s),
            decision_log=arguments.decision_log,
        )


def _find(arguments: argparse.Namespace, spec: RunSpec) -> dict[str, Any]:
    answer = find(
        arguments.find,
        spec,
        attainment=arguments.attainment,
        tolerance=arguments.tolerance,
        num_jobs=arguments.jobs,
        quiet=arguments.quiet,
    )
    print(answer.sentence())
    return answer.to_dict()


if __name__ == "__main__":
    main()
