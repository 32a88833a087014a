"""What a suite runs: its rows, and the searches of those that have one."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cosched.cli import parse
from cosched.errors import ConfigError
from cosched.lab.metrics.summary import Summary
from cosched.lab.simulation.options import RunOptions, run_spec_of
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.result_store import ResultStore
from cosched.lab.simulation.run import RunResult
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.setting import setting_of
from cosched.lab.simulation.sweep import Tried, most_misses, sweep
from cosched.lab.suite_file import Option, Options, SuiteFile, check_known, matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table: a setting in a scenario, with each seed.

    value   of the option that the scenario varies
    specs   one per seed; until the search is over, without its options
    search  for the best options
    chosen  the options that it found
    """

    scenario: str
    value: Option | None
    setting: str
    is_cheap: bool
    specs: tuple[RunSpec, ...]
    search: Search | None = None
    chosen: Options = field(default_factory=dict)

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


def rows_of(
    suite: SuiteFile,
    *,
    scenarios: Sequence[str] = (),
    settings: Sequence[str] = (),
    num_seeds: int | None = None,
    data_dir: Path | None = None,
) -> list[Row]:
    """The rows of a suite, or of some of its scenarios (by name or pattern, as `*/i`) and settings
    only. ConfigError where a name, an option or a key of the configuration is wrong."""
    grid = suite.grid
    try:
        names = matching(scenarios, grid, kind="scenario")
        check_known("setting", settings, suite.settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows = []
    for name in names or grid:
        for value, options in grid[name].cases():
            for setting in suite.settings_of(name):
                if settings and setting not in settings:
                    continue
                place = _Place(suite, name, options, data_dir)
                try:
                    search = _search(place, setting)
                    spec = place.spec(setting, {})
                except ConfigError as error:
                    raise ConfigError(f"{name}, {setting}: {error}") from None
                seeds = range(spec.seed, spec.seed + (num_seeds or suite.seeds))
                rows.append(
                    Row(
                        scenario=name,
                        value=value,
                        setting=setting,
                        is_cheap=grid[name].cheap,
                        specs=tuple(replace(spec, seed=seed) for seed in seeds),
                        search=search,
                    )
                )
    return rows


def num_runs(rows: Sequence[Row]) -> int:
    """Of the rows and their searches."""
    return sum(len(row.specs) + (row.search.num_runs if row.search else 0) for row in rows)


def run_rows(
    rows: Sequence[Row],
    *,
    num_jobs: int,
    store: ResultStore | None,
    on_run: Callable[[str, RunResult], object],
    on_row: Callable[[Row, tuple[Outcome, ...]], object] = lambda row, outcomes: None,
) -> list[tuple[Outcome, ...]]:
    """What came of each row, by seed; rows with a search last. on_run: gets the name of the row and
    each result. on_row: gets each row that is done, with what its search chose."""

    def run(some: Sequence[tuple[int, Row]]) -> Iterator[tuple[int, tuple[Outcome, ...]]]:
        runs = [(index, row, spec) for index, row in some for spec in row.specs]
        done: dict[int, dict[int, Outcome]] = {index: {} for index, _ in some}
        results = execute_all([spec for *_, spec in runs], num_jobs=num_jobs, store=store)
        for number, result in results:
            index, row, spec = runs[number]
            done[index][spec.seed] = Outcome(spec=spec, summary=result.summary, end_s=result.end_s)
            on_run(row.name, result)
            if len(done[index]) == len(row.specs):
                outcomes = tuple(done[index][spec.seed] for spec in row.specs)
                on_row(row, outcomes)
                yield index, outcomes

    def execute(name: str, specs: Sequence[RunSpec]) -> list[RunResult]:
        found = {}
        for number, result in execute_all(specs, num_jobs=num_jobs, store=store):
            found[number] = result
            on_run(f"{name} (search)", result)
        return [found[number] for number in range(len(specs))]

    numbered = list(enumerate(rows))
    outcomes = dict(run([(index, row) for index, row in numbered if row.search is None]))
    for index, row in numbered:
        if row.search is not None:
            chosen = row.search.best(partial(execute, row.name))
            spec = row.search.at(chosen)
            specs = tuple(replace(spec, seed=one.seed) for one in row.specs)
            outcomes |= run([(index, replace(row, specs=specs, chosen=chosen))])
    return [outcomes[index] for index, _ in numbered]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """For the best options of a row.

    dials  each option and its values
    at     the run of the row with these options
    alone  run of its online requests alone, as the search runs it
    trial  a run of the search with these options
    """

    dials: tuple[_Dial, ...]
    at: Callable[[Options], RunSpec]
    alone: Callable[[], RunSpec]
    trial: Callable[[Options], RunSpec]

    @property
    def start(self) -> Options:
        return {dial.name: dial.values[0] for dial in self.dials}

    @property
    def num_runs(self) -> int:
        return 2 + sum(len(dial.values) - 1 for dial in self.dials)

    def best(self, execute: Callable[[Sequence[RunSpec]], list[RunResult]]) -> Options:
        """`execute` runs specifications side by side."""
        (alone,) = execute([self.alone()])
        misses = most_misses(alone.summary)

        def tried(points: Mapping[str, Options]) -> dict[str, Tried]:
            trials = [self.trial(options) for options in points.values()]
            results = execute([replace(one, most_misses=misses) for one in trials])
            return {
                name: Tried(result=result, alone=alone.summary)
                for name, result in zip(points, results, strict=True)
            }

        return sweep(self.start, self.dials, tried).best


class _Dial(NamedTuple):
    """An option and its values."""

    name: str
    values: tuple[Option, ...]

    def of(self, point: Options) -> Option:
        return point[self.name]

    def set(self, point: Options, value: Option) -> Options:
        return {**point, self.name: value}

    def say(self, value: Option) -> str:
        return f"{self.name} {value}"


def _search(place: _Place, setting: str) -> Search | None:
    values = place.suite.settings[setting].search
    how = place.suite.search
    if not values or how is None:
        return None
    search = Search(
        dials=tuple(_Dial(name, tuple(some)) for name, some in values.items()),
        at=partial(place.spec, setting),
        alone=partial(place.spec, how.alone, how.options),
        trial=lambda options: place.spec(setting, {**options, **how.options}),
    )
    _parsed(*as_arguments({**search.start, **how.options}))  # wrong ones are errors before any run
    return search


class _Place(NamedTuple):
    """A scenario with one value of the option that it varies."""

    suite: SuiteFile
    scenario: str
    options: Options
    data_dir: Path | None

    def spec(self, setting_name: str, more: Options) -> RunSpec:
        """Of a setting. more: options over all others."""
        given, setting = self.suite.grid[self.scenario], self.suite.settings[setting_name]
        options = {**self.suite.options, **self.options, **setting.options, **more}
        data_dir = None if given.cheap else self.data_dir
        if data_dir is None:
            for role in ("online", "offline"):
                if options.get(role) in self.suite.generated:
                    options[role] = self.suite.generated[str(options[role])]
        run = copy.deepcopy(_parsed(*as_arguments(options)))
        run.policy.cosched_config = json.dumps(setting.config)
        run.length.data_dir = data_dir
        spec = run_spec_of(run, setting_of(setting.policy or setting_name))
        if not spec.setting.has_offline:  # then equal runs of several scenarios are one
            spec = replace(spec, offline=None)
        if not spec.setting.has_online:
            spec = replace(spec, online=None)
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
