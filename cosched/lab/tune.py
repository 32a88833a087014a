"""Choose the budgets and sizes of a server for one workload, by simulation, and write them down.

The command tries one knob after another, a few values each (docs/simulation.md). It keeps the value
that serves most offline work while as many chats meet their targets as without it, within a point.
Then it compares the choice with the defaults on another seed. OUT is a configuration for
COSCHED_CONFIG; beside it, in OUT with `.figures.json` as its ending, are the predicted figures and
SGLang's flags. Each run is kept in --results: after Ctrl-C the same command continues.

    cosched tune --online azure-conv --online-rate 2.5 --offline documents --data-dir DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from cosched.cli import Count, JsonOption, Names, NewFile, NewFolder, new_app, run
from cosched.config import Config, parse_config
from cosched.errors import ConfigError, choices
from cosched.files import write_whole
from cosched.lab.benchmark.progress import progress_of_runs
from cosched.lab.simulation.options import PolicyName, RunOptions, run_spec_of
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.result_store import ResultStore
from cosched.lab.simulation.run import RunResult
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.setting import Setting, setting_of
from cosched.lab.simulation.sweep import Swept, Tried, best_of, most_misses, sweep
from cosched.policies import policy_entry, policy_names
from cosched.schedule.base import Budgets

_ALONE = "s0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """An option to choose.

    values  that are tried beside the current one
    flag    of SGLang; empty: a key of `Budgets`
    """

    name: str
    text: str
    values: tuple[float, ...]
    flag: str = ""

    def of(self, spec: RunSpec) -> float:
        """Its value in a run."""
        if self.name == "chunk_tokens":
            return float(spec.machine.chunk())
        if self.name == "max_running_requests":
            return float(spec.machine.slots() * spec.machine.dp_ranks)
        return float(getattr(budgets_of(spec), self.name))

    def set(self, spec: RunSpec, value: float) -> RunSpec:
        """The same run with another value."""
        if self.flag:
            sizes: dict[str, Any] = {self.name: int(value)}
            return replace(spec, machine=replace(spec.machine, **sizes))
        given: dict[str, Any] = dict(dict(spec.config).get("budgets", {}))
        given[self.name] = value
        return spec.configured(budgets=given)

    def say(self, value: float) -> str:
        return f"{self.name} {value:g}"


def budgets_of(spec: RunSpec) -> Budgets:
    return msgspec.convert(dict(dict(spec.config).get("budgets", {})), Budgets)


KNOBS: Mapping[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            name="chunk_tokens",
            text="--chunked-prefill-size of SGLang: most prompt tokens of an iteration",
            values=(512, 1024, 2048, 4096, 8192),
            flag="--chunked-prefill-size",
        ),
        Knob(
            name="max_running_requests",
            text="--max-running-requests of SGLang: how many run at once, of both classes",
            values=(64, 128, 256, 512, 1024, 2048),
            flag="--max-running-requests",
        ),
        Knob(
            name="aim",
            text="budgets.aim: share of the TPOT target that offline work may use up",
            values=(0.9, 0.97, 0.995),
        ),
        Knob(
            name="ttft_aim",
            text="budgets.ttft_aim: share of the TTFT target within which prefills shall end",
            values=(0.85, 0.95, 1.0),
        ),
        Knob(
            name="burst",
            text="budgets.burst: most time of an iteration with both classes [TPOT targets]",
            values=(1.0, 1.5, 2.0, 3.0),
        ),
        Knob(
            name="idle_share",
            text="budgets.idle_share: most time of one without online requests [TTFT targets]",
            values=(0.15, 0.3, 0.6),
        ),
        Knob(
            name="crowded_share",
            text="budgets.crowded_share: of the KV memory, before iterations get shorter",
            values=(0.1, 0.2, 0.4),
        ),
    )
}
"""In the order of trial."""


def _knobs(names: Sequence[str]) -> list[Knob]:
    for name in names:
        if name not in KNOBS:
            raise ConfigError(f"no knob {name!r}; choose from {choices(KNOBS)}")
    return [knob for name, knob in KNOBS.items() if not names or name in names]


app = new_app(
    "tune",
    __doc__,
    help_epilogue="Knobs, in this order:\n\n"
    + "\n".join(f"* {name}: {knob.text}" for name, knob in KNOBS.items()),
)
main = partial(run, "tune")


@app.default
@dataclass(kw_only=True)
class Tune(JsonOption):
    policy: PolicyName = Config().policy
    knobs: Names = ()
    """only these knobs"""
    out: NewFile = Path("cosched.json")
    """write the configuration"""
    results: NewFolder = Path("out/tune")
    """keep each run's result in this folder, and do not repeat a run whose result is there"""
    jobs: Count = 2
    """simulations at a time"""
    quiet: bool = False
    """no progress"""
    run: Annotated[RunOptions, Parameter(name="*")] = field(default_factory=RunOptions)

    def __call__(self) -> int:
        if self.run.online.name is None or self.run.offline.name is None:
            raise ConfigError("a choice weighs both classes: name --online and --offline")
        if not policy_entry(self.policy).timed:
            timed = choices(name for name in policy_names() if policy_entry(name).timed)
            raise ConfigError(f"policy {self.policy!r} has no budget of time; choose from {timed}")
        setting = Setting(name=self.policy, summary="", policy=self.policy)
        spec = run_spec_of(self.run, setting)
        return self.finish(self._tune(spec, _knobs(self.knobs)))

    def _tune(self, spec: RunSpec, knobs: Sequence[Knob]) -> dict[str, Any]:
        total = 5 + sum(value != knob.of(spec) for knob in knobs for value in knob.values)
        store = ResultStore(self.results)
        with progress_of_runs("tune:", total=total, quiet=self.quiet) as on_run:

            def execute(specs: Mapping[str, RunSpec]) -> dict[str, RunResult]:
                names, results = list(specs), {}
                for index, result in execute_all(
                    [*specs.values()], num_jobs=self.jobs, store=store
                ):
                    results[names[index]] = result
                    on_run(names[index], result)
                return {name: results[name] for name in names}

            alone = execute({_ALONE: replace(spec, setting=setting_of(_ALONE))})[_ALONE]
            misses = most_misses(alone.summary)

            def run(specs: Mapping[str, RunSpec]) -> dict[str, Tried]:
                tried = {name: replace(one, most_misses=misses) for name, one in specs.items()}
                results = execute(tried)
                return {n: Tried(result=one, alone=alone.summary) for n, one in results.items()}

            swept = sweep(spec, knobs, run)
            checks = _checked(spec, swept.best, execute)
        is_better = best_of(checks) == "chosen"
        chosen = swept.best if is_better else spec
        _print_tried(swept, spec)
        _print_checks(checks)
        changed = {knob.name: knob.of(chosen) for knob in knobs if knob.of(chosen) != knob.of(spec)}
        print(_sentence(changed, was_rejected=not is_better and swept.best != spec))
        config = _config_of(chosen)
        figures = {
            "config": self.out.name,
            "changed": changed,
            "sglang_flags": {
                knob.flag: int(knob.of(chosen)) for knob in KNOBS.values() if knob.flag
            },
            "predicted": {name: outcome.figures() for name, outcome in checks.items()},
            "spec": chosen.describe(),
        }
        side = self.out.with_suffix(".figures.json")
        self.save(self.out, lambda path: write_whole(path, config))
        text = json.dumps(figures, indent=1) + "\n"
        self.save(side, lambda path: write_whole(path, text))
        print(f"configuration: {self.out}; its figures: {side}")
        return {
            "program": "tune",
            "config": json.loads(config),
            **{key: figures[key] for key in ("changed", "sglang_flags", "predicted", "spec")},
            "tried": {
                name: {f"{value:g}": one.figures() for value, one in values.items()}
                for name, values in swept.tried.items()
            },
        }


def _checked(spec: RunSpec, chosen: RunSpec, execute: Any) -> dict[str, Tried]:
    """Defaults and choice on requests with another seed."""
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
    return {name: Tried(result=result, alone=alone) for name, result in results.items()}


def _config_of(spec: RunSpec) -> str:
    """The text of the configuration file."""
    given = dict(spec.config)
    assert spec.slo.ttft_s is not None and spec.slo.tpot_s is not None
    slo = {"ttft_ms": 1e3 * spec.slo.ttft_s, "tpot_ms": 1e3 * spec.slo.tpot_s}
    text = json.dumps({"policy": spec.setting.policy, "slo": slo, **given}, indent=1) + "\n"
    parse_config(text, source="what was chosen")
    return text


def _print_tried(swept: Swept[RunSpec], before: RunSpec) -> None:
    table = Table("knob", "value", "both met %", "alone %", "offline tokens/s", "")
    for name, values in swept.tried.items():
        knob = KNOBS[name]
        for value, one in values.items():
            note = "chosen" if value == knob.of(swept.best) else ""
            if value == knob.of(before):
                note = f"{note}, as it was".removeprefix(", ")
            table.add_row(knob.name, f"{value:g}", *_shown(one), note)
        table.add_section()
    Console().print(table)


def _print_checks(checks: Mapping[str, Tried]) -> None:
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
    sys.exit(main())
