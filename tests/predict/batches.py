"""Batches as a scheduler makes them, for tests of predictors."""

from __future__ import annotations

import numpy as np

from cosched.core.batch import BatchShape, Prefill

_KINDS = ("prefill", "cached prefill", "decode", "mixed")


def scheduler_batches(
    *, seed: int, num: int, max_kv_tokens: int, max_tokens: int = 8192, max_decodes: int = 256
) -> list[BatchShape]:
    """Batches as a scheduler makes them, of each kind in turn; the same for the same seed.

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

    def prefills(most: int, *, cached: bool) -> list[Prefill]:
        tokens = size(1, most)
        count = min(int(rng.choice([1, 1, 1, 2, 3, 6])), tokens)
        cuts = np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False))
        chunks = np.diff([0, *cuts, tokens])
        return [Prefill(int(new), size(16, 30000) if cached else 0) for new in chunks]

    batches = []
    for i in range(num):
        kind = _KINDS[i % len(_KINDS)]
        running = decodes() if kind in ("decode", "mixed") else []
        chunks = []
        if kind != "decode":
            cached = kind == "cached prefill" or (kind == "mixed" and rng.random() < 0.5)
            chunks = prefills(max_tokens - len(running), cached=cached)
        batches.append(BatchShape(prefills=chunks, decodes=running))
    return batches
