"""Measure what iterations of an engine take, and how much offline work its online requests bear.

`measure` drives an engine through designed batches, fits the latency predictor and writes a
profile, with which a policy starts (`--latency-model`) and a simulation can run (`--profile`).
`errors` compares the predictors of the papers and cosched's on such profiles.
`slo` searches the largest latency budget, or rate of offline requests, with which a workload meets
its goals in virtual time (HyGen's SLO-aware profiler).
Each prints a table and, as its last line, one JSON object.

    cosched profile measure --write FILE --virtual [machine options]
    cosched profile measure --write FILE --model-path MODEL [any SGLang flag]
    cosched profile slo --slo "p99_ttft<=1000ms" --slo "p99_tbt<=+5%" --online azure-like \\
        --online-rate 2 --offline documents

How long it takes: `measure --virtual` some 30 s, a live engine on two CPU cores some minutes (400
batches, 3 times each between two that do not count); `slo` about eight simulations, each as long
as `cosched simulate` takes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cosched.cli import (
    Count,
    JsonOption,
    NewFile,
    OldFile,
    Part,
    Positive,
    Seed,
    Words,
    new_app,
    parse,
    run,
)
from cosched.config import Config, configured
from cosched.engine.arguments import bind_cpu_threads, engine_arguments, resolve
from cosched.engine.support import check_arguments, why_mixing_is_slow
from cosched.errors import ConfigError, choices
from cosched.files import write_whole
from cosched.lab.benchmark.progress import progress_of_runs
from cosched.lab.cost_models.cost_model import PrefixReads
from cosched.lab.cost_models.specs import GPUS
from cosched.lab.metrics.goals import Goal, parse_goal
from cosched.lab.profiling.design import design_rounds
from cosched.lab.profiling.predictor_errors import TITLES, Split, graphs_of, markdown, page
from cosched.lab.simulation.options import (
    CostOptions,
    DataDir,
    MachineOptions,
    RunOptions,
    cost_of,
    data_dir_of,
    machine_of,
    run_spec_of,
)
from cosched.lab.simulation.run import (
    config_of,
    cost_model_of,
    engine_flags,
    identity_of,
    launches_of,
)
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.search import PARAMETERS, Boundary, Search, search
from cosched.lab.simulation.setting import setting_of
from cosched.predict.fitted import FittedPredictor, GraphSizes, fit_predictor
from cosched.predict.profile_file import EngineIdentity, MeasuredPoint, Profile
from cosched.versions import versions

PREDICTOR = "cosched"
"""The predictor that a profile holds."""

_POLICY = "sarathi"
"""Any policy that plans will do: a script takes its place."""

_GOALS = """\
Goals: STATISTIC_METRIC<=LIMIT with mean, p50, p90, p95 or p99 of ttft, tpot, tbt or e2e of the
online requests. The limit is in ms or s, or relative (+5%) to the online requests alone under stock
scheduling. Also attainment>=99% of the targets --slo-ttft and --slo-tpot, or attainment>=-1%: at
most 1 point below the online requests alone.
"""

app = new_app("profile", __doc__)
main = partial(run, "profile")

_Engine = tuple[Any, EngineIdentity, GraphSizes | None]


@dataclass(kw_only=True)
class Virtual:
    """The options that `--virtual` adds. They are not SGLang's, though some have the same names."""

    machine: Annotated[MachineOptions, Parameter(name="*")] = field(default_factory=MachineOptions)
    cost: Annotated[CostOptions, Parameter(name="*")] = field(default_factory=CostOptions)
    data_dir: DataDir = None


@app.command(
    help_epilogue="With --virtual also the options of `cosched simulate` for the simulated "
    "machine, its iteration times, and --data-dir."
)
@dataclass(kw_only=True)
class Measure(JsonOption):
    """Measure an engine, fit the predictor, write a profile.

    The engine is the modelled GPU of a simulation (--virtual and machine options), or one in this
    process (--model-path and any SGLang flag).
    """

    flags: Words = field(default=(), kw_only=False)
    write: NewFile
    """the profile"""
    virtual: bool = False
    """measure the modelled GPU, in virtual time"""
    batches: Count = 400
    """batches to measure; fewer than 100 fit poorly"""
    repeats: Count = 3
    """times each batch runs; the median counts, and batches whose repeats differ by more than a
    tenth are repeated once more, then discarded"""
    max_context: Count | None = None
    """longest context measured [tokens]; default: as the engine allows"""
    held_out: Part = 0.25
    """share of the batches that is not fitted, to measure the error"""
    seed: Seed = 0
    """seed of the batches"""
    quiet: bool = False
    """no progress bar"""

    def __call__(self) -> int:
        engine = self._virtual_engine() if self.virtual else self._live_engine()
        with engine as (local, identity, graphs):
            points, about = self._measured_points(local)
        held_out = self._errors(points, graphs)
        profile = Profile(
            points=points,
            engine=identity,
            predictor=_fitted(points, graphs),
            held_out=held_out,
            about=about,
        )
        self.save(self.write, profile.save)
        print(f"{len(points)} batches of {identity.model} on {identity.device} in {self.write}")
        return self.finish(
            {
                "file": str(self.write),
                "engine": asdict(identity),
                "num_points": len(points),
                "held_out": held_out,
                "about": about,
            }
        )

    @contextlib.contextmanager
    def _virtual_engine(self) -> Iterator[_Engine]:
        from cosched.lab.simulation.virtual import VirtualEngine

        options = parse(Virtual, self.flags)
        data_dir = data_dir_of(options.data_dir)
        spec = RunSpec(
            setting=setting_of(_POLICY),
            machine=machine_of(options.machine),
            cost=cost_of(options.cost, data_dir),
            seed=self.seed,
            data_dir=str(data_dir) if data_dir else None,
        )
        cost_model = cost_model_of(spec)
        with (
            configured(config_of(spec)),
            VirtualEngine(
                flags=engine_flags(spec),
                cost_model=cost_model,
                prefix_reads=PrefixReads(spec.cost.prefix_reads),
                launches=launches_of(spec),
                window=spec.machine.window,
            ) as engine,
        ):
            yield engine.local, identity_of(spec), cost_model.graph_sizes

    @contextlib.contextmanager
    def _live_engine(self) -> Iterator[_Engine]:
        given = [flag.partition("=")[0] for flag in self.flags]
        if "--gpu" in given:
            raise ConfigError(
                f"--gpu names a modelled GPU ({choices(GPUS)}) and goes with --virtual; a live "
                "engine is named by --model-path and SGLang's flags"
            )
        if "--model-path" not in given and "--model" not in given:
            raise ConfigError(
                "nothing to measure: name --virtual, or --model-path and SGLang's flags"
            )
        import torch

        import cosched.bootstrap
        from cosched.engine import identity
        from cosched.engine.port import graph_sizes_of
        from cosched.lab.local_engine import LocalEngine

        config = Config(policy=_POLICY)
        more = [] if "--log-level" in given else ["--log-level", "warning"]
        flags = engine_arguments([*self.flags, *more], config, mixed_chunk=True)
        server_args = resolve(flags)
        if why_mixing_is_slow(server_args) is not None:  # a server does not mix unless told to
            flags = engine_arguments([*self.flags, *more], config, mixed_chunk=False)
            server_args = resolve(flags)
        check_arguments(server_args, config)
        if server_args.tp_size > 1 or server_args.dp_size > 1:
            raise ConfigError(
                f"--tp {server_args.tp_size} --dp {server_args.dp_size}: one process runs one "
                "rank; measure with one, or let the server learn while it runs"
            )
        bind_cpu_threads(flags, os.environ)
        if not cosched.bootstrap.has_cuda():
            # torch read the variable before it was set.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        with configured(config), LocalEngine(flags) as local:
            scheduler = local.scheduler
            found = identity.identity_of(scheduler.server_args, scheduler.model_config)
            yield local, found, graph_sizes_of(scheduler)

    def _measured_points(self, local: Any) -> tuple[tuple[MeasuredPoint, ...], dict[str, Any]]:
        from cosched.lab.profiling.measure import limits_of, measure_rounds

        limits = limits_of(local.scheduler, max_context=self.max_context)
        rounds = design_rounds(limits, num_batches=self.batches, seed=self.seed)
        with _progress(quiet=self.quiet) as bar:
            task = bar.add_task("iterations", total=self.batches * self.repeats)
            measured = measure_rounds(
                local,
                rounds,
                repeats=self.repeats,
                seed=self.seed,
                on_iteration=lambda: bar.update(task, advance=1),
            )
        for count, why in (
            (measured.num_discarded, "whose repeats differ too much"),
            (measured.num_not_run, "that the engine did not run as designed"),
        ):
            if count:
                print(f"discarded {count} of {self.batches} batches {why}", file=sys.stderr)
        return measured.points, {
            "versions": versions(),
            "seed": self.seed,
            "num_batches": self.batches,
            "num_repeats": self.repeats,
            "num_discarded": measured.num_discarded,
            "num_not_run": measured.num_not_run,
            "limits": asdict(limits),
        }

    def _errors(self, points: Sequence[MeasuredPoint], graphs: GraphSizes | None) -> dict[str, Any]:
        """Print and return the predictor's relative errors on held-out points, by kind of batch and
        of "all". ConfigError if there are too few points to hold some out."""
        split = Split.of(points, share=self.held_out, seed=self.seed)
        num_held_out = len(split.held_out)
        try:
            errors = split.errors(PREDICTOR, graphs=graphs)
        except ConfigError as too_few:
            print(f"error unknown: {too_few}")
            return {"num_points": num_held_out, "errors": {PREDICTOR: {"not_fitted": str(too_few)}}}
        print(
            f"error on {num_held_out} of {len(points)} batches, fitted to the others: mean, p99 [%]"
        )
        for kind, error in sorted(errors.items()):
            print(f"{kind:<16}{100 * error.mean:>9.2f}{100 * error.p99:>7.1f}")
        by_kind = {kind: asdict(error) for kind, error in errors.items()}
        return {"num_points": num_held_out, "errors": {PREDICTOR: by_kind}}


def _fitted(points: Sequence[MeasuredPoint], graphs: GraphSizes | None) -> FittedPredictor:
    batches, seconds = [p.batch for p in points], [p.seconds for p in points]
    return fit_predictor(PREDICTOR, batches, seconds, graphs=graphs)


@app.command(name="errors")
@dataclass(kw_only=True)
class PredictorErrors(JsonOption):
    """Compare the predictors of the papers and cosched's on profiles.

    Each form is fitted to a part of a profile's batches and predicts the others. The table has the
    mean and p99 of the relative errors, by kind of batch.
    """

    profiles: Annotated[tuple[OldFile, ...], Parameter(metavar="FILE")] = field(kw_only=False)
    """profiles, made by `cosched profile measure`"""
    held_out: Part = 0.25
    """share of the batches that is not fitted"""
    seed: Seed = 0
    """seed of what is held out"""
    write: NewFile | None = None
    """a page with the table, as Markdown"""

    def __call__(self) -> int:
        found: dict[str, dict[str, Any]] = {}
        for path in self.profiles:
            profile = Profile.load(path)
            name = path.stem if profile.engine is None else profile.engine.device
            split = Split.of(profile.points, share=self.held_out, seed=self.seed)
            found[name] = {
                predictor: split.errors(predictor, graphs=graphs_of(profile))
                for predictor in TITLES
            }
        print(*markdown(found), sep="\n")
        text = page(found, held_out=self.held_out, seed=self.seed, made_with=versions())
        self.save(self.write, lambda path: write_whole(path, text))
        return self.finish(
            {"seed": self.seed, "held_out": self.held_out, "errors": msgspec.to_builtins(found)}
        )


@app.command(
    help_epilogue="Searches:\n\n"
    + "\n".join(
        f"* {name}: {one.summary} ({one.key}, {one.unit}; policy {one.policy})"
        for name, one in PARAMETERS.items()
    )
    + f"\n\n{_GOALS}"
)
@dataclass(kw_only=True)
class Slo(JsonOption):
    """Find the largest budget or offline rate with which a workload meets its goals."""

    goals: Annotated[tuple[str, ...], Parameter(name="--slo", metavar="GOAL")]
    """a goal; several may be named, and all are met at once"""
    search: Annotated[str, Parameter(choices=sorted(PARAMETERS))] = "budget"
    """what is searched"""
    low: Positive | None = None
    """lower end of the range"""
    high: Positive | None = None
    """upper end of the range"""
    tolerance: Part = 0.05
    """stop when the value is known to this relative precision"""
    jobs: Count = 1
    """simulations at a time"""
    write: NewFile | None = None
    """write a COSCHED_CONFIG with the value"""
    quiet: bool = False
    """no progress bar"""
    run: Annotated[RunOptions, Parameter(name="*")] = field(default_factory=RunOptions)

    def __call__(self) -> int:
        goals = [parse_goal(text) for text in self.goals]
        wanted = PARAMETERS[self.search]
        spec = run_spec_of(self.run, setting_of(wanted.policy))
        if self.run.online.name is None or self.run.offline.name is None:
            raise ConfigError("the search needs both classes: name --online and --offline")
        with progress_of_runs(f"{self.search}:", quiet=self.quiet) as on_run:
            found = search(
                wanted,
                spec,
                goals,
                low=self.low,
                high=self.high,
                tolerance=self.tolerance,
                num_jobs=self.jobs,
                on_run=on_run,
            )
        _show(found, wanted, goals)
        if found.value is not None:
            config = msgspec.structs.replace(config_of(spec), **{wanted.key: found.value})
            self.save(self.write, lambda path: write_whole(path, config.to_json() + "\n"))
        return self.finish(
            {
                "spec": spec.describe(),
                "search": self.search,
                "key": wanted.key,
                "unit": wanted.unit,
                "value": found.value,
                "goals": [goal.text for goal in goals],
                "bounds": found.bounds,
                "baseline": found.baseline,
                "probes": [asdict(probe) for probe in found.probes],
            }
        )


def _show(found: Boundary, wanted: Search, goals: Sequence[Goal]) -> None:
    """Every value tried and what it reached, then the answer."""
    table = Table(wanted.unit, *(goal.text for goal in goals), "offline tokens/s", "")
    table.add_row("limit", *map(_amount, goals, found.bounds))
    if found.baseline is not None:
        table.add_row("isolated baseline", *map(_amount, goals, found.baseline))
    for probe in found.probes:
        tokens = probe.offline_tokens_per_s
        table.add_row(
            f"{probe.value:g}",
            *map(_amount, goals, probe.reached),
            "-" if tokens is None else f"{tokens:.0f}",
            "" if probe.is_good else "misses",
        )
    Console().print(table)
    if found.value is None:
        print(f"no {wanted.key} in the range meets all goals")
    else:
        print(f"largest {wanted.key} that meets all goals: {found.value:g}")


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
    sys.exit(main())
