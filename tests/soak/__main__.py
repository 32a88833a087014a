"""The command: run a soak or many.

::

    python -m tests.soak --hours 10 --seed 0 --policy hygen --page-size 16
    python -m tests.soak --matrix --hours 1

Prints what happened and, last, one JSON object. Exits with 1 when something failed; the command
that runs the episode in which it failed is printed and in the JSON.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before sglang

import argparse
import multiprocessing
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from multiprocessing.connection import Connection
from typing import Any

from cosched.cli import JsonOption
from cosched.errors import CoschedError
from cosched.lab.benchmark.progress import virtual_time_bar
from tests.soak.run import Outcome, run
from tests.soak.spec import FEATURES, MATRIX, SoakSpec


def build_parser() -> argparse.ArgumentParser:
    """An option for each field of `SoakSpec`, and some for the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=f"Random traffic on SGLang's own scheduler in virtual time, with checks.\n\n"
        f"{SoakSpec.__doc__}",
        epilog="features:\n" + "\n".join(f"{name}: {text}" for name, text in FEATURES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = {"kv_tokens": int, "without": _names, "episodes": _numbers}
    for field in fields(SoakSpec):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=field.default)
        else:
            kind = kinds.get(field.name, type(field.default))
            parser.add_argument(flag, type=kind, default=field.default)
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--only", type=_names, help="leave out all features but these")
    return parser


SWITCHES = {
    "matrix": "all policies, page sizes and switches",
    "quiet": "no progress bar",
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _names(text)))


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 1 when a soak failed, with 2 and one sentence when the arguments are wrong."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        result = _execute(arguments)
    except CoschedError as error:
        parser.error(str(error))
    JsonOption().finish({"config": vars(arguments), **result})
    if result["failed"]:
        raise SystemExit(1)


def _execute(arguments: argparse.Namespace) -> dict[str, Any]:
    names = SoakSpec.__dataclass_fields__.keys() & vars(arguments).keys()
    spec = SoakSpec(**{name: getattr(arguments, name) for name in names})
    if arguments.only is not None:
        left_out = tuple(sorted(FEATURES.keys() - set(arguments.only)))
        spec = replace(spec, without=left_out)
    specs: Sequence[SoakSpec] = (spec,)
    if arguments.matrix:
        specs = [
            replace(
                entry,
                seed=spec.seed,
                hours=spec.hours,
                compute=spec.compute,
                without=spec.without,
                episodes=spec.episodes,
            )
            for entry in MATRIX
        ]
    results = []
    for one in specs:
        outcome = _with_progress(one, arguments)
        _report(outcome)
        result = _described(outcome)
        results.append(result)
    num_failed = sum(1 for result in results if result["failure"])
    return {"runs": results, "failed": num_failed}


_FORK = multiprocessing.get_context("fork")
"""What this process has imported need not be imported again; it must not have built an engine."""


def in_child(spec: SoakSpec, on_progress: Callable[[float], None]) -> Outcome:
    """`run` in a process of its own, since a failed engine leaves state behind."""
    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_run, args=(theirs, spec))
    child.start()
    theirs.close()
    try:
        while True:
            message = ours.recv()
            if isinstance(message, Outcome):
                return message
            on_progress(message)
    except EOFError:
        child.join()
        ending = f"the process ended with exit code {child.exitcode}"
        return Outcome(spec=spec, failure=ending)
    finally:
        child.join()


def _run(pipe: Connection[Any, Any], spec: SoakSpec) -> None:
    pipe.send(run(spec, on_progress=pipe.send))


def _with_progress(spec: SoakSpec, arguments: argparse.Namespace) -> Outcome:
    with virtual_time_bar(quiet=arguments.quiet) as bar:
        task = bar.add_task(spec.policy, total=spec.hours * 3600)
        return in_child(spec, lambda now_s: bar.update(task, completed=now_s))


def _command(outcome: Outcome) -> str:
    """Of a failure: the episode in which it came."""
    spec = outcome.spec
    if outcome.failure is not None and outcome.episode is not None:
        spec = replace(spec, episodes=(outcome.episode,))
    return shlex.join(["scripts/soak", *spec.arguments()])


def _report(outcome: Outcome) -> None:
    print(_command(outcome))
    print(
        f"  {outcome.virtual_s / 3600:.2f} h of virtual time in {outcome.wall_s:.0f} s; "
        + ", ".join(f"{name} {count}" for name, count in outcome.counts.items())
    )
    if outcome.failure is not None:
        print(outcome.trace)
        print(f"  FAILED in episode {outcome.episode}: {outcome.failure}")
    sys.stdout.flush()


def _described(outcome: Outcome) -> dict[str, Any]:
    described = asdict(outcome) | {"spec": outcome.spec.describe()}
    del described["trace"]
    return described | {"command": _command(outcome)}


if __name__ == "__main__":
    main()
