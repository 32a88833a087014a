"""Pictures of a quantity against the one that a sweep varies. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cosched.lab.metrics.figure import by_thousands, legend_above, new_figure, save, tidy
from cosched.lab.metrics.plots_compare import STYLES

Points = Sequence[tuple[float, float | None]]
"""(x, y); a y of None is drawn as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One of the pictures side by side.

    lines       name -> points; the same name has the same colour in every panel
    references  name -> points of a dashed grey line, named where it ends
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    references: Mapping[str, Points] = field(default_factory=dict)


def plot_panels(rows: Sequence[Sequence[Panel]], path: Path) -> Path:
    """A grid of panels; all rows are equally long."""
    figure = new_figure(width=4.4 * len(rows[0]) + 0.6, height=3.2 * len(rows) + 0.3)
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.lines))
    for panel, axes in zip((p for row in rows for p in row), grid.flat, strict=True):
        tidy(axes, title=panel.title, x=panel.x, y=panel.y)
        for name, points in panel.references.items():
            axes.plot(*zip(*points, strict=True), color="#888888", lw=1.0, ls="--")
            axes.annotate(
                name,
                points[-1],
                xytext=(0, 2),
                textcoords="offset points",
                ha="right",
                va="bottom",
                fontsize=8.5,
                color="#666666",
            )
        for name, points in panel.lines.items():
            colour, line, marker = STYLES[names.index(name) % len(STYLES)]
            drawn = [(x, y) for x, y in points if y is not None]
            if drawn:
                x, y = zip(*drawn, strict=True)
                axes.plot(x, y, color=colour, ls=line, marker=marker, ms=4, lw=1.6, label=name)
        top = axes.dataLim.ymax  # infinite where nothing is drawn
        axes.set_ylim(0, 1.08 * top if 0 < top < math.inf else 1)
        by_thousands(axes.yaxis)
    first = grid.flat[0]
    legend_above(first, bbox_to_anchor=(0.0, 1.12), loc="lower left")
    return save(figure, path)
