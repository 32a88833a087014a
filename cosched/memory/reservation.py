"""KV memory kept for online requests: what a kind of reservation does."""

from __future__ import annotations

from typing import Protocol


class Reservation(Protocol):
    """How much of the memory is kept.

    counts_returning  `sample` also counts contexts that are expected back
    """

    counts_returning: bool

    def arrived(self, now_s: float) -> None:
        """An online request has arrived."""
        ...

    def sample(self, num_tokens: int, now_s: float) -> None:
        """Online requests hold that many tokens now."""
        ...

    def tokens(self, total: int) -> int:
        """Of `total` ones."""
        ...


class ReturningReservation:
    """What online requests hold, and contexts that are expected back, as far as their loss would
    make a request late: the order of eviction protects them from what waits, and not from offline
    requests that run. How much chat held earlier does not count: in a burst an online request takes
    the memory of offline ones at once (docs/results/kv_memory.md)."""

    counts_returning = True

    def __init__(self, *, window_s: float, deviations: float) -> None:
        self._now = 0

    def arrived(self, now_s: float) -> None:
        """It is seen in what they hold."""

    def sample(self, num_tokens: int, now_s: float) -> None:
        self._now = num_tokens

    def tokens(self, total: int) -> int:
        return min(self._now, total)
