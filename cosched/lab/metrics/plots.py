"""Pictures of one run over time. All read only, and need matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    legend_above,
    log_if_wide,
    new_figure,
    save,
    stack,
    tidy,
)
from cosched.lab.metrics.records import ColumnLog, Floats, IterationLog, RequestRecord
from cosched.lab.metrics.slo import common_slo
from cosched.lab.metrics.summary import served_tokens
from cosched.lab.metrics.window import Window, last_event_s

_NO_SLO = Slo()


def write_run_plots(
    folder: Path,
    *,
    records: Sequence[RequestRecord],
    iterations: IterationLog | None = None,
    kv: ColumnLog | None = None,
    window: Window | None = None,
    default_slo: Slo = _NO_SLO,
) -> list[Path]:
    """All pictures of a run, in a folder that is made if need be.

    kv           who had the KV memory (`plot_kv_memory`); None or empty: that was not watched
    default_slo  targets of online requests that bring none of their own
    """
    log = IterationLog() if iterations is None else iterations
    window = Window.covering(records, log) if window is None else window
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        plot_throughput(records, folder / "throughput.png", window=window),
        plot_latency(records, folder / "latency.png", window=window, default_slo=default_slo),
        plot_hit_rate(records, folder / "hit_rate.png", window=window),
    ]
    if len(log):
        written += [
            plot_kv_occupancy(log, folder / "kv_occupancy.png", window=window),
            plot_active_requests(log, folder / "active_requests.png", window=window),
        ]
    if kv is not None and len(kv):
        written.append(plot_kv_memory(kv, records, folder / "kv_memory.png", window=window))
    return written


def plot_throughput(records: Sequence[RequestRecord], path: Path, *, window: Window) -> Path:
    """Served tokens per second, one class on top of the other."""
    figure = new_figure()
    axis = TimeAxis.of(window)
    axes = tidy(figure.subplots(), title="Throughput", x=axis.label, y="served tokens/s")
    bins = Bins(window, num_events=len(records), events_per_bin=20)
    until_s = max(window.end_s, last_event_s(records, IterationLog()))
    layers = []
    for request_class, colour in COLOURS.items():
        mine = (r for r in records if r.request_class is request_class)
        served = served_tokens(mine, until_s=until_s)
        tokens = bins.total(served.prompt_times, served.prompt_tokens)
        tokens += bins.total(served.output_times, served.output_tokens)
        layers.append((request_class.value, colour, tokens / bins.width_s))
    stack(axes, bins.edges / axis.seconds, layers, alpha=0.85)
    axes.set_ylim(bottom=0)
    axis.limit(axes, window)
    by_thousands(axes.yaxis)
    legend_above(axes)
    return save(figure, path)


def plot_latency(
    records: Sequence[RequestRecord],
    path: Path,
    *,
    window: Window,
    default_slo: Slo = _NO_SLO,
) -> Path:
    """TTFT and TPOT of the online requests by arrival, with the targets if all have the same."""
    online = [
        r for r in records if r.request_class is RequestClass.ONLINE and r.arrival_s in window
    ]
    slo = common_slo(online, default_slo)
    lost = np.array([r.arrival_s for r in online if not r.ok])
    figure = new_figure(height=5.2)
    axis = TimeAxis.of(window)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _latency_panel(
        tidy(upper, title="Online requests by arrival", y="TTFT [s]"),
        [(r.arrival_s, r.ttft_s) for r in online if r.ok],
        target=slo.ttft_s,
        lost=lost,
        window=window,
    )
    _latency_panel(
        tidy(lower, x=axis.label, y="TPOT [ms]"),
        [(r.arrival_s, None if r.tpot_s is None else 1e3 * r.tpot_s) for r in online if r.ok],
        target=None if slo.tpot_s is None else 1e3 * slo.tpot_s,
        lost=lost,
        window=window,
    )
    legend_above(upper)
    return save(figure, path)


def _latency_panel(
    axes: Any,
    points: Iterable[tuple[float, float | None]],
    *,
    target: float | None,
    lost: Floats,
    window: Window,
) -> None:
    axis = TimeAxis.of(window)
    known = np.array([(time, y) for time, y in points if y is not None]).reshape(-1, 2)
    times, values = known[:, 0], known[:, 1]
    colour = COLOURS[RequestClass.ONLINE]
    axes.plot(times / axis.seconds, values, ".", ms=3, alpha=0.2, mew=0, color=colour)
    bins = Bins(window, num_events=len(times), events_per_bin=50)
    p50, p99 = bins.percentiles(times, values, (50, 99))
    centres = bins.centres / axis.seconds
    axes.plot(centres, p50, color=colour, lw=1.6, label="p50")
    axes.plot(centres, p99, color="#003B5C", lw=1.2, label="p99")
    if target is not None:
        axes.axhline(target, color=TARGET_COLOUR, lw=1.3, ls="--", label="SLO")
    log_if_wide(axes.yaxis, values)
    if len(lost):
        axes.plot(
            lost / axis.seconds,
            np.full(len(lost), 0.97),
            "v",
            ms=4,
            color=TARGET_COLOUR,
            transform=axes.get_xaxis_transform(),
            label="failed",
        )
    axis.limit(axes, window)


def hit_rate_curve(
    records: Sequence[RequestRecord], request_class: RequestClass, *, window: Window
) -> tuple[Floats, Floats]:
    """(times [s], share of prompt tokens that were cached), by admission."""
    rows = [
        (time, r.num_cached_tokens, r.num_prompt_tokens)
        for r in records
        if r.request_class is request_class and r.num_cached_tokens is not None
        for time in (r.first_s if r.admitted_s is None else r.admitted_s,)
        if time is not None
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    bins = Bins(window, num_events=len(rows))
    prompt = table[:, 2]
    share = np.divide(table[:, 1], prompt, out=np.zeros(len(prompt)), where=prompt > 0)
    rate = bins.mean(table[:, 0], share, prompt)
    known = np.isfinite(rate)
    return bins.centres[known], rate[known]


def plot_hit_rate(records: Sequence[RequestRecord], path: Path, *, window: Window) -> Path:
    """Share of prompt tokens served from the prefix cache, by admission (Echo Fig. 9)."""
    figure = new_figure()
    axis = TimeAxis.of(window)
    axes = tidy(
        figure.subplots(), title="Prefix cache", x=axis.label, y="hit rate [% of prompt tokens]"
    )
    _hit_panel(axes, records, window)
    return save(figure, path)


def _hit_panel(axes: Any, records: Sequence[RequestRecord], window: Window) -> None:
    axis = TimeAxis.of(window)
    for request_class, colour in COLOURS.items():
        times_s, rate = hit_rate_curve(records, request_class, window=window)
        if len(times_s):
            name = f"hit rate {request_class.value}"
            axes.plot(times_s / axis.seconds, 100 * rate, color=colour, lw=1.6, label=name)
    axes.set_ylim(0, 100)
    axis.limit(axes, window)
    legend_above(axes)


def plot_kv_occupancy(iterations: IterationLog, path: Path, *, window: Window) -> Path:
    """Who holds the KV cache (Echo Fig. 10). A gap is idle time."""
    figure = new_figure()
    axis = TimeAxis.of(window)
    axes = tidy(figure.subplots(), title="KV cache", x=axis.label, y="share of capacity [%]")
    draw_occupancy(axes, iterations, window=window)
    legend_above(axes)
    return save(figure, path)


def draw_occupancy(axes: Any, iterations: IterationLog, *, window: Window) -> None:
    """Shares of the KV cache over time, one on the other, for a legend of four."""
    axis = TimeAxis.of(window)
    starts, weights = iterations.column("start_s"), iterations.column("duration_s")
    bins = Bins(window, num_events=len(iterations), events_per_bin=10)
    parts = {
        "running online": ("kv_online_tokens", COLOURS[RequestClass.ONLINE]),
        "running offline": ("kv_offline_tokens", COLOURS[RequestClass.OFFLINE]),
        "cached": ("kv_cached_tokens", "#A8B5BD"),
        "free": ("kv_free_tokens", "#EDF0F2"),
    }
    tokens = {name: iterations.column(column) for name, (column, _) in parts.items()}
    total = np.sum(list(tokens.values()), axis=0)
    layers = []
    for name, (_, colour) in parts.items():
        share = np.divide(tokens[name], total, out=np.zeros(len(total)), where=total > 0)
        layers.append((name, colour, 100 * bins.mean(starts, share, weights)))
    stack(axes, bins.edges / axis.seconds, layers)
    axes.set_ylim(0, 100)
    axis.limit(axes, window)


KV_USES = {
    "running_online": ("running online", COLOURS[RequestClass.ONLINE]),
    "running_offline": ("running offline", COLOURS[RequestClass.OFFLINE]),
    "returning": ("online, will return", "#7FB9DD"),
    "referenced": ("offline, referenced", "#F5D48F"),
    "dead": ("dead", "#A8B5BD"),
    "free": ("free", "#EDF0F2"),
}
"""Columns of the KV memory that add up to the capacity, from the bottom up: name and colour."""


HOST_USES = ("host_doubled", "host_returning", "host_referenced", "host_dead")
"""Columns that add up to what is in host memory."""


def plot_kv_memory(
    kv: ColumnLog, records: Sequence[RequestRecord], path: Path, *, window: Window
) -> Path:
    """Who has the KV memory by class and by what it is still good for (Echo Fig. 10), what was
    evicted and computed anew, and the hit rates (Echo Fig. 9): over one time.

    kv  rows in order of time with ``time_s``; the columns of `KV_USES` and `HOST_USES` and ``kept``
        [tokens; of host memory in shares of the device's]; by class the counts ``evicted_CLASS``
        and ``recomputed_CLASS`` since the start [tokens]
    """
    figure = new_figure(height=7.5)
    axis = TimeAxis.of(window)
    memory, evicted, hits = figure.subplots(3, 1, sharex=True, height_ratios=(1.4, 1, 0.8))
    bins = Bins(window, num_events=len(kv), events_per_bin=5)
    _kv_panel(tidy(memory, y="KV memory [%]"), kv, bins)
    _evicted_panel(tidy(evicted, y="tokens/s"), kv, bins)
    _hit_panel(tidy(hits, x=axis.label, y="hit rate [%]"), records, window)
    return save(figure, path)


def _kv_panel(axes: Any, kv: ColumnLog, bins: Bins) -> None:
    times = kv.column("time_s")
    weights = np.ones(len(times))
    seconds = TimeAxis.of(Window(start_s=bins.edges[0], end_s=bins.edges[-1])).seconds
    tokens = {use: bins.mean(times, kv.column(use), weights) for use in KV_USES}
    total = np.sum(list(tokens.values()), axis=0)
    layers = [(name, colour, 100 * tokens[use] / total) for use, (name, colour) in KV_USES.items()]
    stack(axes, bins.edges / seconds, layers)
    kept = 100 * bins.mean(times, kv.column("kept"), weights) / total
    axes.stairs(
        kept, bins.edges / seconds, baseline=None, color="#222222", ls="--", label="kept for online"
    )
    on_host = np.sum([bins.mean(times, kv.column(name), weights) for name in HOST_USES], axis=0)
    if np.nansum(on_host):
        axes.stairs(
            100 * on_host / total,
            bins.edges / seconds,
            baseline=None,
            color="#7A3E9D",
            label="on host",
        )
    axes.set_ylim(bottom=0, top=None if np.nansum(on_host) else 100)
    legend_above(axes, ncols=4)


def _evicted_panel(axes: Any, kv: ColumnLog, bins: Bins) -> None:
    times = kv.column("time_s")
    seconds = TimeAxis.of(Window(start_s=bins.edges[0], end_s=bins.edges[-1])).seconds
    for what, style in (("evicted", "-"), ("recomputed", ":")):
        for request_class, colour in COLOURS.items():
            counts = kv.column(f"{what}_{request_class.value}")
            rate = bins.total(times, np.diff(counts, prepend=0.0)) / bins.width_s
            axes.stairs(
                rate,
                bins.edges / seconds,
                baseline=None,
                color=colour,
                ls=style,
                lw=1.5,
                label=f"{what} {request_class.value}",
            )
    axes.set_ylim(bottom=0)
    by_thousands(axes.yaxis)
    legend_above(axes)


def plot_active_requests(iterations: IterationLog, path: Path, *, window: Window) -> Path:
    """Requests in the batch, on average over time, idle time included (Echo Fig. 8)."""
    figure = new_figure()
    axis = TimeAxis.of(window)
    axes = tidy(figure.subplots(), title="Active requests", x=axis.label, y="requests in the batch")
    starts, durations = iterations.column("start_s"), iterations.column("duration_s")
    bins = Bins(window, num_events=len(iterations), events_per_bin=10)
    for request_class, colour in COLOURS.items():
        name = request_class.value
        active = iterations.column(f"num_{name}_prefills") + iterations.column(
            f"num_{name}_decodes"
        )
        mean = bins.total(starts, active * durations) / bins.width_s
        axes.stairs(
            mean, bins.edges / axis.seconds, baseline=None, color=colour, lw=1.5, label=name
        )
    axes.set_ylim(bottom=0)
    axis.limit(axes, window)
    legend_above(axes)
    return save(figure, path)
