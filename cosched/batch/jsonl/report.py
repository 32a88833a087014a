"""What a call prints at its end: a table for people, then one line of JSON for programs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table

from cosched.batch.jsonl.batch_api import RemoteBatch
from cosched.versions import versions


def job_results(
    *,
    counts: dict[str, int],
    failed_by_code: dict[str, int],
    prompt_tokens: int,
    completion_tokens: int,
    seconds: float,
) -> dict[str, Any]:
    """Rates are of this call alone: what earlier calls answered took none of its time."""
    here = counts["answered_now"] + counts["failed_now"]
    return {
        "counts": counts,
        "failed_by_code": failed_by_code,
        "seconds": round(seconds, 3),
        "tokens": {"prompt": prompt_tokens, "completion": completion_tokens},
        "lines_per_s": round(here / seconds, 3) if seconds else 0.0,
        "tokens_per_s": round((prompt_tokens + completion_tokens) / seconds, 3) if seconds else 0.0,
    }


def print_report(
    *, exit_code: int, message: str | None, config: dict[str, Any], results: dict[str, Any]
) -> None:
    table = Table("run_batch", "", show_header=False)
    counts = results["counts"]
    # Where a run failed before it had an answer the message says it all. A validation has none.
    has_outcome = counts.get("answered", 1) or counts.get("failed")
    if exit_code == 0 or has_outcome:
        for name, value in _rows(results):
            table.add_row(name, value)
    # Linux counts in kB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    entry = {
        "program": "run_batch",
        "exit_code": exit_code,
        "message": message,
        "config": config,
        "versions": versions("httpx"),
        **results,
        "peak_rss_mib": round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1),
    }
    try:
        if table.row_count:
            Console(file=sys.stdout).print(table)
        print(msgspec.json.encode(entry).decode(), flush=True)
    except OSError as error:  # stdout is a file on the disk that is full, say
        print(f"run_batch: cannot write the report: {error.strerror}", file=sys.stderr, flush=True)


def print_batches(
    found: Sequence[RemoteBatch], *, is_fetched: Callable[[RemoteBatch], bool]
) -> None:
    """A table of the batches of a job, then one line of JSON."""
    names = (
        "batch",
        "status",
        "lines",
        "answered",
        "failed",
        "ETA",
        "risk of missing the deadline",
    )
    table = Table(*(Column(name, overflow="fold") for name in names))  # no id is cut off
    for one in found:
        counts, told = one.request_counts, one.cosched
        table.add_row(
            one.id,
            one.status + ", fetched" * is_fetched(one),
            f"{counts.total:,}",
            f"{counts.completed:,}",
            f"{counts.failed:,}",
            _eta(one),
            f"{told.miss_chance:.1%}" if told and told.miss_chance is not None else "",
        )
    Console(file=sys.stdout).print(table)
    entries = [{**msgspec.to_builtins(one), "is_fetched": is_fetched(one)} for one in found]
    print(msgspec.json.encode({"program": "run_batch", "batches": entries}).decode(), flush=True)


def _eta(batch: RemoteBatch) -> str:
    told = batch.cosched
    if told is None:
        return ""
    return told.state if told.finish_s is None else f"{told.finish_s:,.0f} s"


def _rows(results: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in results.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            rows += _rows(value, prefix=f"{name}: ")
        else:
            rows.append((name, f"{value:,}" if isinstance(value, int | float) else str(value)))
    return rows
