"""The shape of one iteration: what its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BatchShape", "Prefill"]


class Prefill(NamedTuple):
    """One request's prefill in an iteration [tokens].

    num_new     prompt tokens computed now
    num_cached  tokens before them whose KV is there already (cached prefix, earlier chunks)
    """

    num_new: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """One forward pass.

    prefills  the prefill part, one entry per request
    decodes   context length of each decoding request: tokens attended to, its new one included
    """

    prefills: Sequence[Prefill] = ()
    decodes: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens through the model's layers: all new prompt tokens and one per decode."""
        return sum(p.num_new for p in self.prefills) + len(self.decodes)

    @property
    def num_sequences(self) -> int:
        return len(self.prefills) + len(self.decodes)
