"""Reading measured kernel tables: CSV files, plain or gzipped, as aiconfigurator publishes them.

A table is found by the start of its name (the GPU) and its end: ``h100_sxm_..._gemm.csv.gz``. Times
are milliseconds in the files and seconds everywhere else. Columns that are not needed are ignored;
rows of other data types, of sliding windows or with a cached prefix are skipped.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO, TypeVar, cast

from cosched.errors import ConfigError, choices

_SUBFOLDERS = ("", "aiconfigurator", "profiles/aiconfigurator")
_MS = 1e-3

RowT = TypeVar("RowT")


class GemmRow(NamedTuple):
    """C[m, n] = A[m, k] B[k, n]."""

    m: int
    n: int
    k: int
    seconds: float


class AttentionRow(NamedTuple):
    """One layer, `batch_size` sequences of equal length; heads are those on one GPU.

    length  context attention: new tokens of each sequence, none cached before them;
            generation attention: tokens attended to by each decode, its new one included
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_size: int
    length: int
    seconds: float


class AllReduceRow(NamedTuple):
    """Sum of `num_elements` bfloat16 values over `num_gpus`, from a CUDA graph."""

    num_gpus: int
    num_elements: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePaths:
    """The files of one GPU. allreduce is None where there is none: then only TP 1 can run."""

    gemm: Path
    context_attention: Path
    generation_attention: Path
    allreduce: Path | None


def find_tables(data_dir: Path, gpu_tables: str) -> TablePaths:
    """The tables of a GPU below `data_dir`, or one or two folders down where the data sets keep
    them. ConfigError when one is missing or there are two of a kind."""
    for subfolder in _SUBFOLDERS:
        folder = data_dir / subfolder
        if any(folder.glob("*_gemm.csv*")):
            break
    else:
        raise ConfigError(f"no kernel tables in {data_dir}: expected {gpu_tables}_*_gemm.csv[.gz]")

    def one(kind: str) -> Path | None:
        found = sorted(folder.glob(f"{gpu_tables}_*{kind}.csv*"))
        if len(found) > 1:
            raise ConfigError(
                f"{len(found)} {kind} tables for {gpu_tables} in {folder}: "
                f"{choices(path.name for path in found)}; keep one"
            )
        return found[0] if found else None

    def required(kind: str) -> Path:
        path = one(kind)
        if path is None:
            there = choices(path.name for path in folder.glob(f"*_{kind}.csv*"))
            raise ConfigError(
                f"no {kind} table for {gpu_tables} in {folder}; there are: {there or 'none'}"
            )
        return path

    return TablePaths(
        gemm=required("gemm"),
        context_attention=required("context_attention"),
        generation_attention=required("generation_attention"),
        allreduce=one("allreduce"),
    )


class _Table:
    """One open CSV file: reads cells by column name, reports what is wrong by file and line."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self._reader = csv.reader(file)
        self.header = next(self._reader, [])

    def columns(self, names: Sequence[str]) -> list[int]:
        missing = [name for name in names if name not in self.header]
        if missing:
            raise ConfigError(
                f"{self.path}:1: no column {choices(missing)}; there are {choices(self.header)}"
            )
        return [self.header.index(name) for name in names]

    def where(self, **wanted: str) -> list[tuple[int, str]]:
        """(column, value) conditions, for those columns that the file has."""
        return [
            (self.header.index(name), value)
            for name, value in wanted.items()
            if name in self.header
        ]

    def rows(
        self, integers: Sequence[str], conditions: Sequence[tuple[int, str]]
    ) -> Iterator[tuple[list[int], float]]:
        """(integer cells, seconds) of each row that meets the conditions."""
        picked = self.columns(integers)
        (latency,) = self.columns(["latency"])
        for cells in self._reader:
            if not cells:
                continue
            if len(cells) != len(self.header):
                raise self._error(f"{len(cells)} cells, the header has {len(self.header)}")
            if any(cells[column] != value for column, value in conditions):
                continue
            try:
                numbers = [int(cells[column]) for column in picked]
                seconds = float(cells[latency]) * _MS
            except ValueError as error:
                raise self._error(str(error)) from None
            if not (seconds > 0 and math.isfinite(seconds)):
                raise self._error(f"latency is {cells[latency]} ms; it must be above 0")
            if min(numbers) < 0:
                raise self._error(f"negative size: {numbers}")
            yield numbers, seconds

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.path}:{self._reader.line_num}: {message}")


def _open(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return cast(TextIO, gzip.open(path, "rt", encoding="utf-8", newline=""))
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"cannot read the kernel table {path}: {error.strerror}") from error


def _some(rows: list[RowT], path: Path) -> list[RowT]:
    if not rows:
        raise ConfigError(f"{path}: no bfloat16 rows")
    return rows


def read_gemm(path: Path) -> list[GemmRow]:
    with _open(path) as file:
        table = _Table(path, file)
        rows = table.rows(("m", "n", "k"), table.where(gemm_dtype="bfloat16"))
        return _some([GemmRow(m, n, k, seconds) for (m, n, k), seconds in rows], path)


def read_context_attention(path: Path) -> list[AttentionRow]:
    return _read_attention(path, generation=False)


def read_generation_attention(path: Path) -> list[AttentionRow]:
    return _read_attention(path, generation=True)


_ATTENTION = ("num_heads", "num_key_value_heads", "head_dim", "batch_size", "isl", "step")


def _read_attention(path: Path, *, generation: bool) -> list[AttentionRow]:
    with _open(path) as file:
        table = _Table(path, file)
        conditions = table.where(
            attn_dtype="bfloat16", kv_cache_dtype="bfloat16", window_size="0", beam_width="1"
        )
        rows = []
        for (heads, kv_heads, head_dim, batch, isl, step), seconds in table.rows(
            _ATTENTION, conditions
        ):
            if not generation and step:
                continue
            length = isl + step if generation else isl
            rows.append(AttentionRow(heads, kv_heads, head_dim, batch, length, seconds))
        return _some(rows, path)


def read_allreduce(path: Path) -> list[AllReduceRow]:
    with _open(path) as file:
        table = _Table(path, file)
        # Both phases run from CUDA graphs in SGLang; the eager rows hold the launch as well.
        conditions = table.where(allreduce_dtype="bfloat16", backend="sglang_graph")
        rows = table.rows(("num_gpus", "message_size"), conditions)
        return _some([AllReduceRow(gpus, size, seconds) for (gpus, size), seconds in rows], path)
