"""KV memory kept for online requests: what a kind of reservation does."""

from __future__ import annotations

from typing import Protocol


class Reservation(Protocol):
    """How much of the memory is kept."""

    def arrived(self, now_s: float) -> None:
        """An online request has arrived."""
        ...

    def sample(self, num_tokens: int, now_s: float) -> None:
        """Online requests hold that many tokens now."""
        ...

    def tokens(self, total: int) -> int:
        """Of `total` ones."""
        ...
