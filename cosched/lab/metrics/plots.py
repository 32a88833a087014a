"""Plots of one run over time, and of several runs side by side. All need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.figure import (
    COLOURS,
    TARGET_COLOUR,
    Bins,
    TimeAxis,
    by_thousands,
    label_rate,
    legend_above,
    legend_beside,
    log_if_wide,
    new_figure,
    save,
    stack,
    style,
    tidy,
)
from cosched.lab.metrics.records import ColumnLog, Floats, IterationLog, RequestRecord
from cosched.lab.metrics.slo import Verdict, common_slo, judge, with_defaults
from cosched.lab.metrics.stats import Window, last_event_s
from cosched.lab.metrics.summary import Summary, served_tokens
from cosched.memory.occupancy import KV_USES

_NO_SLO = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records of a run, and what its summary was made with.

    kv           KV memory by use, once a second; None: not recorded
    default_slo  targets of online requests that have none of their own
    """

    records: Sequence[RequestRecord]
    window: Window | None = None
    observed_until_s: float | None = None
    iterations: IterationLog | None = None
    kv: ColumnLog | None = None
    default_slo: Slo = _NO_SLO

    def online(self) -> list[RequestRecord]:
        """The online requests of the window."""
        window = self.whole_window()
        online = (r for r in self.records if r.request_class is RequestClass.ONLINE)
        return [r for r in online if r.arrival_s in window]

    def whole_window(self) -> Window:
        return self.window or Window.covering(self.records, self.iterations or IterationLog())

    @property
    def until_s(self) -> float:
        if self.observed_until_s is not None:
            return self.observed_until_s
        end_s = 0.0 if self.window is None else self.window.end_s
        return max(end_s, last_event_s(self.records, IterationLog()))


def write_run_plots(folder: Path, run: Run) -> list[Path]:
    """All plots of one run."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        plot_throughput(run, folder / "throughput.png"),
        plot_latency(run, folder / "latency.png"),
        plot_kv_memory(run, folder / "kv_memory.png"),
    ]


def write_comparison_plots(
    folder: Path, *, summaries: Mapping[str, Summary], runs: Mapping[str, Run]
) -> list[Path]:
    """All plots that compare runs."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        plot_tradeoff(summaries, folder / "tradeoff.png"),
        plot_cdfs(runs, folder / "latency_cdf.png"),
        plot_served(runs, folder / "served.png"),
    ]


def plot_throughput(run: Run, path: Path) -> Path:
    """Served tokens per second by class, stacked."""
    window = run.whole_window()
    figure, axis = new_figure(), TimeAxis.of(window)
    axes = tidy(figure.subplots(), title="Throughput", x=axis.label, y="served tokens/s")
    bins = Bins(window, num_events=len(run.records), events_per_bin=20)
    layers = []
    for request_class, colour in COLOURS.items():
        mine = (r for r in run.records if r.request_class is request_class)
        served = served_tokens(mine, until_s=run.until_s)
        tokens = bins.total(served.prompt_times, served.prompt_tokens)
        tokens += bins.total(served.output_times, served.output_tokens)
        layers.append((request_class.value, colour, tokens / bins.width_s))
    stack(axes, bins.edges / axis.seconds, layers, alpha=0.85)
    axes.set_ylim(bottom=0)
    axis.limit(axes, window)
    by_thousands(axes.yaxis)
    legend_above(axes)
    return save(figure, path)


def plot_latency(run: Run, path: Path) -> Path:
    """TTFT and TPOT of the online requests by arrival, with the targets if all have the same."""
    online, axis = run.online(), TimeAxis.of(run.whole_window())
    slo = common_slo(online, run.default_slo)
    figure = new_figure(height=5.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    tidy(upper, title="Online requests by arrival", y="TTFT [s]")
    tidy(lower, x=axis.label, y="TPOT [ms]")
    ttfts = [(r.arrival_s, r.ttft_s) for r in online if r.ok]
    tpots = [(r.arrival_s, None if r.tpot_s is None else 1e3 * r.tpot_s) for r in online if r.ok]
    _latency_panel(upper, run, ttfts, slo.ttft_s)
    _latency_panel(lower, run, tpots, None if slo.tpot_s is None else 1e3 * slo.tpot_s)
    legend_above(upper)
    return save(figure, path)


def _latency_panel(
    axes: Any, run: Run, points: Iterable[tuple[float, float | None]], target: float | None
) -> None:
    window = run.whole_window()
    axis = TimeAxis.of(window)
    known = np.array([(time, y) for time, y in points if y is not None]).reshape(-1, 2)
    times, values = known[:, 0], known[:, 1]
    colour = COLOURS[RequestClass.ONLINE]
    axes.plot(times / axis.seconds, values, ".", ms=3, alpha=0.2, mew=0, color=colour)
    bins = Bins(window, num_events=len(times), events_per_bin=50)
    p50, p99 = bins.percentiles(times, values, (50, 99))
    axes.plot(bins.centres / axis.seconds, p50, color=colour, lw=1.6, label="p50")
    axes.plot(bins.centres / axis.seconds, p99, color="#003B5C", lw=1.2, label="p99")
    if target is not None:
        axes.axhline(target, color=TARGET_COLOUR, lw=1.3, ls="--", label="SLO")
    log_if_wide(axes.yaxis, values)
    failed = [r.arrival_s for r in run.online() if not r.ok]
    _mark_above(axes, failed, axis, colour=TARGET_COLOUR, label="failed")
    axis.limit(axes, window)


def _mark_above(
    axes: Any, times: Sequence[float], axis: TimeAxis, *, colour: str, label: str
) -> None:
    """Triangles at the upper edge."""
    if times:
        height, place = np.full(len(times), 0.97), axes.get_xaxis_transform()
        x = np.array(times) / axis.seconds
        axes.plot(x, height, "v", ms=4, mew=0, color=colour, transform=place, label=label)


_ITERATION_USES = {
    "kv_online_tokens": KV_USES["running_online"],
    "kv_offline_tokens": KV_USES["running_offline"],
    "kv_cached_tokens": KV_USES["dead"]._replace(text="cached"),
    "kv_free_tokens": KV_USES["free"],
}

HOST_USES = ("host_doubled", "host_returning", "host_referenced", "host_dead")
"""Columns of the KV log that add up to the KV in host memory."""


def plot_kv_memory(run: Run, path: Path) -> Path:
    """KV memory by use (Echo Fig. 10), tokens that were evicted and recomputed, and hit rates (Echo
    Fig. 9), over time. Without a KV log the uses are from the iterations, and nothing is known
    of evictions."""
    window = run.whole_window()
    axis = TimeAxis.of(window)
    has_log = run.kv is not None and len(run.kv) > 0
    figure = new_figure(height=7.5 if has_log else 5.2)
    memory, *evicted, hits = figure.subplots(3 if has_log else 2, 1, sharex=True)
    tidy(memory, title="KV memory", y="share of capacity [%]")
    if run.kv is not None and has_log:
        bins = Bins(window, num_events=len(run.kv), events_per_bin=5)
        _kv_panel(memory, run.kv, bins, axis)
        _evicted_panel(tidy(evicted[0], y="tokens/s"), run.kv, bins, axis)
    else:
        draw_occupancy(memory, run.iterations, window=window)
    legend_above(memory, ncols=4)
    _hit_panel(tidy(hits, x=axis.label, y="hit rate [%]"), run.records, window)
    return save(figure, path)


def draw_occupancy(axes: Any, iterations: IterationLog | None, *, window: Window) -> None:
    """Stacked shares of the KV memory over time. A gap is idle time."""
    if iterations is None or not len(iterations):
        return
    axis = TimeAxis.of(window)
    starts, weights = iterations.column("start_s"), iterations.column("duration_s")
    bins = Bins(window, num_events=len(iterations), events_per_bin=10)
    _stack_shares(axes, iterations, _ITERATION_USES, bins, axis, times=starts, weights=weights)
    axes.set_ylim(0, 100)
    axis.limit(axes, window)


def _stack_shares(
    axes: Any,
    log: ColumnLog,
    uses: Mapping[str, tuple[str, str]],
    bins: Bins,
    axis: TimeAxis,
    *,
    times: Floats,
    weights: Floats,
) -> Floats:
    """Draws shares of the sum of these columns; returns the sum [tokens] by bin."""
    tokens = {use: bins.mean(times, log.column(use), weights) for use in uses}
    total: Floats = np.sum(list(tokens.values()), axis=0)
    layers = []
    for use, (name, colour) in uses.items():
        share = np.divide(tokens[use], total, out=np.full(len(total), np.nan), where=total > 0)
        layers.append((name, colour, 100 * share))
    stack(axes, bins.edges / axis.seconds, layers)
    return total


def _kv_panel(axes: Any, kv: ColumnLog, bins: Bins, axis: TimeAxis) -> None:
    times, edges = kv.column("time_s"), bins.edges / axis.seconds
    weights = np.ones(len(times))
    total = _stack_shares(axes, kv, KV_USES, bins, axis, times=times, weights=weights)
    kept = 100 * bins.mean(times, kv.column("kept"), weights) / total
    line = {"baseline": None, "lw": 1.5}
    axes.stairs(kept, edges, color="#222222", ls="--", label="online reservation", **line)
    on_host = np.sum([bins.mean(times, kv.column(name), weights) for name in HOST_USES], axis=0)
    has_host = bool(np.nansum(on_host))
    if has_host:
        axes.stairs(100 * on_host / total, edges, color="#7A3E9D", label="on host", **line)
    axes.set_ylim(bottom=0, top=None if has_host else 100)


def _evicted_panel(axes: Any, kv: ColumnLog, bins: Bins, axis: TimeAxis) -> None:
    times, edges = kv.column("time_s"), bins.edges / axis.seconds
    for what, line in (("evicted", "-"), ("recomputed", ":")):
        for request_class, colour in COLOURS.items():
            counts = kv.column(f"{what}_{request_class.value}")
            rate = bins.total(times, np.diff(counts, prepend=0.0)) / bins.width_s
            name = f"{what} {request_class.value}"
            axes.stairs(rate, edges, baseline=None, color=colour, ls=line, lw=1.5, label=name)
    axes.set_ylim(bottom=0)
    by_thousands(axes.yaxis)
    legend_above(axes)


def _hit_panel(axes: Any, records: Sequence[RequestRecord], window: Window) -> None:
    """Share of prompt tokens served from the prefix cache, by admission."""
    axis = TimeAxis.of(window)
    for request_class, colour in COLOURS.items():
        rows = [
            (time, r.num_cached_tokens / max(r.num_prompt_tokens, 1), r.num_prompt_tokens)
            for r in records
            if r.request_class is request_class and r.num_cached_tokens is not None
            for time in (r.first_s if r.admitted_s is None else r.admitted_s,)
            if time is not None
        ]
        times, shares, weights = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        bins = Bins(window, num_events=len(rows))
        rate = 100 * bins.mean(times, shares, weights)
        known = np.isfinite(rate)
        if known.any():
            x = bins.centres[known] / axis.seconds
            axes.plot(x, rate[known], color=colour, lw=1.6, label=request_class.value)
    axes.set_ylim(0, 100)
    axis.limit(axes, window)
    legend_above(axes)


_MOST_SERVED = 4

_SERVED = {
    "both targets met": COLOURS[RequestClass.ONLINE],
    "TTFT met, TPOT missed": "#CC79A7",
    "TTFT missed": TARGET_COLOUR,
}


def plot_served(runs: Mapping[str, Run], path: Path) -> Path:
    """TTFT of each online request by arrival and which targets it met; below it the KV memory by
    class where that is known. Of the first `_MOST_SERVED` runs."""
    shown = dict(list(runs.items())[:_MOST_SERVED])
    figure = new_figure(width=1.2 + 3.3 * max(len(shown), 1), height=5.6)
    if not shown:
        return save(figure, path)
    grid = figure.subplots(
        2, len(shown), sharex=True, sharey="row", height_ratios=(1.4, 1), squeeze=False
    )
    window = max((run.whole_window() for run in shown.values()), key=lambda w: w.end_s)
    axis = TimeAxis.of(window)
    for (name, run), upper, lower in zip(shown.items(), *grid, strict=True):
        tidy(upper)
        tidy(lower, x=axis.label)
        _served_panel(upper, name, run, axis)
        draw_occupancy(lower, run.iterations, window=window)
        axis.limit(lower, window)
    grid[0, 0].set_ylabel("TTFT [s]")
    grid[1, 0].set_ylabel("KV memory [%]")
    waits = [r.ttft_s for run in shown.values() for r in run.online() if r.ttft_s is not None]
    log_if_wide(grid[0, 0].yaxis, np.array(waits))
    for axes, where in ((grid[0, 0], "outside upper left"), (grid[1, 0], "outside lower left")):
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc=where, ncols=4, frameon=False, fontsize=9)
    return save(figure, path)


def _served_panel(axes: Any, name: str, run: Run, axis: TimeAxis) -> None:
    points: dict[str, list[tuple[float, float]]] = {label: [] for label in _SERVED}
    met, tpot_missed, ttft_missed = points.values()
    unserved: list[float] = []
    verdicts: list[Verdict | None] = []
    for record in run.online():
        slo = with_defaults(record.slo, run.default_slo)
        judgement = judge(record, slo, now_s=run.until_s)
        verdicts.append(judgement.joint)
        if record.ttft_s is None or not record.ok:
            unserved.append(record.arrival_s)
        elif judgement.ttft is Verdict.MISSED:
            ttft_missed.append((record.arrival_s, record.ttft_s))
        elif judgement.tpot is Verdict.MISSED:
            tpot_missed.append((record.arrival_s, record.ttft_s))
        else:
            met.append((record.arrival_s, record.ttft_s))
    num_met = verdicts.count(Verdict.MET)
    num_decided = num_met + verdicts.count(Verdict.MISSED)
    share = f": {100 * num_met / num_decided:.0f} % met" if num_decided else ""
    axes.set_title(f"{name}{share}", loc="left", fontsize=11)
    for label, colour in _SERVED.items():
        x, y = np.array(points[label]).reshape(-1, 2).T
        axes.plot(x / axis.seconds, y, ".", ms=4, mew=0, color=colour, label=label)
    _mark_above(axes, unserved, axis, colour="#555555", label="no token")
    target_s = common_slo(run.online(), run.default_slo).ttft_s
    if target_s is not None:
        axes.axhline(target_s, color=TARGET_COLOUR, lw=1.0, ls="--", label="TTFT target")


def plot_cdfs(runs: Mapping[str, Run], path: Path) -> Path:
    """TTFT and TPOT of online requests. A curve ends below 100 % where requests failed, or were
    unanswered when the run ended."""
    figure = new_figure(width=9.5, height=3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    _cdf_panels(left, right, runs)
    legend_beside(right)
    return save(figure, path)


def _cdf_panels(left: Any, right: Any, runs: Mapping[str, Run]) -> Slo:
    """Returns the targets that it drew."""
    tidy(left, title="Online TTFT", x="TTFT [s]", y="requests [%]")
    tidy(right, title="Online TPOT", x="TPOT [ms]")
    default = next((run.default_slo for run in runs.values()), _NO_SLO)
    target = common_slo((r for run in runs.values() for r in run.online()), default)
    for axes, latencies, limit, unit in (
        (left, _ttfts, target.ttft_s, 1.0),
        (right, _tpots_ms, target.tpot_s, 1e3),
    ):
        samples = {name: np.sort(latencies(run)) for name, run in runs.items()}
        finite = np.concatenate([v[np.isfinite(v)] for v in samples.values()] or [np.empty(0)])
        last = float(finite.max()) if len(finite) else 1.0
        for index, (name, values) in enumerate(samples.items()):
            share = 100 * np.arange(1, len(values) + 1) / max(len(values), 1)
            x, y = values[np.isfinite(values)], share[np.isfinite(values)]
            if len(x):
                x, y = np.append(x, last), np.append(y, y[-1])  # flat from its last step on
            line = style(index) | {"marker": ""}
            axes.step(x, y, where="post", lw=1.6, label=name, **line)
        if limit is not None:
            axes.axvline(limit * unit, color=TARGET_COLOUR, lw=1.0, ls="--")
        axes.set_ylim(0, 102)
        log_if_wide(axes.xaxis, finite)
    return target


def _ttfts(run: Run) -> list[float]:
    return [math.inf if r.ttft_s is None or not r.ok else r.ttft_s for r in run.online()]


def _tpots_ms(run: Run) -> list[float]:
    return [
        math.inf if r.tpot_s is None else 1e3 * r.tpot_s
        for r in run.online()
        if not r.is_finished or r.num_output_tokens > 1
    ]


def plot_overview(
    runs: Mapping[str, Run],
    summaries: Mapping[str, Summary],
    path: Path,
    *,
    shaded: Sequence[tuple[float, float]] = (),
    marked: Collection[str] = (),
    caption: str = "",
) -> Path:
    """Runs of one workload on one page: distributions of TTFT and TPOT, TTFT by arrival, offline
    throughput.

    shaded  stretches of time with a grey background [s]
    marked  names that get an exclamation mark
    """
    figure = new_figure(width=11, height=7.4)
    (ttft, tpot), (over_time, offline) = figure.subplots(2, 2)
    target = _cdf_panels(ttft, tpot, runs)
    tidy(over_time, title="TTFT of each online request", x="arrival [s]", y="TTFT [s]")
    tidy(offline, title="Offline work done beside them", y="offline requests/s")
    for begin_s, end_s in shaded:
        over_time.axvspan(begin_s, end_s, color="#EEEEEE", lw=0)
    for index, (name, run) in enumerate(runs.items()):
        colour = style(index)["color"]
        known = [(r.arrival_s, r.ttft_s) for r in run.online() if r.ttft_s is not None]
        if known:
            over_time.scatter(*zip(*known, strict=True), s=11, color=colour, alpha=0.8)
        rate = summaries[name].offline.requests_per_s
        if rate is None or not summaries[name].offline.num_requests:
            continue
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
    """Online attainment against offline throughput: the upper right corner is best."""
    figure = new_figure(width=7.5, height=4.4)
    axes = tidy(
        figure.subplots(),
        title="Online attainment and offline throughput",
        x="online requests that meet all their SLOs [%]",
        y="offline tokens/s",
    )
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.7)
    for index, (name, summary) in enumerate(summaries.items()):
        attained, rate = summary.online.attainment.joint.ratio, summary.offline.tokens_per_s
        if attained is not None and rate is not None:
            line = style(index) | {"ls": ""}
            axes.plot(100 * attained, rate, ms=9, alpha=0.8, clip_on=False, label=name, **line)
    axes.set_xlim(right=100)
    axes.margins(x=0.06, y=0.08)
    axes.set_ylim(bottom=0)
    by_thousands(axes.yaxis)
    legend_beside(axes)
    return save(figure, path)
