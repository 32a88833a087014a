"""What a call prints at its end: a table for people, then one line of JSON for programs."""

from __future__ import annotations

import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

__all__ = ["job_results", "print_report"]


def job_results(
    *, counts: dict[str, int], prompt_tokens: int, completion_tokens: int, seconds: float
) -> dict[str, Any]:
    """Rates are of this call alone: what earlier calls answered took none of its time."""
    here = counts["answered_now"] + counts["failed_now"]
    return {
        "counts": counts,
        "seconds": round(seconds, 3),
        "tokens": {"prompt": prompt_tokens, "completion": completion_tokens},
        "lines_per_s": round(here / seconds, 3) if seconds else 0.0,
        "tokens_per_s": round((prompt_tokens + completion_tokens) / seconds, 3) if seconds else 0.0,
    }


def print_report(
    *, exit_code: int, message: str | None, config: dict[str, Any], results: dict[str, Any]
) -> None:
    table = Table("run_batch", "", show_header=False)
    for name, value in _rows(results):
        table.add_row(name, value)
    Console(file=sys.stdout).print(table)
    # Linux counts in kB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    entry = {
        "program": "run_batch",
        "exit_code": exit_code,
        "message": message,
        "config": config,
        "versions": {
            "cosched": _version("cosched"),
            "httpx": _version("httpx"),
            "python": platform.python_version(),
        },
        **results,
        "peak_rss_mib": round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1),
    }
    print(msgspec.json.encode(entry).decode(), flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"


def _rows(results: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in results.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            rows += _rows(value, prefix=f"{name}: ")
        else:
            rows.append((name, f"{value:,}" if isinstance(value, int | float) else str(value)))
    return rows
