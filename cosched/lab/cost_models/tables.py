"""Reading measured kernel tables: CSV files, plain or gzipped, as aiconfigurator publishes them.

A table is found by the start of its name (the GPU) and its end: ``h100_sxm_..._gemm.csv.gz``. Times
are milliseconds in the files and seconds in this package. Other columns are ignored; rows of other
data types, of sliding windows or with a cached prefix are skipped.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosched.errors import ConfigError, choices

_SUBFOLDERS = ("", "aiconfigurator", "profiles/aiconfigurator")

_HEADS = ("num_heads", "num_key_value_heads", "head_dim", "batch_size", "isl", "step")
_PLAIN = {
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "window_size": "0",
    "beam_width": "1",
}
# Kind -> (columns of sizes, values that rows must have in the columns that a file has).
_KINDS = {
    "gemm": (("m", "n", "k"), {"gemm_dtype": "bfloat16"}),
    "context_attention": (_HEADS, _PLAIN),
    "generation_attention": (_HEADS, _PLAIN),
    # Both phases run from CUDA graphs in SGLang; the eager rows contain the launch as well.
    "allreduce": (
        ("num_gpus", "message_size"),
        {"allreduce_dtype": "bfloat16", "backend": "sglang_graph"},
    ),
}

Row = tuple[Any, ...]
"""Sizes, and last the time [s].

gemm                  (m, n, k): C[m, n] = A[m, k] B[k, n]
context_attention     (heads, KV heads, head size, sequences, new tokens of each), one layer
generation_attention  the same with the tokens that each decode attends to, its new one included
allreduce             (GPUs, bfloat16 values)
"""


def find_tables(data_dir: Path, gpu_tables: str) -> dict[str, Path]:
    """Kind -> file of a GPU, below `data_dir` or one or two folders down where the data sets keep
    them. ConfigError if one is missing or there are two of a kind; ``allreduce`` may be missing."""
    for subfolder in _SUBFOLDERS:
        folder = data_dir / subfolder
        if any(folder.glob("*_gemm.csv*")):
            break
    else:
        raise ConfigError(f"no kernel tables in {data_dir}: expected {gpu_tables}_*_gemm.csv[.gz]")
    paths = {}
    for kind in _KINDS:
        found = sorted(folder.glob(f"{gpu_tables}_*{kind}.csv*"))
        if len(found) > 1:
            names = choices(path.name for path in found)
            raise ConfigError(
                f"{len(found)} {kind} tables for {gpu_tables} in {folder}: {names}; keep one"
            )
        if found:
            paths[kind] = found[0]
        elif kind != "allreduce":
            there = choices(path.name for path in folder.glob(f"*_{kind}.csv*"))
            raise ConfigError(
                f"no {kind} table for {gpu_tables} in {folder}; there are: {there or 'none'}"
            )
    return paths


def read_table(path: Path, kind: str) -> list[Row]:
    """The bfloat16 rows of a table. ConfigError names file and line of what is wrong."""
    columns, where = _KINDS[kind]
    rows: list[Row] = []
    for sizes, seconds in _rows(path, columns, where):
        if columns is _HEADS:
            *heads, batch, isl, step = sizes
            if kind == "generation_attention":
                rows.append((*heads, batch, isl + step, seconds))
            elif not step:
                rows.append((*heads, batch, isl, seconds))
        else:
            rows.append((*sizes, seconds))
    if not rows:
        raise ConfigError(f"{path}: no bfloat16 rows")
    return rows


def _rows(
    path: Path, columns: tuple[str, ...], where: dict[str, str]
) -> Iterator[tuple[list[int], float]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        file = opened(path, "rt", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"cannot read the kernel table {path}: {error.strerror}") from error
    with file:
        reader = csv.reader(file)
        header = next(reader, [])

        def wrong(message: str) -> ConfigError:
            return ConfigError(f"{path}:{reader.line_num}: {message}")

        missing = [name for name in (*columns, "latency") if name not in header]
        if missing:
            raise wrong(f"no column {choices(missing)}; there are {choices(header)}")
        picked = [header.index(name) for name in columns]
        latency = header.index("latency")
        conditions = [(header.index(name), v) for name, v in where.items() if name in header]
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise wrong(f"{len(cells)} cells, the header has {len(header)}")
            if any(cells[column] != value for column, value in conditions):
                continue
            try:
                sizes = [int(cells[column]) for column in picked]
                seconds = float(cells[latency]) * 1e-3
            except ValueError as bad:
                raise wrong(str(bad)) from None
            if not 0 < seconds < math.inf:
                raise wrong(f"latency is {cells[latency]} ms; it must be above 0")
            if min(sizes) < 0:
                raise wrong(f"negative size: {sizes}")
            yield sizes, seconds
