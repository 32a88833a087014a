"""How much of the device's time may go into computing anew what stops have lost.

A stopped request resumes from what is left of its KV. Where memory is short for long, what is
admitted pushes out what was stopped, resumes in its turn, is pushed out again, and hardly anything
is finished: SGLang's issue 26248 reports a fourteenth of the rate, which does not recover. Counting
stops would not tell such a collapse from stops that cost nothing, so what they cost is counted.
"""

from __future__ import annotations


class RecomputeBudget:
    """A bucket of seconds that fills at `share` seconds per second up to `most_s`; what is computed
    anew is paid from it. While it is overdrawn nothing new is admitted offline: what runs goes on,
    ends, and leaves room, so it is also the hysteresis between a stop and the next admission.
    """

    def __init__(self, *, share: float, most_s: float) -> None:
        """share: of the time, between 0 and 1."""
        self._share = share
        self._most_s = most_s
        self._left_s = most_s
        self._at_s: float | None = None
        """When that was left; None: nothing was ever paid."""

    def pay(self, seconds: float, now_s: float) -> None:
        """So much of the device's time went into it [s]."""
        self._left_s = self._left(now_s) - seconds
        self._at_s = now_s

    def debt_s(self, now_s: float) -> float:
        """By how much it is overdrawn [s]; 0.0: it is not."""
        return max(-self._left(now_s), 0.0)

    def _left(self, now_s: float) -> float:
        if self._at_s is None:
            return self._most_s
        return min(self._left_s + self._share * (now_s - self._at_s), self._most_s)
