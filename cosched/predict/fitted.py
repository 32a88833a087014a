"""Predictors of iteration times: what they are fitted to, how, and which there are by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pkgutil import resolve_name
from typing import Any, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.estimates import Predictor
from cosched.errors import ConfigError, choices

FloatArray = npt.NDArray[np.float64]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Sizes with a CUDA graph, ascending: a batch is padded to the next one.

    prefill  tokens of iterations with a prefill
    decode   requests of decode-only iterations
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsTable:
    """`BatchTotals` of many batches, one array per field. The names are those of `BatchTotals`, so
    a formula over these names serves one batch and a table of them. `num_loaded` is missing:
    iterations that load KV are not learned from."""

    num_prefills: FloatArray
    num_new: FloatArray
    num_cached: FloatArray
    double_pairs: FloatArray
    double_tail_pairs: FloatArray
    max_prefill_context: FloatArray
    num_decodes: FloatArray
    decode_context: FloatArray
    max_decode_context: FloatArray
    num_encoded: FloatArray
    num_encodings: FloatArray

    @classmethod
    def of(cls, totals: Sequence[BatchTotals]) -> TotalsTable:
        columns = {f.name: [getattr(t, f.name) for t in totals] for f in fields(cls)}
        return cls(**{name: np.array(column, dtype=float) for name, column in columns.items()})

    def __len__(self) -> int:
        return len(self.num_new)

    def rows(self, which: npt.NDArray[np.bool_]) -> TotalsTable:
        return TotalsTable(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


class FittedPredictor(Predictor, Protocol):
    """A predictor whose coefficients do not change, so that a file can hold them."""

    @classmethod
    def fit(cls, table: TotalsTable, seconds: FloatArray, graphs: GraphSizes | None) -> Self:
        """By least squares of the relative errors. ConfigError when there are too few batches of a
        kind."""
        ...

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The predictor whose `to_dict` gave `data`. ConfigError naming the wrong entry."""
        ...

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values: its name and, of a data class, its fields."""
        return {"predictor": self.name, **msgspec.json.decode(msgspec.json.encode(self))}

    def describe(self) -> dict[str, object]:
        return self.to_dict()


def nnls(gram: FloatArray, moments: FloatArray) -> FloatArray:
    """Non-negative least squares from the normal equations: the x >= 0 that minimises
    x' gram x - 2 moments' x (Lawson and Hanson 1974, algorithm 23.10)."""
    scale = np.sqrt(np.diag(gram))
    used = scale > 0
    scale = np.where(used, scale, 1.0)
    # Columns that say the same would make the equations singular: 1e-12 decides between them.
    a = gram / np.outer(scale, scale) + 1e-12 * np.eye(len(scale))
    b = moments / scale
    x = np.zeros(len(b))
    passive = used.copy()  # most stay (Bro and de Jong 1997)
    tolerance = 1e-9 * float(np.abs(b).max(initial=0.0))
    for _ in range(10 * len(b)):
        while passive.any():
            trial = np.zeros(len(b))
            trial[passive] = np.linalg.solve(a[np.ix_(passive, passive)], b[passive])
            negative = passive & (trial <= 0)
            if not negative.any():
                x = trial
                break
            # From a feasible x towards the solution until the first coefficients are zero. From
            # the start, where x is zero, this drops all negative ones at once.
            steps = x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)
            x = np.maximum(x + steps.min() * (trial - x), 0.0)
            passive[np.flatnonzero(negative)[steps == steps.min()]] = False
            x[~passive] = 0.0
        gradient = np.where(used & ~passive, b - a @ x, -np.inf)
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
    return x / scale


def relative_fit(features: FloatArray, seconds: FloatArray) -> tuple[float, ...]:
    """Coefficients >= 0 that minimise the squares of the relative errors; features are rows."""
    matrix = features.T / seconds[:, None]
    return tuple(nnls(matrix.T @ matrix, matrix.sum(axis=0)).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Relative errors, predicted / measured - 1 (0-1). bias: their mean; the rest: absolute."""

    num_points: int
    bias: float
    mean: float
    p50: float
    p99: float


def summarise(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """There must be some."""
    relative = np.asarray(predicted) / np.asarray(measured) - 1
    size = np.abs(relative)
    return ErrorSummary(
        num_points=len(relative),
        bias=float(relative.mean()),
        mean=float(size.mean()),
        p50=float(np.median(size)),
        p99=float(np.quantile(size, 0.99)),
    )


def check_points(kind: str, num: int, *, least: int, predictor: str) -> None:
    """ConfigError when there are too few batches of a kind to fit a predictor."""
    if num < least:
        raise ConfigError(
            f"the {predictor!r} predictor needs at least {least} {kind} batches to fit; "
            f"there are {num}"
        )


LEAST_POINTS = 8
"""Batches of a kind from which a phase with up to three coefficients is fitted."""


def phases(table: TotalsTable, *, predictor: str) -> tuple[Mask, Mask, Mask]:
    """Which batches are prefill-only, decode-only, mixed; ConfigError if one of the first two is
    rare."""
    has_prefill, has_decode = table.num_new > 0, table.num_decodes > 0
    prefills, decodes = has_prefill & ~has_decode, has_decode & ~has_prefill
    for kind, which in (("prefill-only", prefills), ("decode-only", decodes)):
        check_points(kind, int(which.sum()), least=LEAST_POINTS, predictor=predictor)
    return prefills, decodes, has_prefill & has_decode


def number(data: Mapping[str, Any], key: str) -> float:
    """The number >= 0 at `key`; ConfigError naming it when it is none."""
    return _checked(data.get(key), key)


def numbers(data: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    """The `length` numbers >= 0 at `key`; ConfigError naming them when they are none."""
    values = data.get(key)
    if not isinstance(values, list | tuple) or len(values) != length:
        raise ConfigError(f"{key} is {values!r}; it must be a list of {length} numbers")
    return tuple(_checked(value, f"{key}[{i}]") for i, value in enumerate(values))


def _checked(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} is {value!r}; it must be a number, at least 0")
    return float(value)


PREDICTORS: Mapping[str, str] = {
    "hygen": "cosched.papers.hygen.predictor:HygenPredictor",
    "echo": "cosched.papers.echo.predictor:EchoPredictor",
    "bros": "cosched.papers.bros.predictor:BrosPredictor",
    "cosched": "cosched.predict.linear:CoschedPredictor",
}
"""Name -> where its class is; a paper's is imported when it is asked for."""


def fit_predictor(
    name: str,
    batches: Sequence[BatchShape],
    seconds: Sequence[float],
    *,
    graphs: GraphSizes | None = None,
) -> FittedPredictor:
    """The named predictor, fitted to measured iterations by least squares of relative errors.

    graphs  sizes with CUDA graphs, to which batches are padded; only `cosched` uses them

    ConfigError for an unknown name, a batch without work, a time that is not above 0, or too few
    batches of a kind. Same batches, same predictor.
    """
    predictor = _named(name)
    if len(batches) != len(seconds):
        raise ConfigError(f"there are {len(batches)} batches, but {len(seconds)} times")
    for i, (batch, each_s) in enumerate(zip(batches, seconds, strict=True)):
        if not 0 < each_s < float("inf"):
            raise ConfigError(f"seconds[{i}] is {each_s!r}; it must be above 0")
        if not batch.prefills and not batch.decodes:
            raise ConfigError(f"batches[{i}] has neither prefills nor decodes")
    table = TotalsTable.of([BatchTotals.of(batch) for batch in batches])
    return predictor.fit(table, np.array(seconds, dtype=float), graphs)


def predictor_from_dict(data: Mapping[str, Any]) -> FittedPredictor:
    """The predictor whose `to_dict` gave `data`. ConfigError naming what is missing or wrong."""
    return _named(data.get("predictor")).from_dict(data)


def _named(name: object) -> type[FittedPredictor]:
    if not isinstance(name, str) or name not in PREDICTORS:
        raise ConfigError(f"unknown predictor {name!r}; choose from {choices(PREDICTORS)}")
    predictor: type[FittedPredictor] = resolve_name(PREDICTORS[name])
    return predictor
