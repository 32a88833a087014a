"""KV kept for online requests: mean and deviations of their demand in a sliding window (Echo §5.3).

Echo bounds what offline requests may hold by what online ones held in the last hour: mean plus two
deviations. The default's reservation is `cosched.memory.reservation.DemandReservation`.
"""

from __future__ import annotations

from cosched.memory.reservation import OnlineDemand


class EchoReservation:
    """Mean plus deviations of what online requests hold."""

    counts_returning = False

    def __init__(self, *, window_s: float = 3600.0, deviations: float = 2.0) -> None:
        self._demand = OnlineDemand(window_s=window_s, deviations=deviations)

    def arrived(self, now_s: float) -> None:
        """It is seen in the demand."""

    def sample(self, num_tokens: int, now_s: float) -> None:
        self._demand.sample(num_tokens, now_s)

    def tokens(self, total: int) -> int:
        return min(self._demand.threshold, total)
