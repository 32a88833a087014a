"""Run SGLang's scheduler through a trace in virtual time, on a simulated GPU.

The scheduler is the production one, stock or with a cosched policy. A cost model replaces the
forward pass, and the clock is virtual. The last line of the output is one JSON object with
configuration, versions and results; two runs with the same options print the same.

    cosched simulate --online azure-like --online-rate 2.5 --offline documents --duration 600

How long it takes: docs/simulation.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from cosched.cli import (
    Count,
    JsonOption,
    NewFile,
    NewFolder,
    Part,
    Share,
    new_app,
    run,
    section,
)
from cosched.config import Config
from cosched.errors import ConfigError
from cosched.lab.benchmark.progress import progress_of_runs, virtual_time_bar
from cosched.lab.metrics.figure import check_can_draw
from cosched.lab.metrics.goals import attainment_goal
from cosched.lab.metrics.plots import Run, write_run_plots
from cosched.lab.metrics.records import write_records, write_rows
from cosched.lab.metrics.stats import Window
from cosched.lab.metrics.table import print_table
from cosched.lab.simulation.fleet import execute_replicas
from cosched.lab.simulation.options import PolicyName, RunOptions, run_spec_of
from cosched.lab.simulation.run import RunResult
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.search import CAPACITIES, search
from cosched.lab.simulation.setting import Setting, with_eviction
from cosched.memory.config import ENGINE_ORDERS
from cosched.policies import EVICTION_NAMES, policy_entry, without_tolerance

_ORDERS = (
    f"which KV is evicted first: {', '.join(EVICTION_NAMES)} (docs/architecture.md); with stock "
    f"scheduling {', '.join(ENGINE_ORDERS)}; default: kv.eviction of --cosched-config, or the "
    "policy's own, value for most; with stock scheduling SGLang's"
)


_CAPACITY_SECTION = section("Capacity questions (Echo §5.4)")


@dataclass(kw_only=True)
class Capacity:
    find: Annotated[str | None, Parameter(choices=sorted(CAPACITIES))] = None
    """search the smallest or largest value that meets the SLO, instead of one run"""
    attainment: Share = 0.9
    """share of online requests that must meet their targets"""
    tolerance: Part = 0.05
    """stop when the answer is known to this relative precision"""
    jobs: Count = 2
    """simulations at a time"""


app = new_app("simulate", __doc__)
main = partial(run, "simulate")


@app.default
@dataclass(kw_only=True)
class Simulate(JsonOption):
    policy: PolicyName = Config().policy
    kv_eviction: Annotated[
        str | None,
        Parameter(name=("--kv-eviction", "--cosched-kv-eviction"), metavar="NAME", help=_ORDERS),
    ] = None
    plot: NewFolder | None = None
    """write plots to this folder"""
    records: NewFile | None = None
    """write one JSON line per request"""
    kv_log: NewFile | None = None
    """write one JSON line per second: KV memory by use, and what was evicted"""
    decision_log: NewFile | None = None
    """write every decision, for `cosched explain`"""
    quiet: bool = False
    """no progress bar"""
    run: Annotated[RunOptions, Parameter(name="*")] = field(default_factory=RunOptions)
    capacity: Annotated[Capacity, _CAPACITY_SECTION] = field(default_factory=Capacity)

    def __call__(self) -> int:
        setting = Setting(
            name=self.policy,
            summary="",
            policy=self.policy,
            has_online=self.run.online.name is not None,
            has_offline=self.run.offline.name is not None,
        )
        if self.kv_eviction is not None:
            setting = with_eviction(setting, self.kv_eviction)
        spec = run_spec_of(self.run, setting)
        if "tolerance" in dict(spec.config) and not policy_entry(setting.policy).tolerates:
            raise ConfigError(without_tolerance(setting.policy))
        for name in ("decision_log", "kv_log", "plot", "records"):
            if self.capacity.find and getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} is for one run; --find makes many")
        if self.plot is not None:
            check_can_draw()
        return self.finish(self._run(spec) if self.capacity.find is None else self._find(spec))

    def _run(self, spec: RunSpec) -> dict[str, Any]:
        result = self._execute(spec)
        print_table({spec.setting.name: result.summary})
        speed = result.end_s / result.wall_s if result.wall_s else 0.0
        print(
            f"{len(result.iterations)} iterations, {result.end_s:.0f} s of virtual time in "
            f"{result.wall_s:.1f} s: {speed:.0f} times real time",
            file=sys.stderr,
        )
        if result.end_s < spec.end_s:
            print(
                f"The run ended at {result.end_s:.0f} of {spec.end_s:.0f} s: all "
                f"{result.summary.offline.num_finished} offline requests were finished. A larger "
                "--offline-requests makes a longer run.",
                file=sys.stderr,
            )
        self.save(self.records, lambda path: write_records(result.records, path))
        self.save(self.kv_log, lambda path: write_rows(result.kv, path))
        self.save(
            self.plot,
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

    def _execute(self, spec: RunSpec) -> RunResult:
        with virtual_time_bar(quiet=self.quiet) as bar:
            task = bar.add_task(spec.setting.name, total=spec.duration_s)
            return execute_replicas(
                spec,
                on_progress=lambda now_s: bar.update(task, completed=now_s),
                decision_log=self.decision_log,
            )

    def _find(self, spec: RunSpec) -> dict[str, Any]:
        name, share = self.capacity.find, self.capacity.attainment
        assert name is not None
        wanted, goal = CAPACITIES[name], attainment_goal(share)
        with progress_of_runs(f"{name}:", quiet=self.quiet) as on_run:
            found = search(
                wanted,
                spec,
                [goal],
                tolerance=self.capacity.tolerance,
                num_jobs=self.capacity.jobs,
                on_run=on_run,
            )
        if found.value is None:
            print(
                f"{name}: nothing between {found.low:g} and {found.high:g} {wanted.unit} gives an "
                f"attainment of {share:.0%}"
            )
        else:
            print(f"{name}: {found.value:g} {wanted.unit} (attainment of at least {share:.0%})")
        return {
            "question": name,
            "value": found.value,
            "unit": wanted.unit,
            "attainment": share,
            "bounds": (found.low, found.high),
            "probes": [
                {
                    "value": probe.value,
                    "attainment": probe.reached[0],
                    "offline_tokens_per_s": probe.offline_tokens_per_s,
                }
                for probe in found.probes
            ],
        }


if __name__ == "__main__":
    sys.exit(main())
