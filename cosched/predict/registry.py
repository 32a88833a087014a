"""Predictors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np

from cosched.core.batch import BatchShape, BatchTotals
from cosched.errors import ConfigError, choices
from cosched.predict.features import GraphSizes, TotalsTable
from cosched.predict.fitted import FittedPredictor

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
