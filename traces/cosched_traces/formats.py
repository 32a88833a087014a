"""Trace files whose format shows in their first line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cosched_traces.block_traces import read_mooncake_jsonl, read_servegen_batch_jsonl
from cosched_traces.csv_traces import (
    read_arrivals_csv,
    read_azure_csv,
    read_burstgpt_csv,
    read_lengths_csv,
)
from cosched_traces.errors import WorkloadError
from cosched_traces.rows import DEFAULTS, ReadOptions, numbered_lines
from cosched_traces.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of one file.

    marks   names that all stand in a file's first line, and in no other format's
    """

    marks: tuple[str, ...]
    description: str
    read: Callable[[Path, ReadOptions], Workload]


# In the order of trial: lengths alone are also what a file with arrivals has.
FORMATS = {
    "azure": Format(
        marks=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        description="Azure LLM inference traces 2023/2024 (CSV)",
        read=read_azure_csv,
    ),
    "burstgpt": Format(
        marks=("Timestamp", "Request tokens", "Response tokens"),
        description="BurstGPT (CSV)",
        read=read_burstgpt_csv,
    ),
    "vidur": Format(
        marks=("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        description="Vidur (CSV)",
        read=read_arrivals_csv,
    ),
    "splitwise": Format(
        marks=("arrival_timestamp", "prompt_size", "token_size"),
        description="splitwise-sim (CSV)",
        read=read_arrivals_csv,
    ),
    "lengths": Format(
        marks=("num_prefill_tokens", "num_decode_tokens"),
        description="lengths without arrivals, as Vidur and Etalon keep them (CSV)",
        read=read_lengths_csv,
    ),
    "mooncake": Format(
        marks=('"timestamp"', '"hash_ids"'),
        description="Mooncake (JSONL)",
        read=read_mooncake_jsonl,
    ),
    "servegen-batch": Format(
        marks=('"request_id"', '"input_length"', '"output_length"'),
        description="ServeGen's offline jobs with output lengths (JSONL)",
        read=read_servegen_batch_jsonl,
    ),
}


def read_trace(path: Path, options: ReadOptions = DEFAULTS) -> Workload:
    """Read a file in whichever of `FORMATS` its first line shows."""
    first = next((line for _, line in islice(numbered_lines(path), 1)), "")
    for known in FORMATS.values():
        if all(mark in first for mark in known.marks):
            return known.read(path, options)
    formats = "; ".join(known.description for known in FORMATS.values())
    raise WorkloadError(f"{path}: of no known format, it begins {first[:80]!r}; known: {formats}")


def format_table() -> str:
    """The table of formats in docs/workloads.md, in Markdown."""
    lines = ["| format | what it is | shows by |", "|---|---|---|"]
    for name, known in FORMATS.items():
        marks = ", ".join(f"`{mark}`" for mark in known.marks)
        lines.append(f"| `{name}` | {known.description} | {marks} |")
    return "\n".join(lines) + "\n"
