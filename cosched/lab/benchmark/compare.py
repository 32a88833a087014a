"""Results of earlier runs side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cosched.errors import ConfigError


def compare_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Print one table of several results, with ratios to s0 of the first."""
    rows: dict[str, Mapping[str, Any]] = {}
    for path in paths:
        for name, row in _scenarios(path).items():
            rows[f"{path.stem}: {name}" if len(paths) > 1 else name] = row
    base = next((row for row in rows.values() if row["scenario"] == "s0"), None)
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("scenario", "both met %", "x s0", "TTFT p99 x s0", "TPOT p99 x s0"):
        table.add_column(header, justify="left" if header == "scenario" else "right")
    table.add_column("offline tok/s", justify="right")
    compared = {}
    for name, row in rows.items():
        values = _compared(row, base)
        compared[name] = values
        table.add_row(name, *(_shown(value) for value in values.values()))
    Console(width=140).print(table)
    return {"compared": compared}


def _scenarios(path: Path) -> Mapping[str, Any]:
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        return dict(json.loads(lines[-1])["scenarios"])
    except (OSError, IndexError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: the last line is no result of `bench run` ({error})") from None


def _compared(row: Mapping[str, Any], base: Mapping[str, Any] | None) -> dict[str, float | None]:
    def p99(of: Mapping[str, Any] | None, metric: str) -> float | None:
        return None if of is None else of["summary"]["online"][metric]["p99"]

    return {
        "attainment": _scaled(row["attainment"], 100),
        "attainment_ratio": _ratio(row["attainment"], base["attainment"] if base else None),
        "ttft_p99_ratio": _ratio(p99(row, "ttft_s"), p99(base, "ttft_s")),
        "tpot_p99_ratio": _ratio(p99(row, "tpot_s"), p99(base, "tpot_s")),
        "offline_tokens_per_s": row["offline_tokens_per_s"],
    }


def _ratio(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
