"""Images that nothing computes, which SGLang's scheduler takes for real ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

_ENCODING_BYTES = 8192
"""Of a token of an image: 4,096 values of bfloat16."""


def made_up_media(media: Iterable[tuple[int, int, int]]) -> Any:
    """The images of a request as SGLang's processors give them: of each a number that tells it from
    others, the place of its first token, and its tokens. None: there are none."""
    items = [
        MultimodalDataItem(
            modality=Modality.IMAGE,
            hash=key,
            pad_value=key,
            offsets=[(begin, begin + num_tokens - 1)],
        )
        for key, begin, num_tokens in media
    ]
    return MultimodalProcessorOutput(mm_items=items) if items else None


_ENCODING_BYTES = 8192
"""Of a token of an image: 4,096 values of bfloat16."""


def keep_encodings(batch: Any) -> None:
    """Put into SGLang's cache what the encoder would have computed for a batch with prefills."""
    for mm_inputs, begin, num_new in zip(
        batch.multimodal_inputs or (),
        batch.prefix_lens or (),
        batch.extend_lens or (),
        strict=False,
    ):
        for item in () if mm_inputs is None else mm_inputs.mm_items:
            ((first, last),) = item.offsets
            if last >= begin and first < begin + num_new:
                size = (last - first + 1) * _ENCODING_BYTES
                kept = torch.empty(size, dtype=torch.uint8, device="meta")  # takes no memory
                mm_schedule.embedding_cache.set(item.hash, EmbeddingResult(embedding=kept))
