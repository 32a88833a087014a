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

A suite of a paper's experiments says what the paper reports. The page puts beside it what these
rows give, or why it is not reproduced:

    [[claims]]
    figure = "Fig. 6"
    says = "work with prefix sharing against without"
    reported = "up to 4 x"
    setting = "hygen"
    column = "work/s"
    of = "hygen-fcfs"
    scenarios = ["mmlu"]

    [[claims]]
    figure = "Fig. 10"
    says = "Yi-34B on four GPUs"
    why_not = "there is no kernel table of it"

With machines each scenario is run on each of them, under the name MACHINE/SCENARIO:

    [machines.a100]
    title = "Llama-3.1-8B on an A100-80G"
    options = { model = "Llama-3.1-8B", gpu = "A100-80" }       # over the suite's
    scenarios.mmlu = { online-rate = 1.6 }                      # replaces the scenario's

A setting with a search is run with the best values of a few (`cosched.lab.simulation.sweep`), one
option after another, beginning with the first value of each:

    [settings."tuned stock"]
    policy = "s1"
    search = { chunked-prefill-size = [2048, 512], mixed-chunk = [true, false] }

    [search]                                                    # how its runs differ from the row's
    alone = "s0"                                                # online requests alone
    options = { duration = 60 }
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Literal

import msgspec

from cosched.errors import ConfigError, choices
from cosched.lab.columns import COLUMNS
from cosched.lab.metrics.slo import JctTarget

SUITES = Path(__file__).parent / "suites"

Option = str | int | float | bool
Options = dict[str, Option]


class SuiteScenario(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A workload and a machine.

    options   of `cosched.simulate`, without the dashes; at most one of them is a list of values
    cheap     each run takes seconds, on generated requests and the roofline cost model, whether or
              not there is a data folder: `bench check` repeats these rows
    jct       deadlines of online requests (EcoServe §4)
    settings  that are run in it; default: all
    """

    title: str = ""
    options: dict[str, Option | list[Option]] = {}
    cheap: bool = False
    jct: JctTarget | None = None
    settings: tuple[str, ...] = ()

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


class SuiteMachine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the scenarios are run on.

    options    in addition to the suite's
    scenarios  options of a scenario on this machine, over its own
    """

    title: str = ""
    options: Options = {}
    scenarios: dict[str, Options] = {}


class SuiteSearch(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How the runs of a search differ from the runs of its row.

    alone    setting of the online requests alone, whose attainment is to be kept
    options  over all others
    """

    alone: str
    options: Options = {}


class Ratio(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A column of the page: the least number that one of the settings `of` has in `column`, as a
    percentage of the row's."""

    column: str
    of: tuple[str, ...]


class Beside(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The number of `setting` stands beside each row's in these columns of the page."""

    setting: str
    columns: tuple[str, ...]


class SuiteSetting(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A policy and its options.

    policy   a policy or a name of `cosched.lab.simulation.setting`; default: the setting's name
    options  of `cosched.simulate`, in addition to the scenario's
    config   keys of COSCHED_CONFIG
    only     scenarios in which it is run, or patterns of their names; default: all
    search   values of options, of which the best are run
    """

    policy: str = ""
    options: Options = {}
    config: dict[str, Any] = {}
    only: tuple[str, ...] = ()
    search: dict[str, list[Option]] = {}


class Keeps(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Rows that count: those whose `column` is at least that of the setting `of` less `within`."""

    column: str
    of: str
    within: float

    def __str__(self) -> str:
        return f" with {self.column} at least that of `{self.of}` - {self.within:g}"


class SuiteTarget(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A bound on one column of one setting, in each scenario that has it.

    at_most, at_least  the bound: a number, or with `of` a multiple of the best of these settings
    overall            the bound holds for the geometric mean over all scenarios instead; the page
                       has a table of it for each of the settings against the best other one
    keeps              of the other settings only these rows count
    """

    setting: str
    column: str
    at_most: float | None = None
    at_least: float | None = None
    of: tuple[str, ...] = ()
    overall: bool = False
    keeps: Keeps | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a target has either `at_most` or `at_least`")
        if self.overall and not self.of:
            raise ValueError("a target with `overall` needs `of`")

    @property
    def best_of(self) -> Callable[[list[float]], float]:
        return min if self.at_most is not None else max

    def is_met(self, ratio: float) -> bool:
        if self.at_most is not None:
            return ratio <= self.at_most
        return ratio >= (self.at_least or 0.0)

    def __str__(self) -> str:
        sign, bound = ("≤", self.at_most) if self.at_least is None else ("≥", self.at_least)
        of = f" times the best of {', '.join(f'`{name}`' for name in self.of)}" if self.of else ""
        mean = "geometric mean of " if self.overall else ""
        return f"`{self.setting}`: {mean}{self.column} {sign} {bound:g}{of}{self.keeps or ''}"


class ReportedFigure(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a paper reports: a column of `setting`, with `of` in relation to that setting's.

    scenarios  in which it is looked at, or patterns of their names; default: all
    values     of the option that they vary; default: all
    form       a quotient is shown as a multiple or as a change [%]
    why_not    it is not reproduced, for this reason
    """

    figure: str
    says: str
    reported: str = ""
    setting: str = ""
    column: str = ""
    of: str = ""
    scenarios: tuple[str, ...] = ()
    values: tuple[Option, ...] = ()
    form: Literal["ratio", "change"] = "ratio"
    why_not: str = ""

    def __post_init__(self) -> None:
        if bool(self.why_not) == bool(self.setting and self.column):
            raise ValueError("a claim has either a `setting` and its `column`, or `why_not`")

    def shown(self, numbers: Sequence[float]) -> str:
        """numbers: of each case; quotients with `of`. Their mean and range; empty without cases."""
        if not numbers:
            return ""
        mean = geometric_mean(numbers) if self.of and min(numbers) > 0 else fmean(numbers)
        least, most = self._text(min(numbers)), self._text(max(numbers))
        unit = {"ratio": " x", "change": " %"}[self.form] if self.of else ""
        between = f" ({least} to {most})" if least != most else ""
        return f"{self._text(mean)}{unit}{between}"

    def _text(self, number: float) -> str:
        if self.of and self.form == "change":
            return f"{100 * (number - 1):+.0f}"
        return f"{number:,.3g}" if abs(number) < 1000 else f"{number:,.0f}"


class SuiteFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An experiment.

    seeds      number of seeds, from 0 on
    spread     what stands beside the mean over seeds: its 95 % interval, or the range
    options    of all scenarios
    generated  workload -> the one that takes its place where there is no data folder
    ratios     more columns, by name
    drawn      columns of the picture; default: all
    """

    title: str
    about: str
    columns: tuple[str, ...]
    scenarios: dict[str, SuiteScenario]
    settings: dict[str, SuiteSetting]
    machines: dict[str, SuiteMachine] = {}
    search: SuiteSearch | None = None
    ratios: dict[str, Ratio] = {}
    drawn: tuple[str, ...] = ()
    beside: Beside | None = None
    seeds: int = 1
    spread: Literal["interval", "range"] = "interval"
    options: Options = {}
    generated: dict[str, str] = {}
    targets: tuple[SuiteTarget, ...] = ()
    claims: tuple[ReportedFigure, ...] = ()

    def __post_init__(self) -> None:
        for machine in self.machines.values():
            check_known("scenario", machine.scenarios, self.scenarios)
        for setting in self.settings.values():
            matching(setting.only, self.grid, kind="scenario")
            if setting.search and self.search is None:
                raise ValueError("a setting has a `search`, but the suite has not")
        settings = {s for target in self.targets for s in (target.setting, *target.of)}
        settings |= {s for ratio in self.ratios.values() for s in ratio.of}
        settings |= {s for claim in self.claims for s in (claim.setting, claim.of) if s}
        settings |= {target.keeps.of for target in self.targets if target.keeps}
        settings |= {one for one in (self.search and self.search.alone,) if one}
        settings |= {self.beside.setting} if self.beside else set()
        settings |= {s for scenario in self.scenarios.values() for s in scenario.settings}
        check_known("setting", settings, self.settings)
        check_known("column", self.columns, {**COLUMNS, **self.ratios})
        check_known("column", self.drawn, self.columns)
        named = [target.column for target in self.targets]
        named += [target.keeps.column for target in self.targets if target.keeps]
        named += [ratio.column for ratio in self.ratios.values()]
        named += self.beside.columns if self.beside else ()
        named += [claim.column for claim in self.claims if claim.column]
        check_known("column", named, self.columns)
        for claim in self.claims:
            matching(claim.scenarios, self.grid, kind="scenario")
        for name, one in self.scenarios.items():
            if sum(isinstance(value, list) for value in one.options.values()) > 1:
                raise ValueError(f"scenario {name!r} varies more than one option")

    @property
    def measured(self) -> tuple[str, ...]:
        """Columns that runs give."""
        return tuple(name for name in self.columns if name not in self.ratios)

    def settings_of(self, scenario: str) -> list[str]:
        """Those that are run in a scenario of the grid."""
        wanted = self.grid[scenario].settings
        return [
            name
            for name, setting in self.settings.items()
            if (not wanted or name in wanted)
            and (not setting.only or any(fnmatchcase(scenario, one) for one in setting.only))
        ]

    @property
    def grid(self) -> dict[str, SuiteScenario]:
        """The scenarios by name, on each machine if there are some."""
        if not self.machines:
            return self.scenarios
        return {
            f"{at}/{name}": msgspec.structs.replace(
                scenario,
                title=", ".join(filter(None, (machine.title, scenario.title))),
                options={**machine.options, **scenario.options, **machine.scenarios.get(name, {})},
            )
            for at, machine in self.machines.items()
            for name, scenario in self.scenarios.items()
        }


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


def matching(patterns: Iterable[str], names: Iterable[str], *, kind: str) -> list[str]:
    """The names that match a pattern, in their order. ValueError for a pattern without any."""
    found: set[str] = set()
    names = list(names)
    for pattern in patterns:
        some = [name for name in names if fnmatchcase(name, pattern)]
        if not some:
            raise ValueError(f"unknown {kind} {pattern!r}; choose from {choices(names)}")
        found.update(some)
    return [name for name in names if name in found]


def check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; choose from {choices(known)}")
