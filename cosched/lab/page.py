"""The page of a suite, in docs/results: one table per scenario, the targets, the command.

A page keeps the rows that a run does not make again, each with its commit. `stale_cells` compares
rows with those of a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import msgspec

from cosched.errors import ConfigError
from cosched.lab.columns import COLUMNS
from cosched.lab.metrics.figure import Panel, plot_panels
from cosched.lab.metrics.plots import Run, write_comparison_plots
from cosched.lab.metrics.stats import interval_of
from cosched.lab.metrics.table import markdown_rows, print_rows
from cosched.lab.simulation.run import RunResult
from cosched.lab.simulation.setting import title_of
from cosched.lab.suite import Outcome, Row, as_arguments
from cosched.lab.suite_file import (
    Keeps,
    Option,
    Options,
    Ratio,
    ReportedFigure,
    SuiteFile,
    SuiteTarget,
    matching,
)

TOLERANCE = 0.01
"""A number holds within 1 %, or within one unit of the last digit shown."""

_MORE = ("chosen", "seeds", "commit")
"""Columns of pages beside columns of suites."""

_BESIDE = " / "
"""Between the number of a row and that of another beside it."""

_ALL = "all"
_OVERALL = "Geometric means of each setting against the best other one ({target.column}):"

_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


class Key(NamedTuple):
    """Which row of a page. value: of the option that the scenario varies, as text; or empty."""

    scenario: str
    value: str
    setting: str

    @classmethod
    def of(cls, row: Row) -> Key:
        return cls.at(row.scenario, row.value, row.setting)

    @classmethod
    def at(cls, scenario: str, value: Option | None, setting: str) -> Key:
        return cls(scenario, "" if value is None else str(value), setting)


def cells_of(
    columns: Sequence[str], outcomes: Sequence[Outcome], *, spread: str = "interval"
) -> dict[str, str]:
    """The cells of a row: the number, or over several seeds their mean and its 95 % interval or
    their range (`SuiteFile.spread`)."""
    cells = {}
    for name in columns:
        column = COLUMNS[name]
        has_job = any(one.summary.job.num_lines for one in outcomes)
        if name.startswith("offline") and not has_job:
            cells[name] = ""
            continue
        values = [column.of(outcome.summary) for outcome in outcomes]
        interval = interval_of(values)
        if interval is None:
            is_open = name == "job done s" and has_job
            cells[name] = f"> {max(one.end_s for one in outcomes):.0f}" if is_open else ""
            continue
        form = f",.{column.digits}f"
        cells[name] = format(column.scale * interval.mean, form)
        if interval.half_width is not None and spread == "range":
            known = [column.scale * value for value in values if value is not None]
            cells[name] += f" ({format(min(known), form)} to {format(max(known), form)})"
        elif interval.half_width is not None:
            cells[name] += f" ± {format(column.scale * interval.half_width, form)}"
    seeds = [outcome.spec.seed for outcome in outcomes]
    cells["seeds"] = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]}-{seeds[-1]}"
    return cells


def chosen_cell(options: Options) -> str:
    """The options that a search chose."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _number(cell: str) -> float | None:
    """The first number of a cell; None for an unfinished job."""
    return None if cell.startswith(">") else _first(cell)


def _first(cell: str) -> float | None:
    """The first number of a cell; of an unfinished job that before which it was not done."""
    found = _NUMBER.search(cell)
    return None if found is None else _value(found[0])


@dataclass(slots=True)
class Page:
    """Rows of results: column -> cell, by key."""

    rows: dict[Key, dict[str, str]] = field(default_factory=dict)

    def text(self, suite: SuiteFile, command: str, picture: str | None = None) -> str:
        """As Markdown. picture: where `plot` has drawn, as seen from the page."""
        parts = [f"# {suite.title}\n", suite.about.strip() + "\n", f"```bash\n{command}\n```\n"]
        if suite.claims:
            parts += ["## What the paper reports\n", self._claims(suite)]
        if picture is not None:
            parts.append(f"![{suite.title}]({picture})\n")
        for name, scenario in suite.grid.items():
            if not any(self._of(suite, name)):
                continue
            title = f"{name}: {scenario.title}" if scenario.title else name
            options: dict[str, Option | list[Option]] = {**suite.options, **scenario.options}
            shown = " ".join(as_arguments(options))
            parts += [f"## {title}\n", f"`cosched simulate {shown}`\n", self.table(suite, name)]
        if suite.targets:
            parts += ["## Targets\n", self._targets(suite)]
        for target in suite.targets:
            if target.overall and (table := self._overall_table(suite, target)):
                parts += [f"{_OVERALL.format(target=target)}\n", table]
        return "\n".join(parts)

    def table(self, suite: SuiteFile, scenario: str) -> str:
        """The rows of one scenario."""
        rows = list(self._of(suite, scenario))
        option = suite.grid[scenario].varied
        varied = [] if option is None else [option]
        headers = [
            header
            for header in (*suite.columns, *_MORE)
            if any(cells.get(header) for _, cells in rows)
        ]
        return markdown_rows(
            ["setting", *varied, *headers],
            [
                [
                    f"`{key.setting}`",
                    *([key.value] if varied else []),
                    *(cells.get(header, "") for header in headers),
                ]
                for key, cells in rows
            ],
        )

    def print(self, suite: SuiteFile, scenario: str) -> None:
        """The rows of one scenario, as tables are printed."""
        print_rows(
            [
                (f"{title_of(key.setting)} {key.value}".strip(), cells)
                for key, cells in self._of(suite, scenario)
            ]
        )

    def _of(self, suite: SuiteFile, scenario: str) -> Iterator[tuple[Key, dict[str, str]]]:
        """In the order of the suite, with the cells that come of other rows."""
        for value, _ in suite.grid[scenario].cases():
            for setting in suite.settings:
                key = Key.at(scenario, value, setting)
                if key in self.rows:
                    yield key, self._completed(suite, key)

    def _completed(self, suite: SuiteFile, key: Key) -> dict[str, str]:
        """The cells of a row, with ratios and the numbers that stand beside them."""
        cells = dict(self.rows[key])
        for name, ratio in suite.ratios.items():
            own, others = _number(cells.get(ratio.column, "")), self._numbers(key, ratio)
            cells[name] = f"{100 * min(others) / own:.0f}" if own and others else ""
        beside = suite.beside
        if beside is not None and key.setting != beside.setting:
            other = self.rows.get(key._replace(setting=beside.setting), {})
            for name in beside.columns:
                if cells.get(name) and other.get(name):
                    cells[name] += _BESIDE + other[name].partition(" ")[0]
        return cells

    def _numbers(self, key: Key, wanted: Ratio | SuiteTarget) -> list[float]:
        """Of the settings that `wanted` names, in its column, as far as they count. A target is not
        measured against its own setting."""
        keeps = wanted.keeps if isinstance(wanted, SuiteTarget) else None
        return [
            number
            for other in wanted.of
            if (isinstance(wanted, Ratio) or other != key.setting)
            and (row := self.rows.get(key._replace(setting=other))) is not None
            and (number := _number(row.get(wanted.column, ""))) is not None
            and (keeps is None or self._keeps(key._replace(setting=other), keeps))
        ]

    def _keeps(self, key: Key, keeps: Keeps) -> bool:
        own, least = (
            _number(self.rows.get(one, {}).get(keeps.column, ""))
            for one in (key, key._replace(setting=keeps.of))
        )
        return own is not None and (least is None or own >= least - keeps.within)

    def _claims(self, suite: SuiteFile) -> str:
        """What the paper reports beside what these rows give, and what is not reproduced."""
        lines = []
        for claim in suite.claims:
            here = claim.why_not or claim.shown(list(self._claimed(suite, claim)))
            lines.append([claim.figure, claim.says, claim.reported, here or "not run"])
        return markdown_rows(["figure", "claim", "reported", "here, mean (range)"], lines)

    def _claimed(self, suite: SuiteFile, claim: ReportedFigure) -> Iterator[float]:
        """The number that a claim is about, in each case."""
        for name in matching(claim.scenarios, suite.grid, kind="scenario") or suite.grid:
            for value, _ in suite.grid[name].cases():
                if claim.values and value not in claim.values:
                    continue
                own, other = (
                    _number(self.rows.get(Key.at(name, value, setting), {}).get(claim.column, ""))
                    for setting in (claim.setting, claim.of)
                )
                if own is not None and not claim.of:
                    yield own
                elif own is not None and other:
                    yield own / other

    def _targets(self, suite: SuiteFile) -> str:
        lines = []
        for target in suite.targets:
            cases: dict[bool, list[str]] = {True: [], False: []}
            for key, ratio in self._measured(suite, target):
                where = f"{key.scenario} {key.value}".strip()
                cases[target.is_met(ratio)].append(f"{where} ({ratio:.3g})")
            lines.append([str(target), *(", ".join(cases[is_met]) for is_met in (True, False))])
        return markdown_rows(["target", "met", "missed"], lines)

    def _measured(self, suite: SuiteFile, target: SuiteTarget) -> Iterator[tuple[Key, float]]:
        """The value that the target bounds, in each case."""
        cases = self._cases(suite, target, target.setting)
        if not target.overall:
            yield from cases
        elif ratios := [ratio for _, ratio in cases]:
            yield Key(_ALL, "", target.setting), geometric_mean(ratios)

    def _cases(
        self, suite: SuiteFile, target: SuiteTarget, setting: str
    ) -> Iterator[tuple[Key, float]]:
        """The value that the target would bound if it were about this setting, in each case."""
        wanted = msgspec.structs.replace(target, setting=setting)
        for name in suite.grid:
            for key, cells in self._of(suite, name):
                # An unfinished job counts as done where the run ended: at its best.
                number = _first if target.overall else _number
                value = number(cells.get(target.column, ""))
                if key.setting != setting or value is None:
                    continue
                others = self._numbers(key, wanted)
                if not target.of:
                    yield key, value
                elif others and target.best_of(others):
                    yield key, value / target.best_of(others)

    def _overall_table(self, suite: SuiteFile, target: SuiteTarget) -> str:
        """Geometric means of each setting of a target against the best other one, by machine."""
        settings = [one for one in suite.settings if one in (target.setting, *target.of)]
        wanted = msgspec.structs.replace(target, of=tuple(settings))
        columns = [*suite.machines, _ALL] if suite.machines else [_ALL]
        lines = []
        for setting in settings:
            cases = list(self._cases(suite, wanted, setting))
            if not cases:
                continue
            line = [f"`{setting}`"]
            for column in columns:
                some = [
                    ratio
                    for key, ratio in cases
                    if column in (_ALL, key.scenario.partition("/")[0])
                ]
                line.append(f"{geometric_mean(some):.3f}" if some else "")
            if target.keeps is not None:
                num_kept = sum(self._keeps(key, target.keeps) for key, _ in cases)
                line.append(f"{num_kept} of {len(cases)}")
            lines.append(line)
        kept = [f"keeps {target.keeps.column}"] if target.keeps is not None else []
        return markdown_rows(["setting", *columns, *kept], lines) if lines else ""

    def plot(self, suite: SuiteFile, path: Path) -> None:
        """Each column against the varied option, a row of panels per scenario that varies one."""
        grid: list[list[Panel]] = []
        for name, scenario in suite.grid.items():
            rows = list(self._of(suite, name))
            if scenario.varied is None or scenario.cheap or not rows:
                continue
            panels = []
            for column in suite.drawn or suite.columns:
                lines: dict[str, list[tuple[float, float | None]]] = {}
                for key, cells in rows:
                    point = float(key.value), _number(cells.get(column, ""))
                    lines.setdefault(key.setting, []).append(point)
                title = scenario.title or name
                panels.append(Panel(title=title, x=scenario.varied, y=column, lines=lines))
            grid.append(panels)
        if not grid:
            raise ConfigError("nothing to draw: no scenario of this suite varies an option")
        plot_panels(grid, path)


def plot_results(folder: Path, results: Mapping[str, RunResult]) -> None:
    """Plots that compare the runs with online requests."""
    shown = {title_of(name): one for name, one in results.items() if one.spec.setting.has_online}
    runs = {
        name: Run(
            records=one.records,
            observed_until_s=one.end_s,
            iterations=one.iterations,
            default_slo=one.spec.slo,
        )
        for name, one in shown.items()
    }
    summaries = {name: one.summary for name, one in shown.items()}
    write_comparison_plots(folder, summaries=summaries, runs=runs)


def read_page(path: Path) -> Page:
    """The rows of a page. ConfigError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    page = Page()
    scenario = ""
    headers: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("## "):
            scenario, headers = line.removeprefix("## ").partition(":")[0], []
        elif not line.startswith("|") or line.startswith("|---"):
            continue
        elif not headers:
            headers = cells
        elif headers[0] == "setting":
            row = {
                header: cell.partition(_BESIDE)[0]
                for header, cell in zip(headers, cells, strict=True)
            }
            known = {*COLUMNS, *_MORE}
            varied = headers[1] if len(headers) > 1 and headers[1] not in known else ""
            setting, value = row.pop("setting").strip("`"), row.pop(varied, "")
            page.rows[Key(scenario, value, setting)] = row
    return page


def stale_cells(page: Page, key: Key, cells: Mapping[str, str]) -> list[str]:
    """One sentence for each cell of a row that differs from the page beyond `TOLERANCE`."""
    recorded = page.rows[key]
    row, commit = " ".join(part for part in key if part), recorded.get("commit", "")
    return [
        f"{row}: {column} was {recorded[column]} at {commit}, now {now}"
        for column, now in cells.items()
        if column in recorded and not _is_same(recorded[column], now)
    ]


def _is_same(one: str, other: str) -> bool:
    if _NUMBER.sub("0", one) != _NUMBER.sub("0", other):
        return False
    return all(map(_is_near, _NUMBER.findall(one), _NUMBER.findall(other)))


def _is_near(one: str, other: str) -> bool:
    unit = 10.0 ** -len(one.partition(".")[2])
    a, b = _value(one), _value(other)
    return abs(a - b) <= max(TOLERANCE * abs(a), unit) * (1 + 1e-9)
