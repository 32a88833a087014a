"""What boosted trees know of a prompt: a reference that is fitted offline, and never served.

It needs all its data at once, and from Python takes longer to ask for one request than an estimate
may; `cosched.length.learned` is what serves. Needs LightGBM, which nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cosched.errors import ConfigError
from cosched.length.judge import LATER, Judged

__all__ = ["held_out_medians"]

_FOLDS = 5
_BUCKETS = 512
_SETTINGS: dict[str, Any] = {
    "objective": "quantile",
    "learning_rate": 0.03,
    "num_leaves": 6,
    "min_data_in_leaf": 15,
    "feature_fraction": 0.25,
    "num_threads": 1,
    "verbose": -1,
}
_ROUNDS = 300

Floats = npt.NDArray[np.float64]


def held_out_medians(
    prompts: Sequence[tuple[Sequence[int], int]],
    lengths: Sequence[int],
    *,
    coverage: float,
    seed: int,
) -> list[Judged]:
    """Each request by trees that were fitted to the other four fifths (Ke et al. 2017).

    prompts: token ids and their true number. ConfigError without LightGBM.
    """
    try:
        import lightgbm
    except ImportError:
        raise ConfigError("trees need LightGBM: pip install lightgbm") from None
    table = np.stack([_features(tokens, number) for tokens, number in prompts])
    logs = np.log(np.maximum(np.array(lengths, dtype=float), 1.0))
    folds = np.random.Generator(np.random.PCG64(seed)).integers(_FOLDS, size=len(logs))
    found = np.zeros((2, len(logs)))
    for i, level in enumerate((0.5, coverage)):
        for fold in range(_FOLDS):
            rest = folds != fold
            data = lightgbm.Dataset(table[rest], logs[rest])
            settings = {**_SETTINGS, "alpha": level, "seed": seed}
            booster = lightgbm.train(settings, data, num_boost_round=_ROUNDS)
            found[i, ~rest] = np.exp(booster.predict(table[~rest]))
    return [
        Judged(median, max(upper, median), max(median - LATER, 1) if n > LATER else None, n)
        for median, upper, n in zip(*found.tolist(), lengths, strict=True)
    ]


def _features(tokens: Sequence[int], num_tokens: int) -> Floats:
    """How often each bucket of tokens is in the prompt, its length, its different tokens."""
    row = np.zeros(_BUCKETS + 3)
    if len(tokens):
        ids = np.array(tokens, dtype=np.int64)
        row[:_BUCKETS] = np.bincount(ids % _BUCKETS, minlength=_BUCKETS)
        row[_BUCKETS] = len(ids)
        row[_BUCKETS + 1] = len(np.unique(ids))
    row[_BUCKETS + 2] = num_tokens
    return row
