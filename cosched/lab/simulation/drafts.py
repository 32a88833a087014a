"""Speculative decoding of a simulated server: what a decode with drafts costs, and what it brings.

Cost: the served model verifies all drafted tokens in one pass. They go through its layers like
other tokens; the KV of a context is read once. Drafting takes `DRAFT_SHARE` of a decode for each
token, about one layer of a model of 32 and the output layer (EAGLE, MTP).

Accepted tokens: each drafted token of a request is right with the same probability, if those before
it are; requests may differ (`Acceptance.of`). The draws depend on request and position only: they
are the same under every policy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from cosched.core.batch import BatchShape

DRAFT_SHARE = 0.05


def verified_s(shape: BatchShape, iteration_s: Callable[[BatchShape], float]) -> float:
    """Time of an iteration that may verify drafts (`BatchShape.num_drafts`) [s]."""
    if not shape.num_drafts or not shape.decodes:
        return iteration_s(shape)
    plain = replace(shape, num_drafts=0)
    # A drafted token costs what a decode over a single token costs.
    drafted = [1] * (shape.num_drafts * len(shape.decodes))
    verified = replace(plain, decodes=[*shape.decodes, *drafted])
    return iteration_s(verified) + shape.num_drafts * DRAFT_SHARE * iteration_s(plain)


class Acceptance(NamedTuple):
    """How likely a drafted token is right if those before it are: `mean`, and the most by which a
    request differs from it."""

    mean: float = 0.0
    spread: float = 0.0

    def of(self, rid: str) -> float:
        """Of one request: uniform within `spread` of the mean, and within [0, 1]."""
        draw = zlib.crc32(f"{rid} drafts".encode()) / 2**32
        return min(max(self.mean + self.spread * (2 * draw - 1), 0.0), 1.0)

    def num_generated(self, rid: str, num_output: int, *, num_drafts: int) -> int:
        """Tokens that a request with `num_output` generated ones gets in a decode, from 1 to
        `num_drafts` + 1."""
        acceptance, number = self.of(rid), 1
        while number <= num_drafts:
            draw = zlib.crc32(f"{rid}:{num_output + number}".encode()) / 2**32
            if draw >= acceptance:
                break
            number += 1
        return number


NO_DRAFTS = Acceptance()
