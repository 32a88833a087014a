"""Experiments as data: a suite is a grid of scenario x setting x seed, in one TOML file.

    title = "Prefix sharing"
    about = "One paragraph."
    columns = ["both met %", "job done s", "offline hit %"]     # `cosched.lab.columns`
    seeds = 3                                                   # 0, 1 and 2; default 1
    options = { model = "Llama-2-7B", gpu = "A100-80" }         # of `cosched.simulate`

    [scenarios.mmlu]                                            # the workload and the machine
    title = "MMLU in a small cache"
    options = { online = "azure-conv", online-rate = [1, 2], offline = "mmlu", duration = 600 }

    [settings.hygen]                                            # a policy and its options
    [settings."hygen, large chunks"]
    policy = "hygen"
    options = { chunked-prefill-size = 8192 }
    config = { latency_budget_ms = 40 }                         # keys of COSCHED_CONFIG

    [[targets]]                                                 # hygen <= 0.9 x the best of these
    setting = "hygen"
    column = "job done s"
    at_most = 0.9
    of = ["hygen, large chunks"]

An option with a list is varied: the scenario is run with each value.
"""

from __future__ import annotations

import copy
import functools
import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cosched.cli import parse
from cosched.errors import ConfigError, choices
from cosched.lab.columns import COLUMNS
from cosched.lab.metrics.slo import JctTarget
from cosched.lab.metrics.summary import Summary
from cosched.lab.simulation.options import RunOptions, run_spec_of
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.run import RunResult, RunSpec
from cosched.lab.simulation.setting import setting_of
from cosched.lab.simulation.store import ResultStore

SUITES = Path(__file__).parent / "suites"

Option = str | int | float | bool
Options = dict[str, Option]


class SuiteScenario(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A workload and a machine.

    options  of `cosched.simulate`, without the dashes; at most one of them is a list of values
    cheap    each run takes seconds, on generated requests and the roofline cost model, whether or
             not there is a data folder: `bench check` repeats these rows
    jct      deadlines of online requests (EcoServe §4)
    """

    title: str = ""
    options: dict[str, Option | list[Option]] = {}
    cheap: bool = False
    jct: JctTarget | None = None

    def cases(self) -> Iterator[tuple[Option | None, Options]]:
        """(value of the varied option or None, options) of each run."""
        fixed = {name: one for name, one in self.options.items() if not isinstance(one, list)}
        varied = self.varied
        if varied is None:
            yield None, fixed
            return
        values = self.options[varied]
        assert isinstance(values, list), f"{varied=}"
        for value in values:
            yield value, {**fixed, varied: value}

    @property
    def varied(self) -> str | None:
        """Name of the option with a list of values."""
        return next((name for name, one in self.options.items() if isinstance(one, list)), None)


class SuiteSetting(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A policy and its options.

    policy   a policy or a name of `cosched.lab.simulation.setting`; default: the setting's name
    options  of `cosched.simulate`, over those of the scenario
    config   keys of COSCHED_CONFIG
    only     scenarios in which it is run; default: all
    """

    policy: str = ""
    options: Options = {}
    config: dict[str, Any] = {}
    only: tuple[str, ...] = ()


class SuiteTarget(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A bound on one column of one setting, in each scenario that has it.

    at_most, at_least  the bound: a number, or with `of` a multiple of the best of these settings
    """

    setting: str
    column: str
    at_most: float | None = None
    at_least: float | None = None
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a target has either `at_most` or `at_least`")

    def is_met(self, ratio: float) -> bool:
        if self.at_most is not None:
            return ratio <= self.at_most
        return ratio >= (self.at_least or 0.0)

    def __str__(self) -> str:
        sign, bound = ("≤", self.at_most) if self.at_least is None else ("≥", self.at_least)
        of = f" times the best of {', '.join(f'`{name}`' for name in self.of)}" if self.of else ""
        return f"`{self.setting}`: {self.column} {sign} {bound:g}{of}"


class SuiteFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An experiment.

    seeds      number of seeds, from 0 on
    options    of all scenarios
    generated  workload -> the one that takes its place where there is no data folder
    """

    title: str
    about: str
    columns: tuple[str, ...]
    scenarios: dict[str, SuiteScenario]
    settings: dict[str, SuiteSetting]
    seeds: int = 1
    options: Options = {}
    generated: dict[str, str] = {}
    targets: tuple[SuiteTarget, ...] = ()

    def __post_init__(self) -> None:
        named = {s for setting in self.settings.values() for s in setting.only}
        _check_known("scenario", named, self.scenarios)
        named = {s for target in self.targets for s in (target.setting, *target.of)}
        _check_known("setting", named, self.settings)
        _check_known("column", self.columns, COLUMNS)
        _check_known("column", [target.column for target in self.targets], self.columns)
        for name, one in self.scenarios.items():
            if sum(isinstance(value, list) for value in one.options.values()) > 1:
                raise ValueError(f"scenario {name!r} varies more than one option")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table: a setting in a scenario, with each seed.

    value  of the option that the scenario varies
    specs  one per seed
    """

    scenario: str
    value: Option | None
    setting: str
    is_cheap: bool
    specs: tuple[RunSpec, ...]

    @property
    def name(self) -> str:
        return " ".join(
            str(part) for part in (self.scenario, self.value, self.setting) if part is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one run."""

    spec: RunSpec
    summary: Summary
    end_s: float


def suite_names() -> list[str]:
    """Suites that come with cosched."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def read_suite(name: str) -> SuiteFile:
    """Of a name, or of the path of a file. ConfigError names the file and what is wrong in it."""
    path = SUITES / f"{name}.toml" if name in suite_names() else Path(name)
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), SuiteFile)
    except OSError as error:
        known = choices(suite_names())
        raise ConfigError(f"no suite {name!r} ({error.strerror}); choose from {known}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def rows_of(
    suite: SuiteFile,
    *,
    scenarios: Sequence[str] = (),
    settings: Sequence[str] = (),
    num_seeds: int | None = None,
    data_dir: Path | None = None,
) -> list[Row]:
    """The rows of a suite, or of some of its scenarios and settings only. ConfigError where a name,
    an option or a key of the configuration is wrong."""
    for kind, names, known in (
        ("scenario", scenarios, suite.scenarios),
        ("setting", settings, suite.settings),
    ):
        try:
            _check_known(kind, names, known)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    rows = []
    for name in scenarios or suite.scenarios:
        for value, options in suite.scenarios[name].cases():
            for setting in settings or suite.settings:
                only = suite.settings[setting].only
                if only and name not in only:
                    continue
                try:
                    spec = _spec(suite, name, options, setting, data_dir)
                except ConfigError as error:
                    raise ConfigError(f"{name}, {setting}: {error}") from None
                seeds = range(spec.seed, spec.seed + (num_seeds or suite.seeds))
                rows.append(
                    Row(
                        scenario=name,
                        value=value,
                        setting=setting,
                        is_cheap=suite.scenarios[name].cheap,
                        specs=tuple(replace(spec, seed=seed) for seed in seeds),
                    )
                )
    return rows


def run_rows(
    rows: Sequence[Row],
    *,
    num_jobs: int,
    store: ResultStore | None,
    on_run: Callable[[str, RunResult], object],
) -> list[tuple[Outcome, ...]]:
    """What came of each row, by seed. on_run: gets the name of the row and each result."""
    runs = [(row.name, spec) for row in rows for spec in row.specs]
    done: dict[int, Outcome] = {}
    for index, result in execute_all([spec for _, spec in runs], num_jobs=num_jobs, store=store):
        name, spec = runs[index]
        done[index] = Outcome(spec=spec, summary=result.summary, end_s=result.end_s)
        on_run(name, result)
    ordered = iter(done[index] for index in range(len(runs)))
    return [tuple(next(ordered) for _ in row.specs) for row in rows]


def _check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; choose from {choices(known)}")


def _spec(
    suite: SuiteFile, name: str, options: Options, setting_name: str, data_dir: Path | None
) -> RunSpec:
    given, setting = suite.scenarios[name], suite.settings[setting_name]
    options = {**suite.options, **options, **setting.options}
    if given.cheap:
        data_dir = None
    if data_dir is None:
        for role in ("online", "offline"):
            if options.get(role) in suite.generated:
                options[role] = suite.generated[str(options[role])]
    run = copy.deepcopy(_parsed(*as_arguments(options)))
    run.policy.cosched_config = json.dumps(setting.config)
    run.length.data_dir = data_dir
    spec = run_spec_of(run, setting_of(setting.policy or setting_name))
    if given.cheap:
        spec = replace(spec, data_dir=None, cost=replace(spec.cost, name="roofline"))
    return replace(spec, jct=given.jct)


@functools.cache  # many settings have the options of their scenario, and parsing takes 0.1 s
def _parsed(*words: str) -> RunOptions:
    return parse(RunOptions, words)


def as_arguments(options: Mapping[str, Option | list[Option]]) -> list[str]:
    """Options as on the command line of `cosched.simulate`; the values of a varied one in one."""
    arguments = []
    for name, value in options.items():
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments
