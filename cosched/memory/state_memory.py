"""State slots: what state-space and linear-attention layers keep of a request."""

from __future__ import annotations

from collections.abc import Callable

from cosched.core.kv_state import Match
from cosched.core.memories import Memory
from cosched.core.plan import SkipReason
from cosched.core.request import Request


class StateMemory(Memory):
    """Each request may take as many slots, whatever its length. A node of the radix tree may have
    one, a checkpoint: its prefix is reusable up to there."""

    name = "states"
    has_checkpoints = True

    def __init__(
        self,
        num_left: int,
        *,
        per_request: int,
        held: int,
        num_kept: Callable[[Request], int],
        least_chunk: int = 1,
    ) -> None:
        """num_left: slots that are free or have an unused checkpoint. per_request: most that a
        request takes. held: those that preempting it frees at least. num_kept: its tokens up to its
        last checkpoint."""
        self._num_left = num_left
        self._per_request = per_request
        self._held = held
        self._num_kept = num_kept
        self.least_chunk = least_chunk

    def refuses(self, request: Request, match: Match) -> SkipReason | None:
        fits = self._num_left >= self._per_request * request.traits.num_rows
        return None if fits else SkipReason.MEMORY_BUDGET

    def admit(self, request: Request, match: Match, num_tokens: int) -> None:
        self._num_left -= self._per_request * request.traits.num_rows

    def preempt(self, request: Request) -> None:
        self._num_left += self._held

    def num_kept(self, request: Request) -> int:
        return self._num_kept(request)
