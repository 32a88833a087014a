"""The page of a trial: its table, its picture, and whether to deploy cosched. Pure, but for the
picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cosched.core.request import Slo
from cosched.lab.benchmark.live import LiveResult
from cosched.lab.columns import COLUMNS
from cosched.lab.metrics.plots import Run, plot_overview
from cosched.lab.metrics.stats import ratio
from cosched.lab.metrics.summary import Summary
from cosched.lab.metrics.table import Row, markdown_rows
from cosched_traces.builders import DEMO_BURSTS

ATTAINMENT = 0.99
"""Share of chat that must meet its targets."""
_SLOWER_ALONE = 1.1
"""TPOT p50 of chat alone over that under stock SGLang, from which on cosched is not advised."""
_LONGER_JOB = 1.02
"""The same of the time of the job."""
_BUSY_LOAD = 1.5  # load average per core; a server that was just started makes some of its own


class PhaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a phase beside its requests; None: not known.

    server_start_s    until the server was warmed up [s]
    load_average      of the machine before the phase, per core
    job_requests      of the whole batch; 0: there is none
    job_tokens        of its prompts and replies
    idle_share        share of the phase in which the scheduler had no work
    prediction_error  mean relative error of the predicted times of iterations
    """

    server_start_s: float | None = None
    load_average: float = 0.0
    job_requests: int = 0
    job_tokens: int = 0
    idle_share: float | None = None
    prediction_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """A finished phase. title: its row of the table."""

    title: str
    result: LiveResult
    facts: PhaseFacts

    @property
    def summary(self) -> Summary:
        return self.result.summary

    @property
    def attainment(self) -> float:
        """Share of chat that met its targets; 0 where there was none."""
        return self.summary.online.attainment.joint.ratio or 0.0

    @property
    def is_job_done(self) -> bool:
        job = self.summary.job
        return job.makespan_s is not None and job.num_lines == self.facts.job_requests > 0

    @property
    def job_s(self) -> float | None:
        """Time of the whole job [s], where it was not done at its tokens per second; None: there is
        none, or nothing of it was done."""
        if self.is_job_done:
            return self.summary.job.makespan_s
        return ratio(self.facts.job_tokens, self.summary.offline.tokens_per_s) or None

    def notes(self) -> list[str]:
        lines = self.result.notes()
        if self.facts.load_average > _BUSY_LOAD:
            lines.append(
                f"{self.title}: others used the machine too (load average "
                f"{self.facts.load_average:.1f} per core before it)"
            )
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPage:
    """A whole trial.

    results  by phase: first chat alone, last chat beside the batch under cosched
    about    what was replayed on what
    command  to deploy, where nothing speaks against it; None: the server runs already
    made_by  the command of the trial, its versions and how long it took
    """

    results: Mapping[str, PhaseResult]
    about: str
    command: str | None
    made_by: str

    def __post_init__(self) -> None:
        assert len(self.results) > 1, f"{self.results.keys()=}"

    @property
    def alone(self) -> PhaseResult:
        return next(iter(self.results.values()))

    @property
    def beside(self) -> PhaseResult:
        return list(self.results.values())[-1]

    def objections(self) -> list[str]:
        """Why cosched should not be deployed."""
        found = [
            f"{one.title}: {what}"
            for one in self.results.values()
            for is_so, what in (
                (one.result.is_client_late, "the client itself was late: the machine is too busy"),
                (one.summary.online.num_failed > 0, "requests of chat failed"),
            )
            if is_so
        ]
        slo = self.alone.result.spec.slo
        if self.alone.attainment < ATTAINMENT:
            return [
                *found,
                f"chat misses its targets ({_targets(slo)}) without any batch: "
                f"{_percent(self.alone.attainment)} of the requests meet them. Name larger ones "
                "with --cosched-slo-ttft-ms and --cosched-slo-tpot-ms, or less chat with --rate",
            ]
        if self.beside.attainment < ATTAINMENT:
            found.append(
                f"chat misses its targets ({_targets(slo)}) beside the batch: "
                f"{_percent(self.beside.attainment)} of the requests meet them, "
                f"{_percent(self.alone.attainment)} alone"
            )
        if self.beside.job_s is None and self.beside.facts.job_requests:
            found.append("nothing of the batch was done")
        return found + self._slower_than_stock()

    def _slower_than_stock(self) -> list[str]:
        found = []
        alone = self.results.get("cosched-alone")
        pace = self._over_alone(alone, "tpot_s", "p50") if alone else None
        if pace is not None and pace > _SLOWER_ALONE:
            found.append(
                f"without a batch, chat takes {pace:.2f} times as long per token as under stock"
            )
        for name, one in self.results.items():
            mine, theirs = self.beside.job_s, one.job_s
            keeps_targets = one.attainment >= min(ATTAINMENT, self.beside.attainment)
            if name == "cosched-batch" or not (mine and theirs and keeps_targets):
                continue
            if mine > _LONGER_JOB * theirs:
                found.append(
                    f"the job takes {mine / theirs:.2f} times as long as under {one.title}, which "
                    "keeps the targets of chat as well"
                )
        return found

    def verdict(self) -> str:
        """In Markdown: the command, or why not."""
        objections = self.objections()
        if not objections and self.command is None:
            return f"**Keep it**: {self._effect()}.\n"
        if not objections:
            return f"**Deploy**: {self._effect()}.\n\n```bash\n{self.command}\n```\n"
        head = "**Do not deploy**" if self.command else "**Do not run this batch beside this chat**"
        return "\n".join([f"{head}:\n", *(f"* {one}" for one in objections)]) + "\n"

    def _effect(self) -> str:
        ttft, tpot = (
            " to ".join(f"{1e3 * (seconds or 0.0):.0f}" for seconds in pair)
            for pair in (
                [one.summary.online.ttft_s.p50 for one in (self.alone, self.beside)],
                [one.summary.online.tpot_s.p50 for one in (self.alone, self.beside)],
            )
        )
        return (
            f"beside the batch {_percent(self.beside.attainment)} of chat meets its targets; its "
            f"TTFT goes from {ttft} ms and its TPOT from {tpot} ms (p50)"
        )

    def _over_alone(self, one: PhaseResult, what: str, of: str) -> float | None:
        """A latency of chat over that of chat alone under stock."""
        mine, alone = (getattr(getattr(x.summary.online, what), of) for x in (one, self.alone))
        return ratio(mine, alone)

    def rows(self) -> list[Row]:
        return [(one.title, self._cells(one)) for one in self.results.values()]

    def _cells(self, one: PhaseResult) -> dict[str, str]:
        def pair(what: str) -> str:
            cells = [COLUMNS[f"{what} {p} ms"].shown(one.summary) for p in ("p50", "p99")]
            return ", ".join(cells) if all(cells) else ""

        def of_alone(what: str) -> str:
            ratios = [self._over_alone(one, what, of) for of in ("p50", "p99")]
            is_known = one is not self.alone and all(ratios)
            return ", ".join(f"{x:.1f}" for x in ratios) if is_known else ""

        job_s = one.job_s
        return {
            "both targets met %": COLUMNS["both met %"].shown(one.summary),
            "TTFT p50, p99 ms": pair("TTFT"),
            "TPOT p50, p99 ms": pair("TPOT"),
            "TTFT x alone": of_alone("ttft_s"),
            "TPOT x alone": of_alone("tpot_s"),
            "batch tokens/s": COLUMNS["offline tokens/s"].shown(one.summary) if job_s else "",
            "job s": f"{'' if one.is_job_done else '~'}{job_s:,.0f}" if job_s else "",
            "prediction error %": _number(one.facts.prediction_error),
            "idle %": _number(one.facts.idle_share),
        }

    def text(self, picture: str) -> str:
        """picture: its path from the page."""
        notes = [note for one in self.results.values() for note in one.notes()]
        headers = list(self.rows()[0][1])
        rows = [(title, *cells.values()) for title, cells in self.rows()]
        return "\n".join(
            [
                f"# A trial of cosched\n\n{self.about}\n",
                markdown_rows(["", *headers], rows),
                _LEGEND,
                f"![TTFT and TPOT of chat, TTFT over time, batch requests per second]({picture})\n",
                self.verdict(),
                *(f"* {note}" for note in notes),
                *([""] if notes else []),
                f"{self.made_by}\n",
            ]
        )

    def draw(self, path: Path, *, has_bursts: bool) -> Path:
        """has_bursts: the chat is `demo-chat`."""
        results = {one.title: one.result for one in self.results.values()}
        end_s = self.alone.result.spec.end_s
        return plot_overview(
            {
                title: Run(
                    records=result.records,
                    window=result.summary.window,
                    default_slo=result.spec.slo,
                )
                for title, result in results.items()
            },
            {title: result.summary for title, result in results.items()},
            path,
            shaded=[(a * end_s, b * end_s) for a, b in DEMO_BURSTS] if has_bursts else (),
            marked={title for title, result in results.items() if result.is_client_late},
            caption="(!) not valid: the client itself was late"
            + has_bursts * "; grey: bursts of chat",
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "about": self.about,
            "objections": self.objections(),
            "command": self.command,
            "phases": {
                name: {
                    "title": one.title,
                    "job_s": one.job_s,
                    "is_job_done": one.is_job_done,
                    "max_client_delay_s": one.result.max_client_delay_s,
                    **msgspec.structs.asdict(one.facts),
                    "cells": self._cells(one),
                    "summary": one.summary.to_dict(with_host=False),
                }
                for name, one in self.results.items()
            },
        }


_LEGEND = (
    "*x alone*: over those of the first row. *job*: the whole batch; with `~` at its "
    "tokens per second, as it was not done when the phase ended. *prediction error*: of cosched's "
    "predictor, mean over iterations. *idle*: the scheduler had no work.\n"
)


def _number(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _targets(slo: Slo) -> str:
    return ", ".join(
        f"{name} {1e3 * seconds:g} ms"
        for name, seconds in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
        if seconds is not None
    )
