"""Pictures of several runs side by side. All read only, and need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.figure import (
    COLOURS,
    TARGET_COLOUR,
    TimeAxis,
    by_thousands,
    label_rate,
    legend_above,
    log_if_wide,
    new_figure,
    save,
    tidy,
)
from cosched.lab.metrics.plots import draw_occupancy, hit_rate_curve
from cosched.lab.metrics.records import Floats, IterationLog, RequestRecord
from cosched.lab.metrics.slo import Verdict, common_slo, judge, needed_scale, with_defaults
from cosched.lab.metrics.summary import Summary
from cosched.lab.metrics.window import Window, last_event_s

_NO_SLO = Slo()
_SCALES = (1 / 8, 8.0)
_PALETTE = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555"),
    *("#6A3D9A", "#A6761D", "#E41A1C", "#1B5E20", "#B5BD00", "#000000", "#F4A6C0"),
    *("#00406B", "#7FC97F", "#8C2D04", "#9E9AC8", "#00CED1", "#C7A76C", "#800040"),
)
_LINES = ("-", "--", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = tuple(
    (colour, _LINES[index // 7 % 3], _MARKERS[(index + index // 7) % 7])
    for index, colour in enumerate(_PALETTE)
)
"""Colour, line and marker of the first series, of the second, ...: no colour twice in 21."""

_MARKER_PT = 9.0
_NEAR_SHARE = 0.03  # of the range of all points: about a marker
_RING_PT = 6.0  # by how much each further point at one place is wider


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records of a run, and what the summary of it was made with.

    iterations  None: they were not recorded
    """

    records: Sequence[RequestRecord]
    window: Window | None = None
    observed_until_s: float | None = None
    iterations: IterationLog | None = None

    def online(self) -> list[RequestRecord]:
        """The online requests of the window."""
        window = self.whole_window()
        return [
            r
            for r in self.records
            if r.request_class is RequestClass.ONLINE and r.arrival_s in window
        ]

    def whole_window(self) -> Window:
        """Its window, or else one that covers all records."""
        return self.window or Window.covering(self.records, IterationLog())

    @property
    def until_s(self) -> float:
        if self.observed_until_s is not None:
            return self.observed_until_s
        end_s = 0.0 if self.window is None else self.window.end_s
        return max(end_s, last_event_s(self.records, IterationLog()))


def write_comparison_plots(
    folder: Path,
    *,
    summaries: Mapping[str, Summary],
    runs: Mapping[str, Run] | None = None,
    default_slo: Slo = _NO_SLO,
) -> list[Path]:
    """All pictures that compare runs, in a folder that is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        plot_tradeoff(summaries, folder / "tradeoff.png"),
        plot_bars(summaries, folder / "comparison.png"),
    ]
    if runs:
        written += [
            plot_cdfs(runs, folder / "latency_cdf.png", default_slo=default_slo),
            plot_attainment(runs, folder / "attainment.png", default_slo=default_slo),
            plot_hit_rates(runs, folder / "hit_rates.png"),
            plot_served(runs, folder / "served.png", default_slo=default_slo),
        ]
    return written


def plot_served(runs: Mapping[str, Run], path: Path, *, default_slo: Slo = _NO_SLO) -> Path:
    """Who was served when: how long each online request waited for its first token, by its arrival,
    and whether it met its targets; below it the KV cache by class, where that is known. Of the
    first `_MOST_SERVED` runs."""
    shown = dict(list(runs.items())[:_MOST_SERVED])
    figure = new_figure(width=1.2 + 3.3 * len(shown), height=5.6)
    grid = figure.subplots(
        2, len(shown), sharex=True, sharey="row", height_ratios=(1.4, 1), squeeze=False
    )
    window = max((run.whole_window() for run in shown.values()), key=lambda w: w.end_s)
    axis = TimeAxis.of(window)
    for place, ((name, run), upper, lower) in enumerate(zip(shown.items(), *grid, strict=True)):
        tidy(upper, y="TTFT [s]" if place == 0 else None)
        tidy(lower, x=axis.label, y="KV cache [%]" if place == 0 else None)
        _served_panel(upper, name, run, default_slo, axis)
        if run.iterations is not None and len(run.iterations):
            draw_occupancy(lower, run.iterations, window=window)
        axis.limit(lower, window)
    waits = [r.ttft_s for run in shown.values() for r in run.online() if r.ttft_s is not None]
    log_if_wide(grid[0, 0].yaxis, np.array(waits))
    for axes, where in ((grid[0, 0], "outside upper left"), (grid[1, 0], "outside lower left")):
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc=where, ncols=4, frameon=False, fontsize=9)
    return save(figure, path)


_MOST_SERVED = 4

_SERVED = {
    "both targets met": COLOURS[RequestClass.ONLINE],
    "first token in time, then too slow": "#CC79A7",
    "first token late": TARGET_COLOUR,
}


def _served_panel(axes: Any, name: str, run: Run, default_slo: Slo, axis: TimeAxis) -> None:
    points: dict[str, list[tuple[float, float]]] = {label: [] for label in _SERVED}
    met, too_slow, late = points.values()
    unserved: list[float] = []
    targets: set[float | None] = set()
    num_met = num_missed = 0
    for record in run.online():
        slo = with_defaults(record.slo, default_slo)
        targets.add(slo.ttft_s)
        verdicts = judge(record, slo, now_s=run.until_s)
        num_met += verdicts.joint is Verdict.MET
        num_missed += verdicts.joint is Verdict.MISSED
        if record.ttft_s is None or not record.ok:
            unserved.append(record.arrival_s)
            continue
        of = met
        if verdicts.ttft is Verdict.MISSED:
            of = late
        elif verdicts.tpot is Verdict.MISSED:
            of = too_slow
        of.append((record.arrival_s, record.ttft_s))
    num = num_met + num_missed
    share = f": {100 * num_met / num:.0f} % met" if num else ""
    axes.set_title(f"{name}{share}", loc="left", fontsize=11)
    for label, colour in _SERVED.items():
        times = np.array(points[label]).reshape(-1, 2)
        axes.plot(
            times[:, 0] / axis.seconds, times[:, 1], ".", ms=4, mew=0, color=colour, label=label
        )
    if unserved:
        axes.plot(
            np.array(unserved) / axis.seconds,
            np.full(len(unserved), 0.98),
            "v",
            ms=4,
            mew=0,
            color="#555555",
            transform=axes.get_xaxis_transform(),
            label="none yet",
        )
    target_s = targets.pop() if len(targets) == 1 else None
    if target_s is not None:
        axes.axhline(target_s, color=TARGET_COLOUR, lw=1.0, ls="--", label="TTFT target")


def plot_hit_rates(runs: Mapping[str, Run], path: Path) -> Path:
    """Share of offline prompt tokens that were cached, by admission, over time (Echo Fig. 9)."""
    figure = new_figure(width=7.5, height=4.0)
    windows = {name: run.whole_window() for name, run in runs.items()}
    longest = max(windows.values(), key=lambda window: window.end_s)
    axis = TimeAxis.of(longest)
    axes = tidy(
        figure.subplots(),
        title="Offline prompt tokens from the prefix cache",
        x=axis.label,
        y="hit rate [%]",
    )
    for (name, run), (colour, line, _) in zip(runs.items(), _cycle(len(runs)), strict=True):
        times_s, rate = hit_rate_curve(run.records, RequestClass.OFFLINE, window=windows[name])
        if len(times_s):
            axes.plot(times_s / axis.seconds, 100 * rate, color=colour, ls=line, lw=1.6, label=name)
    axes.set_ylim(0, 100)
    axis.limit(axes, longest)
    _legend_beside(axes, len(runs))
    return save(figure, path)


def attainment_curve(run: Run, *, default_slo: Slo = _NO_SLO) -> tuple[Floats, Floats]:
    """(scales, attainment): online requests that meet all their targets when each target is
    multiplied by a scale. Requests that were open and not yet late are left out."""
    until_s = run.until_s
    needed = [
        needed_scale(r, with_defaults(r.slo, default_slo), now_s=until_s) for r in run.online()
    ]
    return _cumulative([scale for scale in needed if scale is not None])


def plot_attainment(runs: Mapping[str, Run], path: Path, *, default_slo: Slo = _NO_SLO) -> Path:
    """SLO attainment of online requests against how loose the SLOs are."""
    figure = new_figure(width=7.5, height=4.0)
    axes = tidy(
        figure.subplots(),
        title="Online requests that meet all their SLOs",
        x="SLO scale [x the targets]",
        y="attainment [%]",
    )
    for (name, run), (colour, line, _) in zip(runs.items(), _cycle(len(runs)), strict=True):
        scales, attainment = _prolonged(
            *attainment_curve(run, default_slo=default_slo), to=_SCALES[1]
        )
        axes.step(scales, 100 * attainment, where="post", color=colour, ls=line, lw=1.6, label=name)
    axes.axvline(1.0, color=TARGET_COLOUR, lw=1.0, ls="--")
    axes.set_xscale("log", base=2)
    axes.set_xlim(*_SCALES)
    axes.set_ylim(0, 102)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend_beside(axes, len(runs))
    return save(figure, path)


def plot_cdfs(runs: Mapping[str, Run], path: Path, *, default_slo: Slo = _NO_SLO) -> Path:
    """TTFT and TPOT of online requests. A curve that ends below 100 % has requests without one:
    failed or, at the end of the run, unanswered."""
    figure = new_figure(width=9.5, height=3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    _cdf_panels(left, right, runs, default_slo)
    _legend_beside(right, len(runs))
    return save(figure, path)


def _cdf_panels(left: Any, right: Any, runs: Mapping[str, Run], default_slo: Slo) -> Slo:
    """Gives the targets it has drawn."""
    tidy(left, title="Online TTFT", x="TTFT [s]", y="requests [%]")
    tidy(right, title="Online TPOT", x="TPOT [ms]")
    target = common_slo((r for run in runs.values() for r in run.online()), default_slo)
    for axes, latencies, limit, unit in (
        (left, _ttfts, target.ttft_s, 1.0),
        (right, _tpots_ms, target.tpot_s, 1e3),
    ):
        curves = {name: _cumulative(latencies(run)) for name, run in runs.items()}
        last = max((float(x[-1]) for x, _ in curves.values() if len(x)), default=1.0)
        for (name, curve), (colour, line, _) in zip(curves.items(), _cycle(len(runs)), strict=True):
            x, share = _prolonged(*curve, to=last)
            axes.step(x, 100 * share, where="post", color=colour, ls=line, lw=1.6, label=name)
        if limit is not None:
            axes.axvline(limit * unit, color=TARGET_COLOUR, lw=1.0, ls="--")
        axes.set_ylim(0, 102)
        log_if_wide(axes.xaxis, np.concatenate([x for x, _ in curves.values()] or [np.empty(0)]))
    return target


def plot_overview(
    runs: Mapping[str, Run],
    summaries: Mapping[str, Summary],
    path: Path,
    *,
    default_slo: Slo = _NO_SLO,
    shaded: Sequence[tuple[float, float]] = (),
    marked: Collection[str] = (),
    caption: str = "",
) -> Path:
    """A few runs of one workload on one page: how TTFT and TPOT are distributed, the TTFT of each
    online request, and the offline work done.

    shaded  stretches of time that are drawn grey [s]; marked: names that get an exclamation mark
    """
    figure = new_figure(width=11, height=7.4)
    (ttft, tpot), (over_time, offline) = figure.subplots(2, 2)
    target = _cdf_panels(ttft, tpot, runs, default_slo)
    tidy(over_time, title="TTFT of each online request", x="arrival [s]", y="TTFT [s]")
    tidy(offline, title="Offline work done beside them", y="offline requests/s")
    for begin_s, end_s in shaded:
        over_time.axvspan(begin_s, end_s, color="#EEEEEE", lw=0)
    for (name, run), (colour, _, _) in zip(runs.items(), _cycle(len(runs)), strict=True):
        known = [(r.arrival_s, r.ttft_s) for r in run.online() if r.ttft_s is not None]
        if known:
            over_time.scatter(*zip(*known, strict=True), s=11, color=colour, alpha=0.8)
        rate = summaries[name].offline.requests_per_s or 0.0
        offline.bar_label(offline.bar(name, rate, color=colour, width=0.6), [label_rate(rate)])
    if target.ttft_s is not None:
        over_time.axhline(target.ttft_s, color=TARGET_COLOUR, lw=1.0, ls="--")
    over_time.set_yscale("log")
    over_time.set_xlim(left=min(run.whole_window().start_s for run in runs.values()))
    over_time.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles, names = ttft.get_legend_handles_labels()
    titles = [f"{name} (!)" if name in marked else name for name in names]
    figure.legend(handles, titles, loc="outside upper center", ncols=7, frameon=False)
    figure.supxlabel(caption, fontsize=8, color="#666666")
    return save(figure, path)


def plot_tradeoff(summaries: Mapping[str, Summary], path: Path) -> Path:
    """Online attainment against offline throughput: the upper right corner is the aim. Of points at
    the same place each further one is a ring around those before."""
    figure = new_figure(width=7.5, height=4.4)
    axes = tidy(
        figure.subplots(),
        title="What online requests get, what offline work gets done",
        x="online requests that meet all their SLOs [%]",
        y="offline tokens/s",
    )
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.7)
    points = {
        name: (100 * attained, tokens_per_s)
        for name, summary in summaries.items()
        if (attained := summary.online.attainment.joint.ratio) is not None
        and (tokens_per_s := summary.offline.tokens_per_s) is not None
    }
    rings = dict(zip(points, _rings(list(points.values())), strict=True))
    for name, (colour, _, marker) in zip(summaries, _cycle(len(summaries)), strict=True):
        if name not in points:
            continue
        x, y = points[name]
        ring = rings[name]
        style = {
            "marker": "o" if ring else marker,
            "mfc": "none" if ring else colour,
            "mec": colour if ring else "white",
            "mew": 2.0 if ring else 0.8,
            "ls": "",
        }
        size = _MARKER_PT + ring * _RING_PT
        axes.plot(x, y, ms=size, clip_on=False, zorder=4 - 0.1 * ring, **style)
        axes.plot([], [], ms=_MARKER_PT, label=name, **style)
    axes.set_xlim(right=100)
    axes.margins(x=0.06, y=0.08)
    axes.set_ylim(bottom=0)
    by_thousands(axes.yaxis)
    _legend_beside(axes, len(summaries))
    return save(figure, path)


def _rings(points: Sequence[tuple[float, float]]) -> list[int]:
    """How many points before it lie at, or nearly at, the place of each."""
    widths = [max(of_axis) - min(of_axis) for of_axis in zip(*points, strict=True)]

    def is_near(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return all(
            abs(a - b) <= _NEAR_SHARE * width
            for a, b, width in zip(one, other, widths, strict=True)
        )

    return [
        sum(is_near(point, earlier) for earlier in points[:index])
        for index, point in enumerate(points)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    value: Callable[[Summary], float | None]
    show: Callable[[float], str]
    colour: str


_PANELS = (
    _Panel(
        title="all SLOs met [%]",
        value=lambda s: _scaled(s.online.attainment.joint.ratio, 100),
        show=lambda v: f"{v:.1f}",
        colour=COLOURS[RequestClass.ONLINE],
    ),
    _Panel(
        title="TTFT p99 [s]",
        value=lambda s: s.online.ttft_s.p99,
        show=lambda v: f"{v:.3g}",
        colour=COLOURS[RequestClass.ONLINE],
    ),
    _Panel(
        title="TPOT p99 [ms]",
        value=lambda s: _scaled(s.online.tpot_s.p99, 1000),
        show=lambda v: f"{v:.3g}",
        colour=COLOURS[RequestClass.ONLINE],
    ),
    _Panel(
        title="offline tokens/s",
        value=lambda s: s.offline.tokens_per_s,
        show=label_rate,
        colour=COLOURS[RequestClass.OFFLINE],
    ),
)


def plot_bars(summaries: Mapping[str, Summary], path: Path) -> Path:
    """One row per run, one panel per metric."""
    figure = new_figure(width=10.5, height=1.1 + 0.34 * max(len(summaries), 1))
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    rows = np.arange(len(summaries))
    for panel, axes in zip(_PANELS, panels, strict=True):
        tidy(axes, title=panel.title)
        axes.title.set_fontsize(10)
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", bottom=False, labelbottom=False)
        axes.tick_params(axis="y", length=0)
        values = [panel.value(summary) for summary in summaries.values()]
        axes.barh(rows, [value or 0.0 for value in values], height=0.68, color=panel.colour)
        widest = max((value for value in values if value is not None), default=0.0)
        for row, value in zip(rows, values, strict=True):
            axes.annotate(
                "-" if value is None else panel.show(value),
                (value or 0.0, row),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color="#333333",
            )
        axes.set_xlim(0, 1.25 * widest or 1.0)
    panels[0].set_yticks(rows, list(summaries))
    panels[0].invert_yaxis()
    return save(figure, path)


def _ttfts(run: Run) -> list[float]:
    return [math.inf if r.ttft_s is None or not r.ok else r.ttft_s for r in run.online()]


def _tpots_ms(run: Run) -> list[float]:
    return [
        math.inf if r.tpot_s is None else 1e3 * r.tpot_s
        for r in run.online()
        if not r.is_finished or r.num_output_tokens > 1
    ]


def _prolonged(x: Floats, share: Floats, *, to: float) -> tuple[Floats, Floats]:
    """The curve, flat from its last step on."""
    return (np.append(x, max(to, x[-1])), np.append(share, share[-1])) if len(x) else (x, share)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _cumulative(values: Sequence[float]) -> tuple[Floats, Floats]:
    """(value, share of all values up to it), the finite ones."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    share = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    finite = np.isfinite(ordered)
    return ordered[finite], share[finite]


def _cycle(count: int) -> list[tuple[str, str, str]]:
    return [STYLES[index % len(STYLES)] for index in range(count)]


def _legend_beside(axes: Any, count: int) -> None:
    legend_above(
        axes,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        ncols=1 if count <= 16 else 2,
    )
