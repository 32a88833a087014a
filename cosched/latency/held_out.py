"""How wrong a table is where it was not measured: predict rows from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from cosched.errors import ConfigError

__all__ = ["ErrorSummary", "HeldOutError", "MeasuredTable", "held_out_error", "summarise"]


class TableRow(Protocol):
    @property
    def seconds(self) -> float: ...


RowT = TypeVar("RowT", bound=TableRow)


class MeasuredTable(Protocol[RowT]):
    """A table that can be made from part of its rows.

    group(row)  what curve a row lies on: a matrix shape, a number of heads
    """

    def __init__(self, rows: Sequence[RowT]) -> None: ...
    @property
    def rows(self) -> Sequence[RowT]: ...
    def predict(self, row: RowT) -> float: ...
    def group(self, row: RowT) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Relative errors, predicted / measured - 1 (0-1). bias: their mean; the rest: absolute."""

    num_points: int
    bias: float
    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """rows: rows of measured curves held out; curves: whole curves held out."""

    rows: ErrorSummary
    curves: ErrorSummary | None


def summarise(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Relative error of predictions; there must be some."""
    relative = np.asarray(predicted) / np.asarray(measured) - 1
    size = np.abs(relative)
    return ErrorSummary(
        num_points=len(relative),
        bias=float(relative.mean()),
        mean=float(size.mean()),
        p50=float(np.median(size)),
        p99=float(np.quantile(size, 0.99)),
    )


def held_out_error(
    table: MeasuredTable[RowT], *, fraction: float = 0.1, seed: int = 0
) -> HeldOutError:
    """Error of a table on rows it was not given: a random `fraction` of the rows, then a random
    `fraction` of the curves. Both are harder than use: the full grid is twice as dense around a
    point as what is left here around a held-out one.

    curves is None where whole curves cannot be predicted (there are too few).
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"fraction is {fraction}; it must be in (0, 1)")
    rng = np.random.default_rng(seed)
    some_rows = (rng.random(len(table.rows)) < fraction).tolist()
    by_row = _error(table, some_rows)
    if by_row is None:
        raise ConfigError(f"no row of {len(table.rows)} can be predicted from the others")
    groups = sorted({table.group(row) for row in table.rows})
    chosen = {group for group in groups if rng.random() < fraction}
    by_curve = _error(table, [table.group(row) in chosen for row in table.rows])
    return HeldOutError(rows=by_row, curves=by_curve)


def _error(table: MeasuredTable[RowT], held: Sequence[bool]) -> ErrorSummary | None:
    """Error on the rows marked in `held` of a table of the others."""
    rest = type(table)([row for row, out in zip(table.rows, held, strict=True) if not out])
    predicted, measured = [], []
    for row, out in zip(table.rows, held, strict=True):
        if not out:
            continue
        try:
            predicted.append(rest.predict(row))
        except ConfigError:
            continue  # Nothing around it is left; a reader of the whole table would be told so.
        measured.append(row.seconds)
    return summarise(predicted, measured) if measured else None
