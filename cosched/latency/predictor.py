"""Predictors by name: the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError, choices
from cosched.latency.features import TotalsTable, totals_table
from cosched.latency.fit_cosched import fit_cosched
from cosched.latency.graphs import GraphSizes
from cosched.latency.interp import FloatArray
from cosched.latency.predictor_base import FittedPredictor
from cosched.latency.predictor_cosched import CoschedPredictor
from cosched.latency.predictor_papers import BrosPredictor, EchoPredictor, HygenPredictor

__all__ = [
    "PREDICTORS",
    "FittedPredictor",
    "PredictorEntry",
    "fit_predictor",
    "predictor_from_dict",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorEntry:
    """One named predictor.

    summary    one line for ``--help``
    source     paper and section
    fit        from a table of batches, their seconds and the sizes of CUDA graphs, if any
    from_dict  the inverse of its `to_dict`
    """

    name: str
    summary: str
    source: str
    fit: Callable[[TotalsTable, FloatArray, GraphSizes | None], FittedPredictor]
    from_dict: Callable[[Mapping[str, Any]], FittedPredictor]


_ENTRIES = (
    PredictorEntry(
        name="hygen",
        summary="linear in tokens, contexts, their squares and the numbers of requests",
        source="HyGen §4.2, Eq. 1",
        fit=lambda table, seconds, _: HygenPredictor.fit(table, seconds),
        from_dict=HygenPredictor.from_dict,
    ),
    PredictorEntry(
        name="echo",
        summary="quadratic prefill with a floor, max and mean of decode contexts, blended",
        source="Echo §5.2, Eq. 6 to 8",
        fit=lambda table, seconds, _: EchoPredictor.fit(table, seconds),
        from_dict=EchoPredictor.from_dict,
    ),
    PredictorEntry(
        name="bros",
        summary="tokens and tokens times context per phase, summed; at least the loading of KV",
        source="BROS §4.1, cost model C",
        fit=lambda table, seconds, _: BrosPredictor.fit(table, seconds),
        from_dict=BrosPredictor.from_dict,
    ),
    PredictorEntry(
        name="cosched",
        summary="a level per CUDA graph size, attention by pairs, keys and a surface of contexts",
        source="cosched",
        fit=fit_cosched,
        from_dict=CoschedPredictor.from_dict,
    ),
)

PREDICTORS: Mapping[str, PredictorEntry] = {entry.name: entry for entry in _ENTRIES}
assert len(PREDICTORS) == len(_ENTRIES), "duplicate predictor name"


def fit_predictor(
    name: str,
    batches: Sequence[BatchShape],
    seconds: Sequence[float],
    *,
    graphs: GraphSizes | None = None,
) -> FittedPredictor:
    """The named predictor, fitted to measured iterations by least squares of relative errors.

    graphs  sizes with CUDA graphs, to which batches are padded; only `cosched` makes use of them

    ConfigError for an unknown name, a batch without work, a time that is not above 0, or too few
    batches of a kind. Same batches, same predictor.
    """
    entry = _entry(name)
    if len(batches) != len(seconds):
        raise ConfigError(f"there are {len(batches)} batches, but {len(seconds)} times")
    measured = np.asarray(seconds, dtype=np.float64)
    wrong = ~((measured > 0) & np.isfinite(measured))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ConfigError(f"seconds[{i}] is {seconds[i]!r}; it must be above 0")
    table = totals_table(batches)
    empty = (table.num_new == 0) & (table.num_decodes == 0)
    if empty.any():
        raise ConfigError(f"batches[{int(np.argmax(empty))}] has neither prefills nor decodes")
    return entry.fit(table, measured, graphs)


def predictor_from_dict(data: Mapping[str, Any]) -> FittedPredictor:
    """The predictor whose `to_dict` gave `data`. ConfigError naming what is missing or wrong."""
    return _entry(data.get("predictor")).from_dict(data)


def _entry(name: object) -> PredictorEntry:
    if not isinstance(name, str) or name not in PREDICTORS:
        raise ConfigError(f"unknown predictor {name!r}; choose from {choices(PREDICTORS)}")
    return PREDICTORS[name]
