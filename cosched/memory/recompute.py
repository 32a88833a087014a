"""Limit on the device time that goes into recomputing what preempted requests have lost.

A preempted request resumes from its KV that is still cached. Where memory is short for long,
admitted requests evict what preempted ones need, are preempted in turn, and little is finished:
SGLang's issue 26248 reports a fourteenth of the rate, which does not recover. Counting preemptions
would not tell such a collapse from preemptions that cost nothing, so their cost is counted.
"""

from __future__ import annotations


class RecomputeBudget:
    """A bucket of seconds that fills at `share` seconds per second up to `most_s`; recomputation is
    paid from it. While it is overdrawn no offline request is admitted: what runs ends and frees
    memory, so it is also the hysteresis between a preemption and the next admission.
    """

    def __init__(self, *, share: float, most_s: float) -> None:
        """share: of the time, between 0 and 1."""
        self._share = share
        self._most_s = most_s
        self._left_s = most_s
        self._at_s: float | None = None
        """When that was left; None: nothing was ever paid."""

    def pay(self, seconds: float, now_s: float) -> None:
        """`seconds` of the device's time went into it."""
        self._left_s = self._left(now_s) - seconds
        self._at_s = now_s

    def debt_s(self, now_s: float) -> float:
        """By how much it is overdrawn [s]; 0.0: it is not."""
        return max(-self._left(now_s), 0.0)

    def _left(self, now_s: float) -> float:
        if self._at_s is None:
            return self._most_s
        return min(self._left_s + self._share * (now_s - self._at_s), self._most_s)
