"""How well predictors do on iterations they were not fitted to, by kind of batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.errors import ConfigError
from cosched.latency.graphs import GraphSizes
from cosched.latency.predictor import PREDICTORS, FittedPredictor, fit_predictor
from cosched.latency.profile_file import MeasuredPoint
from cosched.latency.relative_error import ErrorSummary, summarise

__all__ = [
    "KINDS",
    "Comparison",
    "compare_predictors",
    "error_table",
    "errors_of",
    "hold_out",
    "kind_of",
    "measure",
    "scheduler_batches",
]

KINDS = ("prefill", "cached prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One predictor on the held-out iterations.

    predicted_s  of each of them [s]
    errors       by kind of batch, and of "all"
    """

    predictor: FittedPredictor
    predicted_s: Sequence[float]
    errors: Mapping[str, ErrorSummary]


def compare_predictors(
    fitted_to: Sequence[MeasuredPoint],
    held_out: Sequence[MeasuredPoint],
    *,
    graphs: GraphSizes | None = None,
) -> dict[str, Comparison | str]:
    """All predictors, fitted to the same iterations; the reason for one that cannot be."""
    batches = [point.batch for point in fitted_to]
    seconds = [point.seconds for point in fitted_to]
    measured = np.array([point.seconds for point in held_out])
    kinds = np.array([kind_of(point.batch) for point in held_out])
    totals = [BatchTotals.of(point.batch) for point in held_out]
    results: dict[str, Comparison | str] = {}
    for name in PREDICTORS:
        try:
            predictor = fit_predictor(name, batches, seconds, graphs=graphs)
        except ConfigError as error:
            results[name] = str(error)
            continue
        predicted = np.array([predictor.predict_s(t) for t in totals])
        errors = {
            kind: summarise(predicted[kinds == kind].tolist(), measured[kinds == kind].tolist())
            for kind in KINDS
            if (kinds == kind).any()
        }
        errors["all"] = summarise(predicted.tolist(), measured.tolist())
        results[name] = Comparison(
            predictor=predictor, predicted_s=predicted.tolist(), errors=errors
        )
    return results


def hold_out(
    points: Sequence[MeasuredPoint], share: float, *, seed: int | None
) -> tuple[list[MeasuredPoint], list[MeasuredPoint]]:
    """(those to fit to, those held out): by chance, or, without a seed, the last. ConfigError where
    one would be empty."""
    order = range(len(points))[::-1]
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(points)).tolist()
    shuffled = [points[i] for i in order]
    num_held_out = round(len(points) * share)
    if not 0 < num_held_out < len(points):
        raise ConfigError(f"{len(points)} batches are too few to hold some out")
    return shuffled[num_held_out:], shuffled[:num_held_out]


def error_table(results: Mapping[str, Comparison | str], num_fitted: int) -> Iterator[str]:
    """For people."""
    num_held_out = max(
        (one.errors["all"].num_points for one in results.values() if isinstance(one, Comparison)),
        default=0,
    )
    yield f"fitted to {num_fitted} batches, error on {num_held_out} others: mean, p99 [%]"
    yield f"{'':<10}" + "".join(f"{kind:>16}" for kind in (*KINDS, "all"))
    for name, result in results.items():
        if isinstance(result, str):
            yield f"{name:<10}{result}"
            continue
        errors = [result.errors.get(kind) for kind in (*KINDS, "all")]
        cells = (f"{100 * e.mean:>9.2f}{100 * e.p99:>7.1f}" if e else f"{'-':>16}" for e in errors)
        yield f"{name:<10}{''.join(cells)}"


def errors_of(results: Mapping[str, Comparison | str]) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        name: {"not_fitted": result}
        if isinstance(result, str)
        else {kind: asdict(error) for kind, error in result.errors.items()}
        for name, result in results.items()
    }


def kind_of(batch: BatchShape) -> str:
    """One of `KINDS`; cached prefill: some prefill has tokens whose KV is there."""
    if not batch.prefills:
        return "decode"
    if batch.decodes:
        return "mixed"
    return "cached prefill" if any(p.num_cached for p in batch.prefills) else "prefill"


def measure(
    iteration_s: Callable[[BatchShape], float], batches: Sequence[BatchShape]
) -> list[MeasuredPoint]:
    """Iterations as a cost model's `iteration_s` says they take."""
    return [MeasuredPoint(batch=batch, seconds=iteration_s(batch)) for batch in batches]


def scheduler_batches(
    *, seed: int, num: int, max_kv_tokens: int, max_tokens: int = 8192, max_decodes: int = 256
) -> list[BatchShape]:
    """Batches as a scheduler makes them, of each of `KINDS` in turn; the same for the same seed.

    Sizes are spread evenly in the logarithm: 1 to `max_decodes` decodes of a mean context of 32 to
    16384 tokens (spread exponentially, evenly, or by a tenth), 1 to `max_tokens` tokens in 1 to 6
    prefills, over 16 to 30000 cached tokens each where there are any (in half of the mixed ones).
    """
    rng = np.random.default_rng(seed)

    def size(low: float, high: float) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    def decodes() -> list[int]:
        count = size(1, max_decodes)
        mean = min(size(32, 16384), max(2.0, 0.9 * max_kv_tokens / count))
        spread = (
            rng.exponential(mean, count),
            rng.uniform(0, 2 * mean, count),
            rng.normal(mean, 0.1 * mean, count),
        )[rng.integers(3)]
        return [max(1, int(context)) for context in np.minimum(spread, 32768)]

    def prefills(room: int, *, cached: bool) -> list[Prefill]:
        tokens = size(1, room)
        count = min(int(rng.choice([1, 1, 1, 2, 3, 6])), tokens)
        cuts = np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False))
        chunks = np.diff([0, *cuts, tokens])
        return [Prefill(int(new), size(16, 30000) if cached else 0) for new in chunks]

    batches = []
    for i in range(num):
        kind = KINDS[i % len(KINDS)]
        running = decodes() if kind in ("decode", "mixed") else []
        chunks = []
        if kind != "decode":
            cached = kind == "cached prefill" or (kind == "mixed" and rng.random() < 0.5)
            chunks = prefills(max_tokens - len(running), cached=cached)
        batches.append(BatchShape(prefills=chunks, decodes=running))
    return batches
