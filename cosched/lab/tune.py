"""Choose the budgets and sizes of a server for one workload, by simulation, and write them down.

    python -m cosched.lab.tune --online azure-conv --online-rate 2.5 --offline documents \\
        --duration 120 --data-dir DIR --out cosched.json

Tries one knob after another, a few values each (docs/simulation.md): the value stays that serves
most offline work while chat meets as many targets as alone, within a point. At the end the choice
is held against the defaults with another seed. OUT is a configuration for COSCHED_CONFIG; beside
it, in OUT with `.figures.json` for its ending, stand the predicted figures and SGLang's flags. Each
run is kept in --results: after Ctrl-C the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from cosched.command_line import (
    JsonOption,
    Kind,
    NewFile,
    NewFolder,
    Parser,
    add_options,
    checked,
    run_command,
    save_output,
    whole,
)
from cosched.config import Config, parse_config
from cosched.errors import ConfigError, choices
from cosched.files import write_whole
from cosched.lab.benchmark.progress import progress_of_runs
from cosched.lab.benchmark.sweep import KNOBS, Knob, Swept, Tried, best_of, most_misses, sweep
from cosched.lab.metrics.summary import Summary
from cosched.lab.simulation.options import add_run_options, run_spec_of
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.run import RunResult, RunSpec
from cosched.lab.simulation.setting import Setting, setting_of
from cosched.lab.simulation.store import ResultStore
from cosched.policies import known_policy, policy_entry, policy_names

_ALONE = "s0"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A run beside that of its online requests alone. Implements
    `cosched.lab.benchmark.sweep.Tried`."""

    result: RunResult
    alone: Summary

    @property
    def attainment(self) -> float | None:
        return self.result.summary.online.attainment.joint.ratio

    @property
    def baseline_attainment(self) -> float | None:
        return self.alone.online.attainment.joint.ratio

    @property
    def offline_tokens_per_s(self) -> float | None:
        return self.result.summary.offline.tokens_per_s

    @property
    def gave_up(self) -> bool:
        return self.result.gave_up

    def figures(self) -> dict[str, Any]:
        """For people and programs, in seconds."""
        online = self.result.summary.online
        return {
            "attainment": self.attainment,
            "attainment_alone": self.baseline_attainment,
            "offline_tokens_per_s": self.offline_tokens_per_s,
            "ttft_s": {"p50": online.ttft_s.p50, "p99": online.ttft_s.p99},
            "tpot_s": {"p50": online.tpot_s.p50, "p99": online.tpot_s.p99},
            "seed": self.result.spec.seed,
        }


def _timed_policy(name: str) -> str:
    name = known_policy(name)
    if not policy_entry(name).timed:
        timed = choices(other for other in policy_names() if policy_entry(other).timed)
        raise ConfigError(f"policy {name!r} has no budget of time; choose from {timed}")
    return name


def _knobs(text: str) -> tuple[Knob, ...]:
    names = text.split(",")
    for name in names:
        if name not in KNOBS:
            raise ConfigError(f"no knob {name!r}; choose from {choices(KNOBS)}")
    return tuple(knob for name, knob in KNOBS.items() if name in names)


class Options(JsonOption):
    """
    policy   whose budgets
    knobs    only these; default: all
    out      the configuration is written there
    results  keep each run's result there, and do not run again what is there
    jobs     simulations at a time
    quiet    no progress
    """

    policy: Annotated[str, Kind(checked(_timed_policy), "NAME", "--policy", "--cosched-policy")] = (
        Config().policy
    )
    knobs: Annotated[tuple[Knob, ...], Kind(checked(_knobs), "A,B,…")] = tuple(KNOBS.values())
    out: NewFile = Path("cosched.json")
    results: NewFolder = Path("out/tune")
    jobs: Annotated[int, Kind(whole(at_least=1), "N")] = 2
    quiet: bool = False


def build_parser() -> argparse.ArgumentParser:
    knobs = "\n".join(f"  {name:22}{knob.text}" for name, knob in KNOBS.items())
    parser = Parser(
        prog="python -m cosched.lab.tune", description=f"{__doc__}\nKnobs, in this order:\n{knobs}"
    )
    add_options(parser, Options)
    add_run_options(parser)
    parser.set_defaults(execute=_execute)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong, 130 when interrupted."""
    run_command(build_parser().parse_args(argv))


def _execute(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.online is None or arguments.offline is None:
        raise ConfigError("a choice weighs both classes: name --online and --offline")
    spec = run_spec_of(
        arguments, Setting(name=arguments.policy, summary="", policy=arguments.policy)
    )
    knobs: tuple[Knob, ...] = arguments.knobs
    total = 5 + sum(value != knob.of(spec) for knob in knobs for value in knob.values)
    store = ResultStore(arguments.results)
    with progress_of_runs("tune:", total=total, quiet=arguments.quiet) as on_run:

        def execute(specs: Mapping[str, RunSpec]) -> dict[str, RunResult]:
            names, results = list(specs), {}
            for index, result in execute_all(
                [*specs.values()], num_jobs=arguments.jobs, store=store
            ):
                results[names[index]] = result
                on_run(names[index], result)
            return {name: results[name] for name in names}

        alone = execute({_ALONE: replace(spec, setting=setting_of(_ALONE))})[_ALONE]
        misses = most_misses(alone)

        def run(specs: Mapping[str, RunSpec]) -> dict[str, Tried]:
            tried = {name: replace(one, most_misses=misses) for name, one in specs.items()}
            results = execute(tried)
            return {n: _Outcome(result=one, alone=alone.summary) for n, one in results.items()}

        swept = sweep(spec, knobs, run)
        checks = _checked(spec, swept.spec, execute)
    is_better = best_of(checks) == "chosen"
    chosen = swept.spec if is_better else spec
    _print_tried(swept, spec)
    _print_checks(checks)
    changed = {knob.name: knob.of(chosen) for knob in knobs if knob.of(chosen) != knob.of(spec)}
    print(_sentence(changed, was_rejected=not is_better and swept.spec != spec))
    config = _config_of(chosen)
    figures = {
        "config": arguments.out.name,
        "changed": changed,
        "sglang_flags": {knob.flag: int(knob.of(chosen)) for knob in KNOBS.values() if knob.flag},
        "predicted": {name: outcome.figures() for name, outcome in checks.items()},
        "spec": chosen.describe(),
    }
    side = arguments.out.with_suffix(".figures.json")
    save_output(arguments, arguments.out, lambda path: write_whole(path, config))
    save_output(
        arguments, side, lambda path: write_whole(path, json.dumps(figures, indent=1) + "\n")
    )
    print(f"configuration: {arguments.out}; its figures: {side}")
    return {
        "program": "tune",
        "config": json.loads(config),
        **{key: figures[key] for key in ("changed", "sglang_flags", "predicted", "spec")},
        "tried": {
            name: {f"{value:g}": _outcome(one).figures() for value, one in values.items()}
            for name, values in swept.tried.items()
        },
    }


def _checked(spec: RunSpec, chosen: RunSpec, execute: Any) -> dict[str, _Outcome]:
    """Defaults and choice on requests that nothing was chosen on."""
    other = replace(spec, seed=spec.seed + 1)
    specs = {
        _ALONE: replace(other, setting=setting_of(_ALONE)),
        "defaults": other,
        "chosen": replace(chosen, seed=other.seed),
    }
    if chosen == spec:
        del specs["chosen"]
    results: dict[str, RunResult] = execute(specs)
    alone = results.pop(_ALONE).summary
    return {name: _Outcome(result=result, alone=alone) for name, result in results.items()}


def _config_of(spec: RunSpec) -> str:
    """The file's text; what the server needs to be as the simulated one."""
    given = dict(spec.config)
    assert spec.slo.ttft_s is not None and spec.slo.tpot_s is not None, "of a run they are known"
    slo = {"ttft_ms": 1e3 * spec.slo.ttft_s, "tpot_ms": 1e3 * spec.slo.tpot_s}
    text = json.dumps({"policy": spec.setting.policy, "slo": slo, **given}, indent=1) + "\n"
    parse_config(text, source="what was chosen")
    return text


def _outcome(tried: Tried) -> _Outcome:
    assert isinstance(tried, _Outcome), f"{type(tried)=}"
    return tried


def _print_tried(swept: Swept, before: RunSpec) -> None:
    table = Table("knob", "value", "both met %", "alone %", "offline tokens/s", "")
    for name, values in swept.tried.items():
        knob = KNOBS[name]
        for value, one in values.items():
            note = "chosen" if value == knob.of(swept.spec) else ""
            if value == knob.of(before):
                note = f"{note}, as it was".removeprefix(", ")
            table.add_row(knob.name, f"{value:g}", *_shown(one), note)
        table.add_section()
    Console().print(table)


def _print_checks(checks: Mapping[str, _Outcome]) -> None:
    seed = next(iter(checks.values())).result.spec.seed
    table = Table("", "both met %", "alone %", "offline tokens/s", title=f"with seed {seed}")
    for name, one in checks.items():
        table.add_row(name, *_shown(one))
    Console().print(table)


def _shown(one: Tried) -> tuple[str, str, str]:
    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f}"

    if one.gave_up:
        return "too few", percent(one.baseline_attainment), "-"
    rate = one.offline_tokens_per_s
    shown = "-" if rate is None else f"{rate:,.0f}"
    return percent(one.attainment), percent(one.baseline_attainment), shown


def _sentence(changed: Mapping[str, float], *, was_rejected: bool) -> str:
    if was_rejected:
        return "the defaults stay: with another seed the choice was no better"
    if not changed:
        return "the defaults stay: nothing that was tried is better by one percent"
    return "changed: " + ", ".join(f"{name} {value:g}" for name, value in changed.items())


if __name__ == "__main__":
    main()
