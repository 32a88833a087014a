"""What is estimated of the future: how long an iteration takes, how long an output gets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol

from cosched.core.batch import QUERY_TILE, BatchTotals

__all__ = ["LengthEstimate", "Predictor", "largest_prefill"]


class LengthEstimate(NamedTuple):
    """Output tokens that a request is still to generate.

    median  it is as likely to generate fewer as more
    upper   it generates no more than these, but for few
    ends    of the *whole* output, rising, when it was last looked at: it may end with each, with
            one as likely as with another. Those that it has passed are none any more. Without any
            it ends when `upper` have come
    """

    median: int
    upper: int
    ends: tuple[int, ...] = ()

    def ends_left(self, num_output: int) -> tuple[int, ...]:
        """Tokens until each possible end that a request with `num_output` tokens has not passed; at
        least one."""
        left = tuple(end - num_output for end in self.ends if end > num_output)
        return left or (1 if self.ends else self.upper,)


class Predictor(Protocol):
    """Predicts how long an iteration takes.

    Pure: the same totals give the same seconds. More tokens in a prefill never make a prediction
    smaller, rounding included; `max_prefill` relies on it.
    """

    @property
    def name(self) -> str: ...

    @property
    def margin(self) -> float:
        """Share by which predictions exceed the expected time, because of disturbances. A limit on
        one iteration needs it; a sum over many does not."""
        return 0.0

    def predict_s(self, totals: BatchTotals) -> float:
        """Time of the iteration [s]; 0.0 for an empty one. Never raises."""
        ...

    def knows(self, totals: BatchTotals) -> bool:
        """False: it guesses, since no iteration as large has been seen."""
        return True

    def max_prefill(
        self, totals: BatchTotals, num_cached: int, limit_s: float, limit_tokens: int
    ) -> int:
        """The largest n in 0..limit_tokens for which the iteration with one more prefill, of n
        tokens over `num_cached`, is predicted to take at most `limit_s`; 0 when not even one token
        fits. The exact inverse of `predict_s` (HyGen Alg. 1, get_max_prefill, without its memory
        budget). Does not change `totals`."""
        return largest_prefill(self.predict_s, totals, num_cached, limit_s, limit_tokens)

    def describe(self) -> dict[str, object]:
        """What the predictor is, for a results file: plain JSON values."""
        ...


def largest_prefill(
    predict_s: Callable[[BatchTotals], float],
    totals: BatchTotals,
    num_cached: int,
    limit_s: float,
    limit_tokens: int,
) -> int:
    """`Predictor.max_prefill` by bisection of `predict_s`: about 14 predictions for 8192 tokens."""
    trial = totals.copy()
    trial.num_prefills += 1
    trial.num_cached += num_cached
    num_new, pairs, tail_pairs = totals.num_new, totals.double_pairs, totals.double_tail_pairs
    longest = totals.max_prefill_context
    twice_cached = 2 * num_cached
    twice_tail_start = 2 * (num_cached + QUERY_TILE)

    def seconds(n: int) -> float:
        trial.num_new = num_new + n
        trial.double_pairs = pairs + n * (twice_cached + n)
        tail = n - QUERY_TILE
        trial.double_tail_pairs = (
            tail_pairs + tail * (twice_tail_start + tail) if tail > 0 else tail_pairs
        )
        context = n + num_cached
        trial.max_prefill_context = context if context > longest else longest
        return predict_s(trial)

    if limit_tokens <= 0 or seconds(limit_tokens) <= limit_s:  # most prompts fit whole
        return max(limit_tokens, 0)
    return bisect_right(range(1, limit_tokens), limit_s, key=seconds)
