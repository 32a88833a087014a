"""Batches for the tests of cost models."""

from __future__ import annotations

import numpy as np

from cosched.core.batch import BatchShape, Prefill
from cosched.predict.fitted import summarise


def typical_batches(*, seed, num, max_kv_tokens):
    """Batches as a co-serving replica runs them: 0 to 256 decodes, 0 to 3 prefill chunks."""
    rng = np.random.default_rng(seed)
    batches = []
    while len(batches) < num:
        num_decodes = int(rng.choice([0, 1, 8, 32, 64, 128, 256]))
        num_prefills = int(rng.choice([0, 1, 1, 2, 3]))
        mean = min(float(rng.choice([128, 512, 2048, 8192])), max_kv_tokens / max(num_decodes, 1))
        decodes = [1 + int(context) for context in rng.exponential(mean, num_decodes)]
        prefills = [
            Prefill(int(rng.choice([16, 64, 256, 512, 2048])), int(rng.choice([0, 0, 512, 8192])))
            for _ in range(num_prefills)
        ]
        if decodes or prefills:
            batches.append(BatchShape(prefills=prefills, decodes=decodes))
    return batches


def roofline_ratio(roofline, table, batches):
    """The roofline against the tables, by kind of batch."""
    kinds = {
        "prefill": lambda batch: not batch.decodes,
        "decode": lambda batch: not batch.prefills,
        "mixed": lambda batch: bool(batch.prefills and batch.decodes),
    }
    return {
        kind: summarise(
            [roofline.iteration_s(batch) for batch in batches if of_kind(batch)],
            [table.iteration_s(batch) for batch in batches if of_kind(batch)],
        )
        for kind, of_kind in kinds.items()
    }
