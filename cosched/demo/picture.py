"""The demo's results as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosched.config import SloConfig
from cosched.demo.report import Result
from cosched.demo.scenario import ONLINE_ONLY, Load, Measured
from cosched.metrics.figure import TARGET_COLOUR

__all__ = ["draw"]

# Told apart also by those who see few colours (Okabe and Ito).
_GREY = "#6b6b6b"
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def draw(
    runs: Sequence[tuple[Measured, Result]],
    *,
    load: Load,
    slo: SloConfig,
    path: Path,
    caption: str,
) -> None:
    """Write a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.4), layout="constrained")
    colours = _colours([result.name for _, result in runs])
    (ttft, tpot), (over_time, offline) = figure.subplots(2, 2)
    _draw_shares(
        ttft,
        {result.name: [r.ttft_s for r in measured.online] for measured, result in runs},
        colours,
        title="Time to first token (TTFT)",
        target_ms=slo.ttft_ms,
    )
    _draw_shares(
        tpot,
        {result.name: [r.tpot_s for r in measured.online] for measured, result in runs},
        colours,
        title="Time per output token after the first (TPOT)",
        target_ms=slo.tpot_ms,
    )
    _draw_over_time(over_time, runs, colours, load, target_ms=slo.ttft_ms)
    _draw_offline(offline, [result for _, result in runs], colours)
    for axes in (ttft, tpot, over_time, offline):
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = ttft.get_legend_handles_labels()
    late = {result.name for _, result in runs if result.is_client_late}
    labels = [f"{label} (!)" if label in late else label for label in labels]
    if late:
        caption += "\n(!) not to be trusted: the client itself was late, the machine too busy"
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _colours(names: Sequence[str]) -> dict[str, str]:
    policies = [name for name in names if name != ONLINE_ONLY]
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(policies)}
    return {ONLINE_ONLY: _GREY, **colours}


def _draw_shares(
    axes: Any,
    values: dict[str, list[float | None]],
    colours: dict[str, str],
    *,
    title: str,
    target_ms: float,
) -> None:
    """Per scenario, which part of the online requests was at least that fast."""
    for name, found in values.items():
        known_ms = np.sort([1e3 * value for value in found if value is not None])
        # Over all requests: a curve that ends below 100% shows those without an answer.
        shares = np.arange(1, len(known_ms) + 1) / max(1, len(found))
        axes.step(known_ms, 100 * shares, where="post", color=colours[name], label=name, lw=1.8)
    axes.set_xscale("log")
    everything = [1e3 * v for found in values.values() for v in found if v is not None]
    if everything:
        # A stream that came in one piece has a TPOT near zero, far to the left of all others.
        axes.set_xlim(left=0.7 * np.percentile(everything, 2))
    _plain_ticks(axes.xaxis)
    axes.set_ylim(0, 101)
    axes.axvline(target_ms, color=TARGET_COLOUR, lw=1.0, ls="--")
    axes.annotate(
        f"target {target_ms:g} ms",
        (target_ms, 3),
        xytext=(3, 0),
        textcoords="offset points",
        fontsize=7,
        color=TARGET_COLOUR,
    )
    axes.axhline(99, color=_GREY, lw=0.6, ls=":")
    axes.annotate("p99", (1.0, 99), xycoords=("axes fraction", "data"), fontsize=7, color=_GREY)
    axes.set_xlabel("latency [ms], logarithmic")
    axes.set_ylabel("online requests at most so late [%]")
    axes.set_title(title, fontsize=10, loc="left")


def _draw_over_time(
    axes: Any,
    runs: Sequence[tuple[Measured, Result]],
    colours: dict[str, str],
    load: Load,
    *,
    target_ms: float,
) -> None:
    for begin, end in load.spec.bursts:
        axes.axvspan(begin * load.spec.seconds, end * load.spec.seconds, color="#eeeeee", lw=0)
    for measured, result in runs:
        known = [(r.arrival_s, 1e3 * r.ttft_s) for r in measured.online if r.ttft_s is not None]
        if known:
            axes.scatter(*zip(*known, strict=True), s=11, color=colours[result.name], alpha=0.8)
    axes.axhline(target_ms, color=TARGET_COLOUR, lw=1.0, ls="--")
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_xlim(0, load.spec.seconds)
    axes.set_xlabel("arrival since the window began [s] (grey: bursts)")
    axes.set_ylabel("TTFT [ms], logarithmic")
    axes.set_title("TTFT of each online request", fontsize=10, loc="left")


def _draw_offline(axes: Any, results: Sequence[Result], colours: dict[str, str]) -> None:
    names = [result.name for result in results]
    rates = [result.offline.requests_per_s if result.offline else 0.0 for result in results]
    bars = axes.bar(names, rates, color=[colours[name] for name in names], width=0.6)
    axes.bar_label(bars, [f"{rate:.1f}" for rate in rates], fontsize=9)
    axes.set_ylabel("offline work in the window [requests/s]")
    axes.set_title("Offline work done beside the online requests", fontsize=10, loc="left")


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(plain)
    axis.set_minor_formatter("")
