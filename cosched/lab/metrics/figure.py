"""Colours, axes, time bins and panels of all plots. Only drawing imports matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.lab.metrics.records import Floats
from cosched.lab.metrics.stats import Window
from cosched.memory.occupancy import KV_USES

# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey print.
COLOURS = {
    RequestClass.ONLINE: KV_USES["running_online"].colour,
    RequestClass.OFFLINE: KV_USES["running_offline"].colour,
}
TARGET_COLOUR = "#C0392B"
_TEXT, _GRID = "#333333", "#DDDDDD"
_PALETTE = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555"),
    *("#6A3D9A", "#A6761D", "#E41A1C", "#1B5E20", "#B5BD00", "#000000", "#F4A6C0"),
    *("#00406B", "#7FC97F", "#8C2D04", "#9E9AC8", "#00CED1", "#C7A76C", "#800040"),
)
_LINES, _MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "P", "X")


def style(index: int) -> dict[str, str]:
    """Colour, line and marker of a series: no colour twice in 21."""
    index %= len(_PALETTE)
    row, column = divmod(index, 7)
    return {
        "color": _PALETTE[index],
        "ls": _LINES[row],
        "marker": _MARKERS[(column + row) % 7],
    }


def check_can_draw() -> None:
    """ConfigError without matplotlib: called before a run, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'cosched[plots]'")


def new_figure(*, width: float = 8.0, height: float = 3.4) -> Any:
    """An empty figure [inches] that belongs to no window system and no global state."""
    check_can_draw()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def tidy(axes: Any, *, title: str | None = None, x: str | None = None, y: str | None = None) -> Any:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(colors=_TEXT, labelsize=9)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    if title is not None:
        axes.set_title(title, loc="left", fontsize=11, color=_TEXT)
    if x is not None:
        axes.set_xlabel(x, fontsize=9.5, color=_TEXT)
    if y is not None:
        axes.set_ylabel(y, fontsize=9.5, color=_TEXT)
    return axes


def legend_above(axes: Any, **options: Any) -> None:
    """A legend to the right of the title, outside the data."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(handles)}
        axes.legend(**place | {"frameon": False, "fontsize": 9, "borderaxespad": 0.2} | options)


def legend_beside(axes: Any) -> None:
    legend_above(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0), ncols=1)


def by_thousands(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def log_if_wide(axis: Any, values: Floats) -> None:
    """A logarithmic scale if the largest value is above 20 times the median; else a linear one from
    0."""
    axes, name = axis.axes, axis.axis_name
    values = values[values > 0]
    if len(values) and values.max() > 20 * np.median(values):
        axes.set(**{f"{name}scale": "log"})
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        (axes.set_xlim if name == "x" else axes.set_ylim)(0)


def stack(
    axes: Any, edges: Floats, layers: Iterable[tuple[str, str, Floats]], *, alpha: float = 1.0
) -> None:
    """Stacked steps between the edges; a layer is (name, colour, height of each step)."""
    below: Floats | float = 0.0
    for name, colour, heights in layers:
        above = below + heights
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, alpha=alpha, label=name)
        below = above


def save(figure: Any, path: Path) -> Path:
    # Without matplotlib's version, so that equal runs give equal files.
    figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """Time since the start of the run, in the unit that suits the window."""

    unit: str
    seconds: float

    @classmethod
    def of(cls, window: Window) -> TimeAxis:
        for unit, seconds in (("h", 3600.0), ("min", 60.0)):
            if window.length_s >= 3 * seconds:
                return cls(unit=unit, seconds=seconds)
        return cls(unit="s", seconds=1.0)

    @property
    def label(self) -> str:
        return f"time since start [{self.unit}]"

    def limit(self, axes: Any, window: Window) -> None:
        if window.length_s > 0:
            axes.set_xlim(window.start_s / self.seconds, window.end_s / self.seconds)


class Bins:
    """A window cut into equal parts."""

    def __init__(self, window: Window, *, num_events: int, events_per_bin: int = 25) -> None:
        count = min(max(num_events // events_per_bin, 8), 200)
        end_s = window.end_s if window.length_s > 0 else window.start_s + 1.0
        self.edges = np.linspace(window.start_s, end_s, count + 1)

    @property
    def width_s(self) -> float:
        return float(self.edges[1] - self.edges[0])

    @property
    def centres(self) -> Floats:
        return (self.edges[1:] + self.edges[:-1]) / 2

    def total(self, times: Floats, amounts: Floats | Sequence[float]) -> Floats:
        """Sum of the amounts in each bin."""
        sums, _ = np.histogram(times, bins=self.edges, weights=np.asarray(amounts))
        return sums.astype(np.float64)

    def mean(self, times: Floats, values: Floats, weights: Floats) -> Floats:
        """Weighted mean in each bin; NaN, which is drawn as a gap, where there is nothing."""
        total = self.total(times, weights)
        means: Floats = np.divide(
            self.total(times, values * weights),
            total,
            out=np.full(len(total), np.nan),
            where=total > 0,
        )
        return means

    def percentiles(self, times: Floats, values: Floats, percents: Sequence[float]) -> Floats:
        """One row per percentile, one column per bin; NaN where there is nothing."""
        index = np.digitize(times, self.edges) - 1
        table = np.full((len(percents), len(self.edges) - 1), np.nan)
        for bin_index in np.unique(index):
            if 0 <= bin_index < table.shape[1]:
                table[:, bin_index] = np.percentile(values[index == bin_index], percents)
        return table


def label_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_LEGEND_PER_PANEL = 1.7
"""Names beside each other in a legend, for each panel that is as wide."""

Points = Sequence[tuple[float, float | None]]
"""(x, y); a y of None is not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One of several axes side by side. lines: name -> points; a name has one colour everywhere."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]


def plot_panels(rows: Sequence[Sequence[Panel]], path: Path) -> Path:
    """A grid of panels; rows are equally long, and the title of the first one stands over each."""
    figure = new_figure(width=4.4 * len(rows[0]) + 0.6, height=3.2 * len(rows) + 0.3)
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.lines))
    shown: dict[str, Any] = {}
    for place, (panel, axes) in enumerate(zip(chain(*rows), grid.flat, strict=True)):
        title = panel.title if place % len(rows[0]) == 0 else " "
        tidy(axes, title=title, x=panel.x, y=panel.y)
        for name, points in panel.lines.items():
            drawn = [(x, y) for x, y in points if y is not None]
            if drawn:
                x, y = zip(*drawn, strict=True)
                (shown[name],) = axes.plot(x, y, ms=4, lw=1.6, **style(names.index(name)))
        top = axes.dataLim.ymax  # infinite where nothing is drawn
        axes.set_ylim(0, 1.08 * top if 0 < top < math.inf else 1)
        by_thousands(axes.yaxis)
    columns = max(round(_LEGEND_PER_PANEL * len(rows[0])), 1)
    figure.legend(shown.values(), shown, ncols=columns, loc="outside upper left", frameon=False)
    return save(figure, path)
