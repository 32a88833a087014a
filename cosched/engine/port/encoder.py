"""Images, video and sound: what the model's encoder computes, and what of it SGLang has kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sglang.srt.managers import mm_schedule
from sglang.srt.mem_cache.multimodal_cache import MultiModalStaticCache

from cosched.core.request import Media


class _Part(NamedTuple):
    """What the encoder computes at a time. key: in SGLang's cache of embeddings; spans: the first
    and the last place of its tokens in the prompt, several of a video."""

    key: int
    spans: Sequence[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return sum(last - first + 1 for first, last in self.spans)

    def is_in(self, begin: int, end: int) -> bool:
        """Whether a chunk [begin, end) of the prompt needs it."""
        return any(last >= begin and first < end for first, last in self.spans)


def media_of(req: Any) -> tuple[Media, ...]:
    """What the encoder computes for a request, in the order of its prompt."""
    parts = [Media(min(part.spans)[0], part.num_tokens) for part in _parts(req.multimodal_inputs)]
    return tuple(sorted(parts))


def encoded_of(batch: Any, num_prefills: int) -> Sequence[int]:
    """For each prefill of a batch the tokens that the encoder computes; empty: none. Valid between
    building and running it."""
    inputs = batch.multimodal_inputs
    if not inputs or not any(inputs[:num_prefills]):
        return ()
    cache, seen = mm_schedule.embedding_cache, set[int]()
    encoded = []
    for mm_inputs, begin, num_new in zip(
        inputs[:num_prefills], batch.prefix_lens, batch.extend_lens, strict=False
    ):
        num = 0
        for part in _parts(mm_inputs):
            if not part.is_in(begin, begin + num_new) or part.key in seen:
                continue
            if cache is None or not cache.has(part.key):
                num += part.num_tokens
                seen.add(part.key)
        encoded.append(num)
    return encoded if any(encoded) else ()


def _parts(mm_inputs: Any) -> Iterator[_Part]:
    """As SGLang encodes them (`mm_schedule._get_chunked_prefill_embedding`): image by image; of a
    kind with a video of several spans all at once. Another server's encodings are not computed."""
    if mm_inputs is None:
        return
    kinds: dict[Any, list[Any]] = defaultdict(list)
    for item in mm_inputs.mm_items:
        if item is not None and item.offsets and item.precomputed_embeddings is None:
            kinds[item.modality].append(item)
    for items in kinds.values():
        if all(len(item.offsets) == 1 or item.is_audio() for item in items):
            yield from (_Part(item.hash, item.offsets) for item in items)
        else:
            key = MultiModalStaticCache.combine_hashes([item.hash for item in items])
            yield _Part(key or 0, [span for item in items for span in item.offsets])
