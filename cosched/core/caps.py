"""The engine's limits, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["EngineCaps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCaps:
    """What the engine underneath can run in one iteration.

    page_size               KV tokens per page; chunk ends are rounded down to it
    max_running_requests    most requests in the running batch
    max_chunk_tokens        token budget of one iteration: prefill plus mixed-in decode
                            (SGLang ``--chunked-prefill-size``); None: prompts are never split
    max_prefill_tokens      most prefill tokens in one iteration (``--max-prefill-tokens``)
    max_prefills            most requests that compute prompt tokens in one iteration
                            (``--prefill-max-requests``); None: as many as find slots
    max_unfinished_prefills most requests whose prefill may end the iteration unfinished
    max_reserved_tokens     most output tokens reserved for one request at admission
    chunk_align             the size of a chunk that leaves its prefill unfinished is a multiple of
                            this [tokens] (deterministic inference); 1: any number of pages
    max_adapters            most LoRA adapters in one batch, the model's own weights counted as one;
                            None: no LoRA
    mixed_batches           prefill and decode may share an iteration (``--enable-mixed-chunk``)
    partial_decode          the decode of a running request may pause for an iteration
    promises                `Plan.promise` and `loans` replace the engine's own reserve
    shared_prefix           the KV of a shared prefix is read once for all its decodes
    decode_reserve          KV tokens that a request must have beyond its computed ones to decode;
                            above 1 with speculative decoding
    takes_turns             with DP attention and drafts: while one rank computes prefills, the
                            decodes of all others wait
    """

    page_size: int
    max_running_requests: int
    max_chunk_tokens: int | None
    max_prefill_tokens: int
    max_prefills: int | None = None
    max_unfinished_prefills: int = 1
    max_reserved_tokens: int = 4096
    chunk_align: int = 1
    max_adapters: int | None = None
    mixed_batches: bool = True
    partial_decode: bool = False
    promises: bool = False
    shared_prefix: bool = False
    decode_reserve: int = 1
    takes_turns: bool = False

    def __post_init__(self) -> None:
        assert self.page_size >= 1, f"{self.page_size=}"
        assert self.max_running_requests >= 1, f"{self.max_running_requests=}"
        assert self.max_chunk_tokens is None or self.max_chunk_tokens >= self.page_size, (
            f"{self.max_chunk_tokens=} {self.page_size=}"
        )

    @property
    def chunk_unit(self) -> int:
        """The size of a chunk that leaves its prefill unfinished, and begins on a page boundary, is
        a multiple of this [tokens]."""
        return math.lcm(self.page_size, self.chunk_align)

    def ceil_to_page(self, num_tokens: int) -> int:
        """KV tokens that `num_tokens` occupy when they start on a page boundary."""
        return -(-num_tokens // self.page_size) * self.page_size
