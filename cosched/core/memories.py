"""Kinds of memory that an engine may have: what a plan asks of each.

The KV of full attention is one of them (`cosched.memory.kv_memory`), and every engine has it. A
kind is a file in `cosched.memory` with a subclass of `Memory`, and its reader in
`cosched.engine.port.memory_kinds`.
"""

from __future__ import annotations

import sys
from typing import ClassVar, Self

from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.core.request import Request


class Memory:
    """What is left of one kind of memory while a plan grows: a ledger copies it as it is at the
    moment of planning (`View.memories`), and says what the plan spends. A kind defines what it
    limits; all else costs nothing.

    name  under which `Match.others` has it
    """

    name: ClassVar[str]

    def fork(self) -> Self:
        """A copy for a trial."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    # --- What fits ---

    def refuses(self, request: Request, match: Match) -> SkipReason | None:
        """Why a waiting request cannot be admitted, even with its shortest chunk; None: it can."""
        return None

    def most_tokens(self, request: Request, match: Match | None) -> int:
        """Most prompt tokens that a request can compute in this iteration. match: of a waiting one;
        None: it is an unfinished prefill."""
        return sys.maxsize

    def can_decode(self, num_requests: int = 0, num_tokens: int = 0) -> bool:
        """The decodes that are in have memory, and so many more requests whose decodes take this
        number of KV tokens."""
        return True

    # --- What is spent ---

    def admit(self, request: Request, match: Match, num_tokens: int) -> None:
        """A waiting request is admitted with this number of prompt tokens."""

    def proceed(self, request: Request, num_tokens: int) -> None:
        """An unfinished prefill computes so many more."""

    def preempt(self, request: Request) -> None:
        """A running request or an unfinished prefill releases what it holds."""

    def pause(self, num_requests: int, num_tokens: int) -> None:
        """So many running requests pause, whose decodes would take this number of KV tokens;
        negative: they decode after all."""

    # --- What a preemption loses ---

    has_checkpoints: bool = False
    """A prefix is found again only up to a checkpoint, where a chunk ended."""

    least_chunk: int = 1
    """Prompt tokens of the shortest chunk that leaves a checkpoint."""

    def num_kept(self, request: Request) -> int:
        """Computed tokens of a running request or an unfinished prefill that it finds again when it
        resumes, unless they are evicted. O(1)."""
        return request.num_computed_tokens

    def num_lost(self, request: Request) -> int:
        """Those that it is expected to have lost when it resumes."""
        return request.num_computed_tokens - self.num_kept(request)

    def can_copy(self, num_tokens: int) -> bool:
        """It takes a copy of so much KV of a preempted request (`PreemptMode.CHECKPOINT`)."""
        return False
