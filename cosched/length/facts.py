"""What is known of a response before its first token."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["ROOT", "Cells", "Facts", "cells_of"]

Cells: TypeAlias = tuple[tuple[int, float], ...]
"""(hash of a likeness, requests that what is known of the wider ones counts as beside its own)."""

ROOT = 0
"""The widest likeness: all requests."""

_PRIOR, _PRIOR_OF_PROMPT = 5.0, 1.0
"""The very same prompt, answered once, says more than that of a few others."""

_SHORT_HEAD, _LONG_HEAD = 16, 64
"""Tokens at the head of a prompt that make its template."""
_ENDS = 128
"""A prompt longer than twice this is told from others by so many tokens at each of its ends, and
its length: hashing all of a long document would take longer than is worth it."""
_COARSE, _FINE = 4, 16
"""Classes of prompt length per octave."""


class Facts(NamedTuple):
    """rid      its id
    kind     requests of different kinds are never taken for alike: class, adapter, tenant, grammar
    prompt   token ids: an array, or anything that can be sliced and made a tuple
    limit    the most output tokens that it may generate
    hint     output tokens that the client expects; None: it says nothing
    num_prompt_tokens  where they are not those of `prompt`: of a trace that tells only lengths
    """

    rid: str
    kind: Hashable
    prompt: Sequence[int]
    limit: int
    hint: int | None = None
    num_prompt_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return len(self.prompt) if self.num_prompt_tokens is None else self.num_prompt_tokens


def cells_of(facts: Facts) -> Cells:
    """The likenesses of a request, as hashes, from the widest to the narrowest: all; its kind and
    the octave of its limit; its prompt's length by quarter and by sixteenth of an octave; its
    template, by a short and by a long head; both; the very prompt.

    Hashes are equal within a process only. They never leave it, and nothing follows from their
    order.
    """
    prompt = facts.prompt
    num_tokens = facts.num_tokens
    kind = hash((facts.kind, facts.limit.bit_length()))
    octaves = math.log2(num_tokens) if num_tokens > 0 else 0.0
    coarse = int(octaves * _COARSE)
    keys = [ROOT, kind, hash((kind, 1, coarse)), hash((kind, 2, int(octaves * _FINE)))]
    if len(prompt) >= _SHORT_HEAD:
        keys.append(hash((kind, 3, _key(prompt[:_SHORT_HEAD]))))
    if len(prompt) >= _LONG_HEAD:
        head = hash((kind, 4, _key(prompt[:_LONG_HEAD])))
        keys += (head, hash((head, coarse)))
    cells = [(key, _PRIOR) for key in keys]
    if len(prompt) > 2 * _ENDS:
        ends = _key(prompt[:_ENDS]), _key(prompt[-_ENDS:])
        cells.append((hash((kind, 6, ends, len(prompt))), _PRIOR_OF_PROMPT))
    elif len(prompt):
        cells.append((hash((kind, 5, _key(prompt))), _PRIOR_OF_PROMPT))
    return tuple(cells)


def _key(tokens: Sequence[int]) -> Hashable:
    # An array hashes its bytes; others (tests, traces) are tuples of the same ids.
    return tokens.tobytes() if hasattr(tokens, "tobytes") else tuple(tokens)
