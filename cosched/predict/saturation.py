"""What online requests need of a device by their targets, as a share of what there is.

Per second they need so many prompt tokens and so many decodes. With more of them in one iteration
each costs less, so the device does most in the longest iterations that the TPOT target, the slots
and the KV memory allow:

    iteration(s)   the prompt tokens and decodes of s seconds
    s*             the largest s of which iteration(s) takes no longer than the TPOT target, and
                   whose decodes have slots and memory
    saturation     time of iteration(s*) / s*

At 1.0 iterations at the TPOT target keep up with what comes, and no more. The same search as that
of the bound of a job (`most_per_s`), with what comes in a second as the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cosched.core.batch import BatchTotals
from cosched.predict.line_cost import CHUNK_TOKENS, most_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRates:
    """Online requests as they come.

    requests_per_s  how many come [1/s]
    num_new         prompt tokens of one to compute, in the mean
    num_cached      its prompt tokens that are cached, in the mean
    num_decodes     decodes of its reply, in the mean
    context         tokens that a decode attends to, in the mean
    tpot_s          the tightest target [s]; inf: there is none
    """

    requests_per_s: float
    num_new: float
    num_cached: float
    num_decodes: float
    context: float
    tpot_s: float = math.inf

    def iteration(self, seconds: float) -> BatchTotals:
        """With what comes in that time."""
        totals = BatchTotals()
        num_requests = seconds * self.requests_per_s
        num_new, each = round(num_requests * self.num_new), max(round(self.num_new), 1)
        num_whole, rest = divmod(num_new, each)
        totals.add_prefills(num_whole, each, round(self.num_cached))
        if rest:
            totals.add_prefill(rest, round(self.num_cached))
        totals.add_equal_decodes(
            round(num_requests * self.num_decodes), max(round(self.context), 1)
        )
        return totals


def saturation(
    rates: ChatRates,
    predict_s: Callable[[BatchTotals], float],
    *,
    max_running: int,
    kv_tokens: int,
) -> float:
    """Of a device with that many slots and KV tokens; 0 without requests. A TPOT target that not
    even a single decode would meet does not count: no number of replicas helps there."""
    if not rates.requests_per_s:
        return 0.0
    one = BatchTotals()
    one.add_decode(max(round(rates.context), 1))
    limit_s = rates.tpot_s if predict_s(one) < rates.tpot_s else math.inf
    decodes_per_s = rates.requests_per_s * rates.num_decodes
    tokens_per_s = rates.requests_per_s * rates.num_new
    most_decodes = max(1.0, min(max_running, kv_tokens / max(rates.context, 1.0)))
    largest = min(
        most_decodes / decodes_per_s if decodes_per_s else math.inf,
        CHUNK_TOKENS / tokens_per_s if tokens_per_s else math.inf,
    )
    # `most_per_s` asks for a part of the job, here of what comes in a second.
    most = most_per_s(
        lambda seconds, _: predict_s(rates.iteration(seconds)), largest=largest, limit_s=limit_s
    )
    return 1 / most if most else math.inf
