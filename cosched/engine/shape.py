"""The shape of one of SGLang's batches."""

from __future__ import annotations

from typing import Any

from cosched.core.batch import BatchShape, Prefill
from cosched.engine import port

__all__ = ["shape_of"]


def shape_of(batch: Any) -> BatchShape:
    """What the time of a batch depends on; valid from when the batch was built until it ran."""
    if batch.forward_mode.is_decode():
        return BatchShape(decodes=batch.seq_lens_cpu.tolist())
    num_mixed = len(batch.decoding_reqs or ())
    num_prefills = len(batch.extend_lens) - num_mixed
    return BatchShape(
        prefills=[
            Prefill(new, cached)
            for new, cached in zip(
                batch.extend_lens[:num_prefills], batch.prefix_lens[:num_prefills], strict=True
            )
        ],
        decodes=[cached + 1 for cached in batch.prefix_lens[num_prefills:]],
        num_loaded=port.num_loaded(batch),
    )
