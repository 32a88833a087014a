"""Memory that requests need beside the KV of full attention: state slots, or the KV of windows."""

from __future__ import annotations

from typing import Protocol

from cosched.core.caps import EngineCaps
from cosched.core.kv_state import Match
from cosched.core.request import Request
from cosched.core.view import View
from cosched.schedule.window_ledger import WindowLedger


class SideLedger(Protocol):
    """The free part of one such memory while a plan grows. `Ledger` asks it beside its own limits
    and tells it what it charges and refunds."""

    def fork(self) -> SideLedger:
        """A copy for a trial."""
        ...

    def refuses(self, request: Request, match: Match) -> bool:
        """True if a waiting request cannot be admitted, even with its shortest chunk."""
        ...

    def most_tokens(self, request: Request, num_cached: int) -> int | None:
        """Most prompt tokens that a request can compute in this iteration; None: any number."""
        ...

    def charge_admission(self, request: Request, match: Match, num_tokens: int) -> None:
        """A waiting request is admitted with this number of prompt tokens."""
        ...

    def charge_continuation(self, request: Request, num_tokens: int) -> None:
        """An unfinished prefill continues."""
        ...

    def refund_preemption(self, request: Request) -> None:
        """A running request or an unfinished prefill is preempted."""
        ...

    def refund_pauses(self, num_tokens: int) -> None:
        """Running requests whose decodes would take this number of KV tokens pause; negative: they
        decode after all."""
        ...

    def decodes_fit(self) -> bool:
        """The decodes that are in have memory."""
        ...


def side_ledgers(view: View) -> tuple[SideLedger, ...]:
    """One for each memory beside the KV that the engine has."""
    sides: list[SideLedger] = []
    if view.states is not None:
        sides.append(StateLedger(view.states.free + view.states.evictable, view.caps))
    if view.window_kv is not None:
        sides.append(WindowLedger(view, view.window_kv))
    return tuple(sides)


class StateLedger:
    """State slots. Each request may take as many, whatever its length."""

    def __init__(self, num_left: int, caps: EngineCaps) -> None:
        self._num_left = num_left
        self._caps = caps

    def fork(self) -> StateLedger:
        return StateLedger(self._num_left, self._caps)

    def refuses(self, request: Request, match: Match) -> bool:
        return self._num_left < self._caps.states_per_request * request.traits.num_rows

    def most_tokens(self, request: Request, num_cached: int) -> int | None:
        return None

    def charge_admission(self, request: Request, match: Match, num_tokens: int) -> None:
        self._num_left -= self._caps.states_per_request * request.traits.num_rows

    def charge_continuation(self, request: Request, num_tokens: int) -> None:
        """It has its slots."""

    def refund_preemption(self, request: Request) -> None:
        self._num_left += self._caps.states_held

    def refund_pauses(self, num_tokens: int) -> None:
        """They keep their slots."""

    def decodes_fit(self) -> bool:
        return True
